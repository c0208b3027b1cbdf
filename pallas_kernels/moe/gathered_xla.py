"""Routed experts for devices other than a CPU: only what a tile's expert needs is fetched, packed.

Counted, not measured, per pair of K3's 17 MB experts: while experts have a few pairs each, reading
one again for every pair costs less than decoding it into memory, which writes and reads four times
as much again. So a lone row's product is a sum that XLA fuses with decoding and gather, and nothing
but packed weights is read. Above, tiles of rows share an expert that is decoded into the rows'
dtype, a few at a time. `lax.ragged_dot` would need all experts decoded at once, and XLA multiplies
every row by every expert for it.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.linear.mxfp4_xla import power_of_two, twice_e2m1
from pallas_kernels.linear.reference import MXFP4_BLOCK
from pallas_kernels.moe.reference import Activation, Weight, decode
from pallas_kernels.moe.routing import Routing, Tiles

LONE_PAIRS = 4
"""Up to so many pairs per expert, each pair reads its expert's weights for itself."""
DECODED_BYTES = 1 << 30
"""Weights that exist decoded at once, about."""


def experts_by_gather(
    x: Float[Array, "row latent"],
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    activation: Activation,
    count: int,
    *,
    decoded_bytes: int = DECODED_BYTES,
) -> Float[Array, "row latent"]:
    """Pairs in order of their experts; tiles that this routing does not need are not computed."""
    routing = routing.by_expert()
    pairs = routing.order.shape[0]
    rows = 1
    while rows < 256 and pairs > LONE_PAIRS * count * rows:
        rows *= 2
    tiles = routing.tiles(rows, count)
    product = _lone_product if rows == 1 else _tile_product

    def outputs(tiles: Tiles) -> Array:
        expert = jnp.minimum(tiles.expert, count - 1)
        inputs = tiles.inputs(x, routing)
        gate, up = jnp.split(product(gate_up, expert, inputs), 2, axis=-1)
        return product(down, expert, activation(gate, up)).astype(jnp.float32)

    if rows == 1:
        return tiles.combine(outputs(tiles), routing)
    decoded = 3 * math.prod(jax.tree.leaves(down)[0].shape[1:]) * x.dtype.itemsize
    at_once = max(1, min(len(tiles.expert), decoded_bytes // decoded))
    padded = tiles.padded(at_once, count)

    def some(step: Array, out: Array) -> Array:
        start = step * at_once
        y = outputs(padded.slice(start, at_once))
        return jax.lax.dynamic_update_slice_in_dim(out, y, start, 0)

    out = jnp.zeros((*padded.pair.shape, x.shape[1]), jnp.float32)
    out = jax.lax.fori_loop(0, -(-tiles.needed // at_once), some, out)
    return tiles.combine(out, routing)


def _lone_product(
    weight: Weight, expert: Int[Array, "tile"], x: Float[Array, "tile 1 in"]
) -> Float[Array, "tile 1 out"]:
    """A weight's product with one row, as a sum that reads the weight where it lies."""
    wide = x.astype(jnp.float32)
    if not isinstance(weight, tuple):
        return (_take(weight, expert).astype(jnp.float32) * wide).sum(-1)[:, None].astype(x.dtype)
    values, scales = (_take(leaf, expert) for leaf in weight)
    if values.dtype != jnp.uint8:
        out = (values.astype(jnp.float32) * wide).sum(-1) * scales
    else:
        out = _packed_sum(values, scales, wide)
    return out[:, None].astype(x.dtype)


def _packed_sum(
    values: UInt8[Array, "tile out half_in"],
    scales: UInt8[Array, "tile out block"],
    x: Float[Array, "tile 1 in"],
) -> Float[Array, "tile out"]:
    blocks = values.reshape(*scales.shape, MXFP4_BLOCK // 2).astype(jnp.int32)
    even, odd = (x[..., first::2].reshape(x.shape[0], 1, -1, MXFP4_BLOCK // 2) for first in (0, 1))
    low, high = twice_e2m1(blocks).astype(jnp.float32), twice_e2m1(blocks >> 4).astype(jnp.float32)
    scale = 0.5 * power_of_two(scales)[..., None]
    return ((low * even + high * odd) * scale).sum((-2, -1))


def _tile_product(
    weight: Weight, expert: Int[Array, "tile"], x: Float[Array, "tile row in"]
) -> Float[Array, "tile row out"]:
    """A product per tile with its expert's weight, decoded into the rows' dtype."""
    w = decode(jax.tree.map(lambda leaf: _take(leaf, expert), weight)).astype(x.dtype)
    out = jnp.einsum("tri,toi->tro", x, w, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def _take(leaf: Array, expert: Int[Array, "tile"]) -> Array:
    return leaf.at[expert].get(mode="promise_in_bounds")
