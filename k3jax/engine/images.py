"""Runs the vision tower over a prompt's images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float32

from k3jax.config import VisionConfig
from k3jax.model.params import VisionParams
from k3jax.model.vision import encode
from k3jax.model.vision_inputs import Grid, feature_count, prepare

_encode = jax.jit(encode, static_argnames="config")


def image_features(
    params: VisionParams,
    config: VisionConfig,
    images: Sequence[tuple[Float32[np.ndarray, "patch channel y x"], Grid]],
) -> Float[np.ndarray, "feature hidden"]:
    """Features of (patches, grid) pairs, in order; as many as the prompt needs media tokens.

    Images run one after another, because attention over all at once costs the square of their
    patches. Their sizes are padded to powers of two, so similar ones share a compiled tower, and
    cut on the host, where a size of its own compiles nothing.
    Raises ValueError for no images or a grid that the tower cannot take.
    """
    if not images:
        raise ValueError("no images to encode")
    features = []
    for pixels, grid in images:
        bucket = _bucket(config, len(pixels))
        padded = np.zeros((bucket, *pixels.shape[1:]), np.float32)
        padded[: len(pixels)] = pixels
        encoded = _encode(params, config, padded, prepare([grid], config, bucket))
        features.append(np.asarray(encoded)[: feature_count(grid, config)])
    return np.concatenate(features)


def tower_grids(config: VisionConfig, most_patches: int) -> list[Grid]:
    """One grid for every compiled tower that images of up to so many patches run through.

    Each grid fills its tower; the largest may have more patches than was asked for.
    """
    height = width = 4 * config.merge_size
    grids: list[Grid] = [(1, height, width)]
    while height * width < most_patches:
        if height < width:
            height *= 2
        else:
            width *= 2
        grids.append((1, height, width))
    return grids


def tower_memory(params: VisionParams, config: VisionConfig, grid: Grid) -> Any:
    """XLA's memory analysis of the tower for one of `tower_grids`, which this compiles."""
    patches = int(np.prod(grid))
    pixels = np.zeros((patches, 3, config.patch_size, config.patch_size), np.float32)
    lowered = _encode.lower(params, config, pixels, prepare([grid], config, patches))
    return lowered.compile().memory_analysis()


def _bucket(config: VisionConfig, patches: int) -> int:
    """The smallest power of two of merged cells, at least 16, that holds the patches."""
    bucket = 16 * config.merge_size**2
    while bucket < patches:
        bucket *= 2
    return bucket
