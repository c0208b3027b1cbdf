"""Attention Residuals: each sublayer reads a learned mixture of earlier sums over depth."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.model.params import ResidualMix


def mix(
    params: ResidualMix, config: K3Config, candidates: Sequence[Float[Array, "*batch hidden"]]
) -> Float[Array, "*batch hidden"]:
    """Softmax-weighted sum of the candidates (K3 report, eq. 8-10), float32 with one rounding.

    A candidate's score is the product of its RMS-normalised value with `norm · proj`; the sum
    takes the raw values. One candidate alone is returned as it is.
    """
    if len(candidates) == 1:
        return candidates[0]
    direction = params.norm.astype(jnp.float32) * params.proj.astype(jnp.float32)
    wide = [candidate.astype(jnp.float32) for candidate in candidates]
    scores = [
        jnp.sum(v * direction, axis=-1)
        * jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + config.rms_norm_eps)
        for v in wide
    ]
    weights = jax.nn.softmax(jnp.stack(scores), axis=0)
    mixed = weights[0][..., None] * wide[0]
    for weight, v in zip(weights[1:], wide[1:], strict=True):
        mixed = mixed + weight[..., None] * v
    return mixed.astype(candidates[0].dtype)
