"""Checks of the three products and the choice of their form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from pallas_kernels.implementation import device_platform
from pallas_kernels.linear.linear_xla import linear_cpu, linear_cpu_bfloat16, side_by_side
from pallas_kernels.linear.mxfp4_xla import mxfp4_product, unpack_mxfp4
from pallas_kernels.linear.reference import (
    MXFP4_BLOCK,
    decode_int8,
    decode_mxfp4,
    linear_reference,
)

INT8_ROWS, MXFP4_ROWS = 16, 4
"""Rows up to which a packed weight is decoded in the loop that sums; above, once into floats."""


def linear(x: Float[Array, "*row in"], w: Float[Array, "out in"]) -> Float[Array, "*row out"]:
    """`x wᵀ`, summed in float32 and returned in the dtype of x; differentiable.

    w is cast to the dtype of x first. The form is chosen at trace time: for a CPU by the number
    of rows (see `linear_xla`), for other devices one dot. Row counts that take the same form give a
    row the same bits whatever its neighbours hold; other counts differ by float rounding.
    """
    _check_input(x, w.shape, w.shape[-1])
    forms = {jnp.dtype("float32"): linear_cpu, jnp.dtype("bfloat16"): linear_cpu_bfloat16}
    product = forms.get(x.dtype)
    if product is None or device_platform() != "cpu" or x.size == 0:
        return linear_reference(x, w)
    rows = x.reshape(-1, x.shape[-1])
    out = product(rows, w.astype(x.dtype)).astype(x.dtype)
    return out.reshape(*x.shape[:-1], w.shape[0])


def linear_mxfp4(
    x: Float[Array, "*row in"],
    values: UInt8[Array, "out half_in"],
    scales: UInt8[Array, "out block"],
) -> Float[Array, "*row out"]:
    """`x wᵀ` for a weight in the released MXFP4 packing, summed in float32, in the dtype of x.

    On CPU block scales below 2^-126 count as zero (`decode_mxfp4` keeps them).
    """
    width = values.shape[-1] * 2
    _check_input(x, values.shape, width)
    if scales.shape != (values.shape[0], width // MXFP4_BLOCK) or width % MXFP4_BLOCK:
        raise ValueError(
            f"MXFP4 scales {scales.shape} do not cover packed values {values.shape}: "
            f"one scale per {MXFP4_BLOCK} inputs"
        )
    if device_platform() != "cpu":
        return linear_reference(x, decode_mxfp4(values, scales))
    return _packed(x, values, scales, MXFP4_ROWS, _one_mxfp4_product, unpack_mxfp4)


def linear_int8(
    x: Float[Array, "*row in"], values: Int8[Array, "out in"], scales: Float[Array, "out"]
) -> Float[Array, "*row out"]:
    """`x wᵀ` for int8 weights with one float32 scale per output channel, in the dtype of x."""
    _check_input(x, values.shape, values.shape[-1])
    if scales.shape != values.shape[:1]:
        raise ValueError(f"int8 scales {scales.shape} do not match {values.shape[0]} outputs")
    if device_platform() != "cpu":
        return linear_reference(x, decode_int8(values, scales))
    return _packed(x, values, scales, INT8_ROWS, _int8_product, decode_int8)


def _int8_product(values: jax.Array, scales: jax.Array, x: jax.Array) -> jax.Array:
    return side_by_side(x.astype(jnp.float32), values.astype(jnp.float32)) * scales


def _one_mxfp4_product(values: jax.Array, scales: jax.Array, x: jax.Array) -> jax.Array:
    return mxfp4_product(values[None], scales[None], x)


def _packed(
    x: jax.Array,
    values: jax.Array,
    scales: jax.Array,
    few: int,
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    decode: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    if not x.size:
        return linear_reference(x, decode(values, scales))
    if len(rows) > few:
        # Tied to x, or XLA decodes all weights of a program first and holds them in float32.
        rows, values, scales = jax.lax.optimization_barrier((rows, values, scales))
        out = linear(rows, jax.lax.optimization_barrier(decode(values, scales)))
    else:
        out = product(values, scales, rows).astype(x.dtype)
    return out.reshape(*x.shape[:-1], values.shape[0])


def _check_input(x: jax.Array, shape: tuple[int, ...], width: int) -> None:
    if len(shape) != 2:
        raise ValueError(f"a weight has two axes [out, in], got shape {shape}")
    if x.shape[-1] != width:
        raise ValueError(f"input width {x.shape[-1]} does not match the weight's {width}")
