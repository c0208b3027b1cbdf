"""The residual sum, its mixture over depth and RMSNorm as XLA operations."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
    scores = [
        jnp.sum(v * direction, axis=-1) * jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
        for v in wide
    ]
    weights = jax.nn.softmax(jnp.stack(scores), axis=0)
    mixed = weights[0][..., None] * wide[0]
    for weight, v in zip(weights[1:], wide[1:], strict=True):
        mixed = mixed + weight[..., None] * v
    return mixed.astype(candidates[0].dtype)
