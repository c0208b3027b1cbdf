"""Routed experts with MXFP4 weights on the Hopper kernel: rows in tiles that share an expert."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.moe.mxfp4_gpu import by_planes, tile_product
from pallas_kernels.moe.reference import Activation
from pallas_kernels.moe.routing import Routing

Packed = tuple[jax.Array, jax.Array]


def experts_by_tile(
    x: Float[Array, "row latent"],
    routing: Routing,
    gate_up: Packed,
    down: Packed,
    activation: Activation,
    count: int,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "row latent"]:
    """`dispatch.experts` for weights in the released MXFP4 packing, as float32 sums.

    Every expert's pairs, padded to whole tiles, take two products: gate and up with the activation,
    then down. The number of tiles is the most that any routing can need; those beyond what this one
    needs do nothing.
    """
    routing = routing.by_expert()
    pairs = routing.order.shape[0]
    rows = tile_rows(pairs, count)
    tiles = min(pairs, (pairs + min(count, pairs) * (rows - 1)) // rows)
    sizes = routing.sizes(count)
    needed = -(-sizes // rows)
    ends = jnp.cumsum(needed)
    first_tile, first_pair = ends - needed, jnp.cumsum(sizes) - sizes
    tile = jnp.arange(tiles)
    expert = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    known = jnp.minimum(expert, count - 1)
    place = (tile - first_tile[known])[:, None] * rows + jnp.arange(rows)
    inside = (expert < count)[:, None] & (place < sizes[known][:, None])
    pair = jnp.where(inside, first_pair[known][:, None] + place, 0)
    inputs = jnp.where(inside[..., None], x[routing.order[pair] // routing.choices], 0)

    middle = tile_product(
        by_planes(inputs),
        expert,
        *gate_up,
        activation=activation,
        out_dtype=jnp.dtype(x.dtype),
        interpret=interpret,
    )
    out = tile_product(
        by_planes(middle.swapaxes(1, 2)),
        expert,
        *down,
        activation=None,
        out_dtype=jnp.dtype(jnp.float32),
        interpret=interpret,
    )
    # The tile and row of every sorted pair; the pairs of padding rows have weight zero.
    number = jnp.arange(pairs)
    rank = number - first_pair[routing.experts]
    at = jnp.minimum(first_tile[routing.experts] + rank // rows, tiles - 1)
    result = out.swapaxes(1, 2)[at, rank % rows].astype(x.dtype).astype(jnp.float32)
    return routing.combine(jnp.where((number < routing.pairs)[:, None], result, 0))


def tile_rows(pairs: int, count: int) -> int:
    """Rows per tile: a power of two from 8 to 128, about the pairs that an expert has."""
    rows = 8
    while rows < 128 and rows * count < pairs:
        rows *= 2
    return rows
