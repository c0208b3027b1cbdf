"""The Kimi Delta Attention mixer: projections, short convolution, gates, recurrence, output."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from k3jax.config import K3Config
from k3jax.model.params import KDAParams
from k3jax.quant import matmul
from k3jax.state.recurrent import read_slots, write_slots
from k3jax.state.spans import Spans
from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.kda import (
    causal_conv,
    conv_window,
    gated_rms_norm,
    kda_chunk,
    kda_decode,
    l2_norm,
    log_decay_gate,
)
from pallas_kernels.kda.mixer_step import StepInputs, StepPools, StepWeights, kda_mixer_step
from pallas_kernels.kda.prefill import kda_prefill
from pallas_kernels.kda.verify import Trace, kda_replay, kda_verify

Pools = tuple[Float32[Array, "slot head key value"], Float[Array, "slot tap channel"]]

Tokens = tuple[Array, Array, Array, Array, Array]
"""Queries, keys, values, log decays [row, token, head, channel]; write strengths."""


class KDATrace(NamedTuple):
    """What verifying leaves behind of every token, in one layer."""

    recurrence: Trace
    projected: Float[Array, "row token channel"]
    """Raw q, k, v projections, of which convolution windows are made."""


def kda(
    params: KDAParams,
    config: K3Config,
    x: Float[Array, "row token hidden"],
    spans: Spans,
    pools: Pools | None,
) -> tuple[Float[Array, "row token hidden"], Pools | None]:
    """One KDA sublayer over normed inputs; returns its output and the updated pools.

    `pools` are this layer's state matrices and convolution windows; None computes whole
    sequences from zero and keeps nothing. Padding changes neither. Source:
    `KimiDeltaAttention` of the released modeling file; K3 report 2.1.
    """
    tokens, bound = x.shape[1], config.kda_gate_lower_bound
    projected = matmul(x, params.qkv)
    if pools is not None and tokens == 1 and chosen("kda_decode") is not Implementation.XLA:
        return _fused_step(params, config, x, projected, spans, pools)
    inputs, window = _inputs(params, config, x, projected, spans, pools)
    if pools is None:
        o, _ = kda_chunk(*_masked(inputs, spans), None, log_decay_bound=bound)
        return _output(params, config, x, o), None
    lengths, reads = jnp.asarray(spans.lengths), jnp.asarray(spans.read_slots)
    writes = _written(spans)
    if tokens == 1:
        q, k, v, log_decay, beta = (a[:, 0] for a in _masked(inputs, spans))
        o, matrices = kda_decode(q, k, v, log_decay, beta, pools[0], reads, writes)
        o = o[:, None]
    else:
        o, matrices = kda_prefill(*inputs, lengths, pools[0], reads, writes, log_decay_bound=bound)
    pools = (matrices, write_slots(pools[1], writes, window))
    return _output(params, config, x, o), pools


def verify_kda(
    params: KDAParams,
    config: K3Config,
    x: Float[Array, "row token hidden"],
    spans: Spans,
    pools: Pools,
) -> tuple[Float[Array, "row token hidden"], KDATrace]:
    """`kda` of at most 8 tokens per row that may yet be refused: it leaves the pools alone.

    Returns its output, and what `replay_kda` needs to keep any number of the tokens.
    """
    projected = matmul(x, params.qkv)
    inputs, _ = _inputs(params, config, x, projected, spans, pools)
    lengths, reads = jnp.asarray(spans.lengths), jnp.asarray(spans.read_slots)
    o, trace = kda_verify(*inputs, lengths, pools[0], reads)
    return _output(params, config, x, o), KDATrace(trace, projected)


def replay_kda(trace: KDATrace, counts: Int[Array, "row"], spans: Spans, pools: Pools) -> Pools:
    """The pools after the first `counts` tokens of each row's verified span, in its write slot."""
    writes = _written(spans)
    # Tied to the counts: as the same read as verification's, it would live on until here.
    reads, counts = jax.lax.optimization_barrier((jnp.asarray(spans.read_slots), counts))
    matrices = kda_replay(trace.recurrence, counts, pools[0], reads, writes)
    window = conv_window(trace.projected, read_slots(pools[1], reads), counts)
    return matrices, write_slots(pools[1], writes, window)


def _inputs(
    params: KDAParams,
    config: K3Config,
    x: Float[Array, "row token hidden"],
    projected: Float[Array, "row token channel"],
    spans: Spans,
    pools: Pools | None,
) -> tuple[Tokens, Float[Array, "row tap channel"]]:
    """What the recurrence takes of each token, float32, and the convolution windows after them."""
    rows, tokens, _ = x.shape
    heads, key = config.kda_num_heads, config.kda_head_dim
    if pools is None:
        window = jnp.zeros((rows, config.kda_conv_size - 1, 3 * heads * key), x.dtype)
    else:
        window = read_slots(pools[1], spans.read_slots)
    mixed, window = causal_conv(projected, window, params.conv, jnp.asarray(spans.lengths))
    q, k, v = jnp.split(mixed.reshape(rows, tokens, 3 * heads, key), 3, axis=2)
    q, k, v = l2_norm(q) * key**-0.5, l2_norm(k), v.astype(jnp.float32)

    low_rank = matmul(matmul(x, params.decay_down), params.decay_up)
    log_decay = log_decay_gate(
        low_rank.reshape(rows, tokens, heads, key),
        params.decay_log_scale,
        params.decay_bias,
        config.kda_gate_lower_bound,
    )
    beta = jax.nn.sigmoid(matmul(x, params.beta).astype(jnp.float32))
    return (q, k, v, log_decay, beta), window


def _masked(inputs: Tokens, spans: Spans) -> Tokens:
    """The same with padding that leaves a state as it is."""
    q, k, v, log_decay, beta = inputs
    real = spans.token_mask(k.shape[1])[..., None]
    k, v, log_decay = (jnp.where(real[..., None], a, 0) for a in (k, v, log_decay))
    return q, k, v, log_decay, jnp.where(real, beta, 0)


def _written(spans: Spans) -> Int[Array, "row"]:
    """Write slots; none for padding rows."""
    return jnp.where(spans.lengths > 0, spans.write_slots, -1)


def _output(
    params: KDAParams,
    config: K3Config,
    x: Float[Array, "row token hidden"],
    o: Float32[Array, "row token head value"],
) -> Float[Array, "row token hidden"]:
    """Gated norm and output projection of what the recurrence gave."""
    gate = _output_gate(params, x).reshape(o.shape)
    o = gated_rms_norm(o, gate, params.out_norm, config.rms_norm_eps).astype(x.dtype)
    # In the heads' own shape: XLA's CPU code for joined heads does not vectorise.
    o = jax.lax.optimization_barrier(o)
    return matmul(o.reshape(*x.shape[:2], -1), params.out)


def _fused_step(
    params: KDAParams,
    config: K3Config,
    x: Float[Array, "row 1 hidden"],
    projected: Float[Array, "row 1 channel"],
    spans: Spans,
    pools: Pools,
) -> tuple[Float[Array, "row 1 hidden"], Pools]:
    """The mixer for one token per row, with one kernel for all between its projections."""
    rows = x.shape[0]
    by_head = (rows, config.kda_num_heads, config.kda_head_dim)
    o, new = kda_mixer_step(
        StepInputs(
            projected=projected[:, 0],
            decay=matmul(matmul(x, params.decay_down), params.decay_up).reshape(by_head),
            beta=matmul(x, params.beta)[:, 0],
            gate=_output_gate(params, x).reshape(by_head),
        ),
        StepWeights(params.conv, params.decay_log_scale, params.decay_bias, params.out_norm),
        StepPools(*pools),
        jnp.asarray(spans.read_slots),
        _written(spans),
        lower_bound=config.kda_gate_lower_bound,
        eps=config.rms_norm_eps,
    )
    return matmul(o.reshape(rows, 1, -1), params.out), (new.states, new.windows)


def _output_gate(
    params: KDAParams, x: Float[Array, "row token hidden"]
) -> Float[Array, "row token channel"]:
    """Logits of the output gate: full rank in K3, low rank in Kimi-Linear."""
    if params.gate is not None:
        return matmul(x, params.gate)
    assert params.gate_down is not None and params.gate_up is not None
    return matmul(matmul(x, params.gate_down), params.gate_up)
