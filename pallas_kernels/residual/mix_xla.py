"""The residual sum, its mixture over depth and RMSNorm as XLA operations."""

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

PARTS = 4
"""Sums that each sum over the width is made of."""


def rms_norm(
    x: Float[Array, "*batch width"], weight: Float[Array, "width"], eps: float
) -> Float[Array, "*batch width"]:
    """RMSNorm with float32 statistics, rounded to x's dtype before the weight multiplies it."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def mixture(
    candidates: Sequence[Float[Array, "*batch hidden"]],
    norm: Float[Array, "hidden"],
    proj: Float[Array, "hidden"],
    eps: float,
) -> Float[Array, "*batch hidden"]:
    """Softmax-weighted sum of the candidates, float32 with one rounding.

    A candidate's score is the product of its RMS-normalised value with `norm · proj`; the sum
    takes the raw values. One candidate alone is returned as it is.
    """
    if len(candidates) == 1:
        return candidates[0]
    direction = norm.astype(jnp.float32) * proj.astype(jnp.float32)
    wide = [candidate.astype(jnp.float32) for candidate in candidates]
    sums = _sums(*[v * direction for v in wide], *[v * v for v in wide])
    width = wide[0].shape[-1]
    scores = [
        along * jax.lax.rsqrt(square / width + eps)
        for along, square in zip(sums[: len(wide)], sums[len(wide) :], strict=True)
    ]
    # Spelt out: as arithmetic on single numbers it joins the passes over the values.
    highest = functools.reduce(jnp.maximum, scores)
    shares = [jnp.exp(score - highest) for score in scores]
    total = functools.reduce(operator.add, shares)
    terms = [(share / total)[..., None] * v for share, v in zip(shares, wide, strict=True)]
    return functools.reduce(operator.add, terms).astype(candidates[0].dtype)


@jax.custom_jvp
def _sums(*arrays: Float[Array, "*batch width"]) -> tuple[Float[Array, "*batch"], ...]:
    """Sums over the last axis, float32, in one pass over all arrays.

    XLA's CPU compiler makes several passes of every lone sum, through partial ones kept in memory,
    but leaves a reduction with several results whole. `PARTS` sums of neighbours, then their sum:
    in one run the rounding of thousands of terms would add up.
    """
    width = arrays[0].shape[-1]
    parts = math.gcd(width, PARTS)
    split = tuple(a.reshape(*a.shape[:-1], parts, width // parts) for a in arrays)
    zeros = (jnp.float32(0),) * len(split)
    axis = split[0].ndim - 1
    sums = jax.lax.reduce(split, zeros, lambda a, b: tuple(map(operator.add, a, b)), (axis,))
    return tuple(
        functools.reduce(operator.add, [part[..., i] for i in range(parts)]) for part in sums
    )


@_sums.defjvp
def _sums_jvp(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return _sums(*primals), tuple(tangent.sum(-1) for tangent in tangents)
