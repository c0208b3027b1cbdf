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
    tiles = routing.tiles(tile_rows(routing.order.shape[0], count), count)
    inputs = tiles.inputs(x, routing)

    middle = tile_product(
        by_planes(inputs),
        tiles.expert,
        *gate_up,
        activation=activation,
        out_dtype=jnp.dtype(x.dtype),
        interpret=interpret,
    )
    out = tile_product(
        by_planes(middle.swapaxes(1, 2)),
        tiles.expert,
        *down,
        activation=None,
        out_dtype=jnp.dtype(jnp.float32),
        interpret=interpret,
    )
    result = out.swapaxes(1, 2).astype(x.dtype).astype(jnp.float32)
    return tiles.combine(result, routing)


def tile_rows(pairs: int, count: int) -> int:
    """Rows per tile: a power of two from 8 to 128, about the pairs that an expert has."""
    rows = 8
    while rows < 128 and rows * count < pairs:
        rows *= 2
    return rows
