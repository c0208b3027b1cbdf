"""What the Mosaic GPU kernels share: layouts, swizzled shared memory, limits of a Hopper GPU."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

MATRIX = plgpu.Layout.WGMMA
"""Registers of a warpgroup as an accumulator's: rows by 64, columns by 8."""
BY_ROW = MATRIX.reduce(1)
"""A vector of one number per row of such a matrix."""
BY_COLUMN = MATRIX.reduce(0)

SWIZZLE_BYTES = 128
SHARED_MEMORY = 232448
"""Bytes that one block may use."""


def lanes(dtype: Any) -> int:
    """Numbers in one swizzled row; the last axis of a swizzled array must be a multiple."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def swizzled(*shape: int, dtype: Any) -> Any:
    """A shared array whose last two axes lie so that matrix products read without conflicts."""
    transforms: Any = (
        plgpu.TilingTransform((8, lanes(dtype))),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def accumulator(rows: int, columns: int) -> Any:
    """A float32 accumulator of one warpgroup, for `pl.run_scoped`."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)
