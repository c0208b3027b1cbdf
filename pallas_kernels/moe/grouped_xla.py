"""Routed experts as batched products over blocks of equal length: static, differentiable, exact."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.moe.reference import Activation, Weight, decode
from pallas_kernels.moe.routing import Routing


def experts_by_group(
    x: Float[Array, "row latent"],
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    activation: Activation,
    count: int,
) -> Float[Array, "row latent"]:
    """Each expert's pairs, padded to whole blocks, times a gathered copy of its weights per block.

    The number of blocks is the most that any routing can need, so nothing is dropped. Gradients
    reach x, the routing's weights and float expert weights. Packed weights are decoded whole.
    """
    routing = routing.by_expert()
    total = routing.order.shape[0]
    block = max(8, min(256, total // count))
    blocks = total // block + min(count, total)
    sizes = routing.sizes(count)
    ends = jnp.cumsum(-(-sizes // block))
    first_block, first_pair = ends - (-(-sizes // block)), jnp.cumsum(sizes) - sizes
    # The slot of every sorted pair; pairs of padding rows share a slot past the end.
    rank = jnp.arange(total) - first_pair[routing.experts]
    slot = first_block[routing.experts] * block + rank
    slot = jnp.where(jnp.arange(total) < routing.pairs, slot, blocks * block)
    row = jnp.full(blocks * block + 1, x.shape[0]).at[slot].set(routing.order // routing.choices)
    expert = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), count - 1)

    padded = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])
    inputs = padded[row[:-1]].reshape(blocks, block, -1)
    gate, up = jnp.split(_batched(inputs, decode(gate_up)[expert]), 2, axis=-1)
    y = _batched(activation(gate, up), decode(down)[expert]).astype(jnp.float32)
    y = jnp.concatenate([y.reshape(blocks * block, -1), jnp.zeros((1, y.shape[-1]))])
    return routing.combine(y[slot])


def _batched(
    x: Float[Array, "block row in"], w: Float[Array, "block out in"]
) -> Float[Array, "block row out"]:
    out = jnp.einsum("bri,boi->bro", x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return out.astype(x.dtype)
