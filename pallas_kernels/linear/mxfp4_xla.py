"""Products with MXFP4 weights on CPU: decoded inside the summing loop, or once per call.

Two things decide the speed. A sum with one result goes to YNNPACK or is split into partial sums
kept in memory; a reduction with several results stays one loop of XLA's own, with decoding and any
gather of the weight fused into it: hence `GROUP` outputs side by side. No more, as each is one more
stream for the memory to serve; and activations behind a barrier, or they are rounded again for
every output. The sums of a block are integers: activations are rounded to the 22 bits that a 32-bit
sum allows, far below the weight's own rounding.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.linear.reference import MXFP4_BLOCK

GROUP = 2
STEPS = 2**22
"""Integers to either side of zero: 12 times a block of 32 of them fits 32 bits."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BYTE_PAIRS = tuple((E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256))
"""The two numbers, low nibble first, behind each byte."""


def mxfp4_product(
    values: UInt8[Array, "stack out half_in"],
    scales: UInt8[Array, "stack out block"],
    x: Float[Array, "row in"],
) -> Float[Array, "row out"]:
    """`values[r] x[r]` for a weight in the released MXFP4 packing, float32; a stack of one serves
    every row. A block scale below 2^-126 counts as zero, one of 255 gives NaN.
    """
    rounded, step = _to_integers(x)
    # Split by nibble beforehand: strided reads inside the loop would not be vectorised.
    even, odd = jax.lax.optimization_barrier((rounded[..., ::2], rounded[..., 1::2]))
    blocks = values.reshape(*values.shape[:-1], -1, MXFP4_BLOCK // 2)
    products = []
    for part in _grouped(blocks):
        pair = part.astype(jnp.int32)
        products.append(twice_e2m1(pair) * even[:, None] + twice_e2m1(pair >> 4) * odd[:, None])
    sums = _sum_last(products).astype(jnp.float32)
    return _add_last(sums * (power_of_two(scales) * (0.5 * step[:, None])))


def unpack_mxfp4(
    values: UInt8[Array, "*stack half_in"], scales: UInt8[Array, "*stack block"]
) -> Float[Array, "*stack in"]:
    """The float32 weight, as `decode_mxfp4` but with results below 2^-126 flushed to zero."""
    table = jnp.array(BYTE_PAIRS, jnp.float32)
    pairs = table.at[values.astype(jnp.int32)].get(mode="promise_in_bounds")
    blocks = pairs.reshape(*scales.shape, MXFP4_BLOCK)
    return (blocks * power_of_two(scales)[..., None]).reshape(*values.shape[:-1], -1)


def power_of_two(scales: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2^(s - 127) as float32: 0 for s = 0, NaN for s = 255."""
    bits = jnp.where(scales == 255, 0x7FC00000, scales.astype(jnp.int32) << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _to_integers(
    x: Float[Array, "row in"],
) -> tuple[Int32[Array, "row block step"], Float[Array, "row block"]]:
    """x as integers up to `STEPS` times a factor per block."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, MXFP4_BLOCK)
    largest = jnp.maximum(jnp.abs(blocks).max(-1), 1e-30)
    step = largest / STEPS
    # The largest of a vectorised loop may miss NaN, and an integer cannot be one.
    step = jnp.where(jnp.isfinite(blocks).all(-1), step, jnp.nan)
    return jnp.round(blocks / step[..., None]).astype(jnp.int32), step


def _grouped(values: jax.Array) -> list[jax.Array]:
    """The output axis (second) in up to `GROUP` runs of equal length."""
    runs = math.gcd(values.shape[1], GROUP)
    split = values.reshape(values.shape[0], runs, -1, *values.shape[2:])
    return [split[:, i] for i in range(runs)]


def _sum_last(
    products: Sequence[Int32[Array, "row run block step"]],
) -> Int32[Array, "row out block"]:
    zeros = (jnp.int32(0),) * len(products)
    axis = products[0].ndim - 1
    sums = jax.lax.reduce(
        tuple(products), zeros, lambda a, b: tuple(map(jax.lax.add, a, b)), (axis,)
    )
    return jnp.concatenate(sums, axis=1)


def _add_last(terms: Float[Array, "row out block"]) -> Float[Array, "row out"]:
    """A short sum spelt out, because a reduction over it would be a pass of its own."""
    if terms.shape[-1] > 32:
        return terms.sum(-1)
    return functools.reduce(jax.lax.add, [terms[..., i] for i in range(terms.shape[-1])])


def twice_e2m1(code: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Twice the number behind the low four bits: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.

    The table is one word of eight 4-bit fields, since shifts vectorise and look-ups do not.
    """
    word = jnp.uint32(0xC8643210)
    magnitude = ((word >> ((code & 7) * 4).astype(jnp.uint32)) & 15).astype(jnp.int32)
    negative = -((code >> 3) & 1)
    return (magnitude ^ negative) - negative
