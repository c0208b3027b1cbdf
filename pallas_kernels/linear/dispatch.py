"""Checks of the three products and the choice of their form."""

import jax
from jaxtyping import Array, Float, Int8, UInt8

from pallas_kernels.linear.reference import (
    MXFP4_BLOCK,
    decode_int8,
    decode_mxfp4,
    linear_reference,
)


def linear(x: Float[Array, "*row in"], w: Float[Array, "out in"]) -> Float[Array, "*row out"]:
    """`x wᵀ`, accumulated in float32 and returned in the dtype of x; differentiable."""
    _check_input(x, w.shape, w.shape[-1])
    return linear_reference(x, w)


def linear_mxfp4(
    x: Float[Array, "*row in"],
    values: UInt8[Array, "out half_in"],
    scales: UInt8[Array, "out block"],
) -> Float[Array, "*row out"]:
    """`x wᵀ` for a weight in the released MXFP4 packing (see `decode_mxfp4`)."""
    width = values.shape[-1] * 2
    _check_input(x, values.shape, width)
    if scales.shape != (values.shape[0], width // MXFP4_BLOCK) or width % MXFP4_BLOCK:
        raise ValueError(
            f"MXFP4 scales {scales.shape} do not cover packed values {values.shape}: "
            f"one scale per {MXFP4_BLOCK} inputs"
        )
    return linear_reference(x, decode_mxfp4(values, scales))


def linear_int8(
    x: Float[Array, "*row in"], values: Int8[Array, "out in"], scales: Float[Array, "out"]
) -> Float[Array, "*row out"]:
    """`x wᵀ` for int8 weights with one float32 scale per output channel."""
    _check_input(x, values.shape, values.shape[-1])
    if scales.shape != values.shape[:1]:
        raise ValueError(f"int8 scales {scales.shape} do not match {values.shape[0]} outputs")
    return linear_reference(x, decode_int8(values, scales))


def _check_input(x: jax.Array, shape: tuple[int, ...], width: int) -> None:
    if len(shape) != 2:
        raise ValueError(f"a weight has two axes [out, in], got shape {shape}")
    if x.shape[-1] != width:
        raise ValueError(f"input width {x.shape[-1]} does not match the weight's {width}")
