"""Quantised weights: values with block scales that stand in for a float array."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, UInt8

from pallas_kernels.linear import (
    decode_int8,
    decode_mxfp4,
    linear,
    linear_int8,
    linear_mxfp4,
)

Format = Literal["mxfp4", "int8"]

BLOCK = 32


class QuantArray(struct.PyTreeNode):
    """A weight `[..., out, in]` stored in few bits; leading axes stack experts.

    mxfp4 (spec: OCP MX v1.0 in compressed-tensors' mxfp4-pack-quantized): values uint8
    `[..., out, in/2]`, low nibble first; scales uint8 `[..., out, in/32]`, factor 2^(s-127).
    int8: values int8 `[..., out, in]`, scales float32 `[..., out]`.
    """

    values: jax.Array
    scales: jax.Array
    format: Format = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False, default=jnp.dtype("float32"))
    """What `dequantize` returns."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight it stands for."""
        per_value = 2 if self.format == "mxfp4" else 1
        return (*self.values.shape[:-1], self.values.shape[-1] * per_value)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return self.values.ndim

    @property
    def size(self) -> int:
        """Number of weights it stands for."""
        total = 1
        for length in self.shape:
            total *= length
        return total

    @property
    def nbytes(self) -> int:
        """Bytes held: values and scales."""
        leaves = (self.values, self.scales)
        return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)

    @property
    def pair(self) -> tuple[jax.Array, jax.Array]:
        """(values, scales), the form that `pallas_kernels.moe.experts` takes."""
        return self.values, self.scales


def quantize(w: Float[Array, "*stack out in"], format: Format) -> QuantArray:
    """Rounds a float weight to `format`; the result's dtype is that of w.

    mxfp4 picks each block's scale as compressed-tensors does: the power of two below the
    largest magnitude, one more from 1.75 times it on, less two; elements then round to the
    nearest E2M1 number, ties to even, and saturate at 6. Quantising twice changes nothing.
    Raises ValueError when the input axis is not a multiple of 32 (mxfp4).
    """
    if format == "mxfp4":
        values, scales = _encode_mxfp4(w.astype(jnp.float32))
    elif format == "int8":
        values, scales = _encode_int8(w.astype(jnp.float32))
    else:
        raise ValueError(f"unknown quantisation format {format!r}: use 'mxfp4' or 'int8'")
    return QuantArray(values, scales, format=format, dtype=jnp.dtype(w.dtype))


def dequantize(w: QuantArray) -> Float[Array, "*stack out in"]:
    """The float weight, in `w.dtype`; exact for MXFP4 in float32 and bfloat16."""
    decode = decode_mxfp4 if w.format == "mxfp4" else decode_int8
    return decode(w.values, w.scales).astype(w.dtype)


def matmul(
    x: Float[Array, "*row in"], w: Float[Array, "out in"] | QuantArray
) -> Float[Array, "*row out"]:
    """`x wᵀ` in the dtype of x, summed in float32, for a float or quantised weight."""
    if not isinstance(w, QuantArray):
        return linear(x, w)
    product = linear_mxfp4 if w.format == "mxfp4" else linear_int8
    return product(x, w.values, w.scales)


def fake_quantize(
    w: Float[Array, "*stack out in"], format: Format
) -> Float[Array, "*stack out in"]:
    """`dequantize(quantize(w))` whose gradient is that of w itself (straight-through)."""
    rounded = dequantize(quantize(jax.lax.stop_gradient(w), format))
    return rounded + (w - jax.lax.stop_gradient(w))


def _encode_mxfp4(
    w: Float[Array, "*stack out in"],
) -> tuple[UInt8[Array, "*stack out half_in"], UInt8[Array, "*stack out block"]]:
    if w.shape[-1] % BLOCK:
        raise ValueError(f"mxfp4 needs an input axis that is a multiple of {BLOCK}, got {w.shape}")
    blocks = w.reshape(*w.shape[:-1], -1, BLOCK)
    largest = jax.lax.bitcast_convert_type(jnp.abs(blocks).max(-1), jnp.int32)
    # A quarter of the mantissa range carries into the exponent from 1.75 on.
    exponent = (largest + (1 << 21)) >> 23
    scale = jnp.clip(exponent - 2, 0, 254)
    # Exact division by 2^(scale-127) in two steps that cannot overflow.
    half = (scale - 127) // 2
    scaled = jnp.abs(blocks) * _power(-half)[..., None] * _power(half - (scale - 127))[..., None]
    nibbles = _nearest_e2m1(scaled) | (jnp.signbit(blocks).astype(jnp.uint8) << 3)
    nibbles = nibbles.reshape(*w.shape[:-1], -1, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4), scale.astype(jnp.uint8)


def _power(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _nearest_e2m1(magnitude: jax.Array) -> jax.Array:
    """Codes 0..7 of the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6; ties to the even code."""
    # The midpoint belongs to the lower code when that is even, else to the upper.
    code = jnp.zeros(magnitude.shape, jnp.uint8)
    for lower, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = magnitude > midpoint if lower % 2 == 0 else magnitude >= midpoint
        code = code + above.astype(jnp.uint8)
    return code


def _encode_int8(w: Float[Array, "*stack out in"]) -> tuple[jax.Array, jax.Array]:
    scales = jnp.maximum(jnp.abs(w).max(-1), 1e-30) / 127
    values = jnp.round(w / scales[..., None])
    return values.astype(jnp.int8), scales
