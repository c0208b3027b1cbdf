"""The training loss of k3-nano: cross-entropy on the tokens the model must produce."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from k3jax.config import K3Config
from k3jax.model.attn_res import next_input
from k3jax.model.backbone import embed, logits
from k3jax.model.kda import kda
from k3jax.model.layers import mlp
from k3jax.model.mla import mla
from k3jax.model.moe import moe, route
from k3jax.model.params import K3Params, KDAParams, MoEParams
from k3jax.quant import fake_quantize
from k3jax.state import Spans
from scripts.nano.corpus import TASK_NAMES, Batch


class Targets(struct.PyTreeNode):
    """A batch as the loss reads it; every shape depends on the batch's shape alone."""

    tokens: Int32[Array, "row token"]
    lengths: Int32[Array, "row"]
    places: Int32[Array, "target"]
    """Flat index `row · width + token` whose logits predict the target."""
    labels: Int32[Array, "target"]
    tasks: Int32[Array, "target"]
    """Number of the task in `TASK_NAMES`, -1 for filling."""
    rows: Int32[Array, "target"]


class Scores(struct.PyTreeNode):
    """Sums over a batch."""

    losses: Float32[Array, "task"]
    counts: Float32[Array, "task"]
    loads: Float32[Array, "sparse_layer expert"]
    """Share of the routed choices that went to each expert."""
    rows_right: Float32[Array, "row"]
    """1 where the most likely token is right at every target of the row."""


def targets(batch: Batch, share: float = 0.5) -> Targets:
    """Collect what must be predicted, filled up (or cut) to `share` of all positions."""
    rows, width = batch.tokens.shape
    row, column = np.nonzero(batch.task >= 0)
    row, column = row[column > 0], column[column > 0]
    size = int(rows * width * share)
    row, column = row[:size], column[:size]
    fill = (0, size - len(row))
    return Targets(
        tokens=jnp.asarray(batch.tokens),
        lengths=jnp.asarray(batch.lengths),
        places=jnp.asarray(np.pad(row * width + column - 1, fill), jnp.int32),
        labels=jnp.asarray(np.pad(batch.tokens[row, column], fill)),
        tasks=jnp.asarray(np.pad(batch.task[row, column], fill, constant_values=-1)),
        rows=jnp.asarray(np.pad(row, fill), jnp.int32),
    )


def loss(params: K3Params, config: K3Config, batch: Targets) -> tuple[Float32[Array, ""], Scores]:
    """Mean cross-entropy over the targets. `params` are floats; experts are rounded to MXFP4."""
    hidden, loads = hidden_states(as_released(params), config, batch.tokens, batch.lengths)
    picked = hidden.reshape(-1, hidden.shape[-1])[batch.places]
    scores = logits(params, picked)
    per_target = jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(
        scores, batch.labels[:, None], -1
    ).squeeze(-1)
    real = batch.tasks >= 0
    number = jnp.where(real, batch.tasks, len(TASK_NAMES))
    losses = jnp.zeros(len(TASK_NAMES) + 1).at[number].add(per_target)[:-1]
    counts = jnp.zeros(len(TASK_NAMES) + 1).at[number].add(1.0)[:-1]
    wrong = (scores.argmax(-1) != batch.labels) & real
    rows_right = jnp.ones(batch.tokens.shape[0]).at[batch.rows].multiply(1.0 - wrong)
    return losses.sum() / counts.sum(), Scores(losses, counts, loads, rows_right)


def as_released(params: K3Params) -> K3Params:
    """Experts as MXFP4 will store them, with gradients passed straight through."""

    def rounded(layer: Any) -> Any:
        if not isinstance(layer.ffn, MoEParams):
            return layer
        gate_up, down = layer.ffn.gate_up, layer.ffn.down
        assert isinstance(gate_up, jax.Array) and isinstance(down, jax.Array)
        ffn = layer.ffn.replace(
            gate_up=fake_quantize(gate_up, "mxfp4"),
            down=fake_quantize(down, "mxfp4"),
        )
        return layer.replace(ffn=ffn)

    return params.replace(layers=tuple(rounded(layer) for layer in params.layers))


def trainable(config: K3Config) -> K3Config:
    """The same model with experts held as floats."""
    return dataclasses.replace(config, expert_format=None)


def hidden_states(
    params: K3Params,
    config: K3Config,
    tokens: Int32[Array, "row token"],
    lengths: Int32[Array, "row"],
) -> tuple[Float[Array, "row token hidden"], Float32[Array, "sparse_layer expert"]]:
    """`k3jax.model.backbone.forward` of whole sequences, which also reports the experts' loads."""
    spans = Spans.fresh(lengths)
    real = spans.token_mask(tokens.shape[1])
    x, bank, loads = embed(params, tokens), [], []
    y: Array | None = None
    for number, layer in enumerate(params.layers):
        x, h = next_input(layer.mixer_mix, config, layer.mixer_norm, bank, x, y)
        restart = config.starts_depth_block(number)
        bank += [x] if restart else []
        mixer = kda if isinstance(layer.mixer, KDAParams) else mla
        y, _ = mixer(layer.mixer, config, h, spans, None)  # type: ignore[arg-type]
        x, y = (y, None) if restart else (x, y)
        x, h = next_input(layer.ffn_mix, config, layer.ffn_norm, bank, x, y)
        if isinstance(layer.ffn, MoEParams):
            y = moe(layer.ffn, config, h, real)
            loads.append(_loads(layer.ffn, config, h, real))
        else:
            y = mlp(layer.ffn, config, h)
    _, h = next_input(params.final_mix, config, params.final_norm, bank, x, y)
    return h, jnp.stack(loads)


def _loads(params: MoEParams, config: K3Config, h: Array, real: Array) -> Array:
    scores = h.reshape(-1, h.shape[-1]) @ params.router.T
    chosen, _ = route(jax.lax.stop_gradient(scores), params.score_bias, config)
    hits = jax.nn.one_hot(chosen, config.num_experts).sum(1) * real.reshape(-1, 1)
    return hits.sum(0) / jnp.maximum(hits.sum(), 1.0)
