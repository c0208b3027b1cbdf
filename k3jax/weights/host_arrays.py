"""Host memory for leaves on their way to a device."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.quant import QuantArray, dequantize

_ALIGNMENT = 64  # what XLA's CPU client asks of memory that it takes over without a copy


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that `jax.device_put` on a CPU can keep without copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def dequantized(packed: QuantArray) -> np.ndarray:
    """The float leaf, one matrix at a time: decoding needs several arrays of its output's size."""
    floats = empty(packed.shape, np.dtype(packed.dtype))
    for index in np.ndindex(*packed.shape[:-2]):
        one = jax.tree.map(lambda array, index=index: jnp.asarray(array[index]), packed)
        floats[index] = dequantize(one)
    return floats
