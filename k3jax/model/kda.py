"""The Kimi Delta Attention mixer: projections, short convolution, gates, recurrence, output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from k3jax.config import K3Config
from k3jax.model.params import KDAParams
from k3jax.quant import matmul
from k3jax.state.recurrent import read_slots, write_slots
from k3jax.state.spans import Spans
from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.kda import (
    causal_conv,
    gated_rms_norm,
    kda_chunk,
    kda_decode,
    l2_norm,
    log_decay_gate,
)
from pallas_kernels.kda.mixer_step import StepInputs, StepPools, StepWeights, kda_mixer_step
from pallas_kernels.kda.prefill import kda_prefill

Pools = tuple[Float32[Array, "slot head key value"], Float[Array, "slot tap channel"]]


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
    rows, tokens, _ = x.shape
    heads, key = config.kda_num_heads, config.kda_head_dim
    bound = config.kda_gate_lower_bound
    projected = matmul(x, params.qkv)
    if pools is not None and tokens == 1 and chosen("kda_decode") is not Implementation.XLA:
        return _fused_step(params, config, x, projected, spans, pools)
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
        bound,
    )
    beta = jax.nn.sigmoid(matmul(x, params.beta).astype(jnp.float32))
    if pools is None or tokens == 1:
        real = spans.token_mask(tokens)[..., None]
        k, v, log_decay = (jnp.where(real[..., None], a, 0) for a in (k, v, log_decay))
        beta = jnp.where(real, beta, 0)

    if pools is None:
        o, _ = kda_chunk(q, k, v, log_decay, beta, None, log_decay_bound=bound)
    elif tokens == 1:
        writes = jnp.where(spans.lengths > 0, spans.write_slots, -1)
        o, matrices = kda_decode(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            log_decay[:, 0],
            beta[:, 0],
            pools[0],
            jnp.asarray(spans.read_slots),
            writes,
        )
        o = o[:, None]
        pools = (matrices, write_slots(pools[1], writes, window))
    else:
        writes = jnp.where(spans.lengths > 0, spans.write_slots, -1)
        o, matrices = kda_prefill(
            q,
            k,
            v,
            log_decay,
            beta,
            jnp.asarray(spans.lengths),
            pools[0],
            jnp.asarray(spans.read_slots),
            writes,
            log_decay_bound=bound,
        )
        pools = (matrices, write_slots(pools[1], writes, window))

    gate = _output_gate(params, x).reshape(rows, tokens, heads, key)
    o = gated_rms_norm(o, gate, params.out_norm, config.rms_norm_eps).astype(x.dtype)
    return matmul(o.reshape(rows, tokens, heads * key), params.out), pools


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
        jnp.where(spans.lengths > 0, spans.write_slots, -1),
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
