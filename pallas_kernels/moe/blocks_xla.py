"""Routed experts for many rows: each expert in use is fetched once for all its rows (CPU)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear import linear
from pallas_kernels.linear.mxfp4_xla import unpack_mxfp4
from pallas_kernels.moe.reference import Activation, Weight
from pallas_kernels.moe.routing import Routing


def experts_by_block(
    x: Float[Array, "row latent"],
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    activation: Activation,
    count: int,
    block: int,
) -> Float[Array, "row latent"]:
    """Loops over the experts that have pairs, and over each one's pairs in blocks.

    The weights are copied (or decoded) into a buffer per expert, which costs about as much as
    `block` = 16 rows. A block's rows past the expert's last pair belong to the next expert, which
    overwrites them: the order of the loop matters.
    """
    sizes = routing.sizes(count)
    starts = jnp.cumsum(sizes) - sizes
    in_use = jnp.argsort(sizes == 0, stable=True)

    def add_expert(step: jax.Array, sorted_out: jax.Array) -> jax.Array:
        expert = in_use[step]
        gate_up_e, down_e = jax.lax.optimization_barrier(
            (_fetch(gate_up, expert).astype(x.dtype), _fetch(down, expert).astype(x.dtype))
        )

        def add_block(step: jax.Array, sorted_out: jax.Array) -> jax.Array:
            start = starts[expert] + step * block
            rows, _ = routing.slice(start, block)
            gate, up = jnp.split(linear(x[rows], gate_up_e), 2, axis=-1)
            y = linear(activation(gate, up), down_e).astype(jnp.float32)
            return jax.lax.dynamic_update_slice_in_dim(sorted_out, y, start, 0)

        return jax.lax.fori_loop(0, -(-sizes[expert] // block), add_block, sorted_out)

    out = jnp.zeros((routing.padded_length(block), x.shape[1]), jnp.float32)
    return routing.combine(jax.lax.fori_loop(0, (sizes > 0).sum(), add_expert, out))


def _fetch(weight: Weight, expert: jax.Array) -> Float[Array, "out in"]:
    """One expert's float weight."""
    if not isinstance(weight, tuple):
        return _slice(weight, expert)
    values, scales = (_slice(leaf, expert) for leaf in weight)
    if values.dtype == jnp.uint8:
        return unpack_mxfp4(values, scales)
    return values.astype(jnp.float32) * scales[:, None]


def _slice(stack: jax.Array, expert: jax.Array) -> jax.Array:
    """`stack[expert]` as a run of the flattened stack, which XLA copies three times faster."""
    size = math.prod(stack.shape[1:])
    if stack.size > jnp.iinfo(jnp.int32).max:
        return jax.lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False)
    flat = jax.lax.dynamic_slice(stack.reshape(-1), (expert * size,), (size,))
    return flat.reshape(stack.shape[1:])
