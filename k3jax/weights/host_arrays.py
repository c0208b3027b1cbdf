"""Host memory for leaves on their way to a device."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.quant import BLOCK, QuantArray, dequantize

_ALIGNMENT = 64  # what XLA's CPU client asks of memory that it takes over without a copy


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that `jax.device_put` on a CPU can keep without copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def dequantized(packed: QuantArray) -> np.ndarray:
    """`quant.dequantize` on the host, one matrix at a time so that little else is in memory."""
    floats = empty(packed.shape, np.dtype(packed.dtype))
    if packed.format != "mxfp4":
        for index in np.ndindex(*packed.shape[:-2]):
            floats[index] = dequantize(jax.tree.map(lambda a, i=index: jnp.asarray(a[i]), packed))
        return floats
    values, scales = np.asarray(packed.values), np.asarray(packed.scales)
    pairs = _mxfp4_pairs(floats.dtype)
    for index in np.ndindex(*packed.shape[:-2]):
        code = scales[index].astype(np.uint16)[..., None] << 8
        code = code | values[index].reshape(*code.shape[:-1], BLOCK // 2)
        floats[index] = pairs[code].view(floats.dtype).reshape(packed.shape[-2:])
    return floats


@functools.cache
def _mxfp4_pairs(dtype: np.dtype) -> np.ndarray:
    """The two numbers of every scale and byte as one integer each, at index 256·scale + byte."""
    byte, scale = np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8)
    row = np.pad(byte[:, None], ((0, 0), (0, BLOCK // 2 - 1)))
    values = jnp.asarray(np.broadcast_to(row, (256, *row.shape)))
    scales = jnp.asarray(np.broadcast_to(scale[:, None, None], (256, 256, 1)))
    table = dequantize(QuantArray(values, scales, format="mxfp4", dtype=dtype))[..., :2]
    return np.ascontiguousarray(table).view(f"u{2 * dtype.itemsize}").reshape(-1)
