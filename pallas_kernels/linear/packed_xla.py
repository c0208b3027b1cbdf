"""Products with packed weights on CPU: decoded inside the summing loop, or once per call.

Two things decide the speed. A sum with one result goes to YNNPACK or is split into partial sums
kept in memory; a reduction with several results stays one loop of XLA's own, with decoding and any
gather of the weight fused into it: hence `GROUP` outputs side by side. No more, as each is one more
stream for the memory to serve; and activations behind a barrier, or they are rounded again for
every output. Without these two a decode step of four rows took 1.7 times as long
(`scripts/benchmark_model.py --weights int8`). And that loop is vectorised only if its sums may be
reordered, so they are integers: activations are rounded to as many bits as a 32-bit sum of one
block allows (14 and more for int8, 22 for MXFP4), far below the weight's own rounding. Measured by
`scripts/experiment_cpu_products.py` and by whole steps.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32, UInt8

from pallas_kernels.linear.reference import MXFP4_BLOCK

GROUP = 2
INT8_BLOCK = 1024
INT32_MAX = 2**31 - 1

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BYTE_PAIRS = tuple((E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256))
"""The two numbers, low nibble first, behind each byte."""


def int8_product(
    values: Int8[Array, "stack out in"],
    scales: Float[Array, "stack out"],
    x: Float[Array, "row in"],
) -> Float[Array, "row out"]:
    """`values[r] x[r]` with each output's scale, float32; a stack of one serves every row."""
    width = values.shape[-1]
    block = next(size for size in range(min(width, INT8_BLOCK), 0, -1) if width % size == 0)
    rounded, step = _to_integers(x, block, largest_sum=128 * block)
    rounded = jax.lax.optimization_barrier(rounded)
    grouped = _grouped(values.reshape(*values.shape[:-1], -1, block))
    products = [part.astype(jnp.int32) * rounded[:, None] for part in grouped]
    sums = _sum_last(products).astype(jnp.float32)
    return _add_last(sums * step[:, None]) * scales


def mxfp4_product(
    values: UInt8[Array, "stack out half_in"],
    scales: UInt8[Array, "stack out block"],
    x: Float[Array, "row in"],
) -> Float[Array, "row out"]:
    """`values[r] x[r]` for a weight in the released MXFP4 packing, float32; a stack of one serves
    every row. A block scale below 2^-126 counts as zero, one of 255 gives NaN.
    """
    rounded, step = _to_integers(x, MXFP4_BLOCK, largest_sum=12 * MXFP4_BLOCK)
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
    x: Float[Array, "row in"], block: int, *, largest_sum: int
) -> tuple[Int32[Array, "row block step"], Float[Array, "row block"]]:
    """x as integers times a factor per block, so that `largest_sum` times one fits 32 bits."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, block)
    largest = jnp.maximum(jnp.abs(blocks).max(-1), 1e-30)
    # Beyond 22 bits float32 has no more to give.
    step = largest / min(INT32_MAX // largest_sum, 2**22)
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
