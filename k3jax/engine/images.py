"""Runs the vision tower over a prompt's images."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from k3jax.config import VisionConfig
from k3jax.model.params import VisionParams
from k3jax.model.vision import encode
from k3jax.model.vision_inputs import Grid, feature_count, prepare

_encode = jax.jit(encode, static_argnames="config")


def image_features(
    params: VisionParams,
    config: VisionConfig,
    images: Sequence[tuple[Float32[np.ndarray, "patch channel y x"], Grid]],
) -> Float[Array, "feature hidden"]:
    """Features of (patches, grid) pairs, in order; as many as the prompt needs media tokens.

    Images run one after another, because attention over all at once costs the square of their
    patches. Their sizes are padded to powers of two, so similar ones share a compiled tower.
    Raises ValueError for no images or a grid that the tower cannot take.
    """
    if not images:
        raise ValueError("no images to encode")
    features = []
    for pixels, grid in images:
        patches = len(pixels)
        bucket = config.merge_size**2 << max(4, (patches - 1).bit_length())
        while bucket // 2 >= max(patches, 16 * config.merge_size**2):
            bucket //= 2
        padded = np.zeros((bucket, *pixels.shape[1:]), np.float32)
        padded[:patches] = pixels
        encoded = _encode(params, config, padded, prepare([grid], config, bucket))
        features.append(encoded[: feature_count(grid, config)])
    return jnp.concatenate(features)
