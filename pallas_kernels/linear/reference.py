"""What the products mean: decode the weight, then one plain dot with float32 sums."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

MXFP4_BLOCK = 32


def linear_reference(
    x: Float[Array, "*row in"], w: Float[Array, "out in"]
) -> Float[Array, "*row out"]:
    """`x wᵀ`, summed in at least float32 and returned in the dtype of x."""
    out = jax.lax.dot_general(
        x,
        w.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return out.astype(x.dtype)


def decode_mxfp4(
    values: UInt8[Array, "*stack half_in"], scales: UInt8[Array, "*stack block"]
) -> Float[Array, "*stack in"]:
    """The float32 numbers behind packed E2M1 nibbles and E8M0 scales, exact bit for bit.

    Byte j holds elements 2j (low nibble) and 2j+1 (high). A nibble is sign, two exponent bits
    and one mantissa bit; scale byte s multiplies 32 consecutive elements by 2^(s-127). Built from
    integers so that subnormal results survive; s = 255 gives NaN (OCP MX v1.0), an overflow inf.
    """
    nibbles = jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
    code = nibbles.astype(jnp.int32)
    scale = jnp.repeat(scales.astype(jnp.int32), MXFP4_BLOCK, axis=-1)
    magnitude = code & 7
    step = magnitude >> 1
    # 0.5 has exponent -1; codes from 2 on are (1 + m/2) 2^(step-1).
    exponent = scale + jnp.where(magnitude == 1, -1, step - 1)
    significand = jnp.where(magnitude == 1, 1 << 23, (2 + (magnitude & 1)) << 22)
    normal = (exponent << 23) | (significand & 0x7FFFFF)
    bits = jnp.where(exponent >= 1, normal, significand >> jnp.clip(1 - exponent, 0, 31))
    bits = jnp.where(exponent >= 255, 0x7F800000, bits)
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(scale == 255, 0x7FC00000, bits)
    sign = (code >> 3) << 31
    return jax.lax.bitcast_convert_type(bits | sign, jnp.float32)


def decode_int8(
    values: Int[Array, "*stack in"], scales: Float[Array, "*stack"]
) -> Float[Array, "*stack in"]:
    """int8 values times their output channel's float32 scale."""
    return values.astype(jnp.float32) * scales[..., None]
