"""Geometry of image patches as padded host arrays, so that one compiled tower serves many sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flax import struct
from jaxtyping import Array, Float32, Int32

from k3jax.config import VisionConfig

Grid = tuple[int, int, int]
"""(frames, patch rows, patch columns) of one image (one frame) or clip."""

HostArray = np.ndarray | Array
"""NumPy as prepared; a JAX array once inside a jitted function."""


class VisionInputs(struct.PyTreeNode):
    """Where every patch of a batch of images sits; shapes depend on the bucket only.

    `feature` is a merged cell, the tower's output row. Rows past the last image are padding: their
    segment is −1, their indices 0 and their weights 0.
    """

    pos_indices: Int32[HostArray, "patch corner"]
    """Four neighbours in the flattened position table, for bilinear resizing."""
    pos_weights: Float32[HostArray, "patch corner"]
    frame: Int32[HostArray, "patch"]
    """Row of the time embedding; −1 adds none (images and padding)."""
    rope_cos: Float32[HostArray, "patch pair"]
    rope_sin: Float32[HostArray, "patch pair"]
    segments: Int32[HostArray, "patch"]
    """Number of the image a patch belongs to; attention stays inside it."""
    merge_indices: Int32[HostArray, "feature cell frame"]
    """Patches that one feature is made of: the cell's row-major positions, at every frame."""
    merge_weights: Float32[HostArray, "feature frame"]
    """1/frames, or 0 for a frame the clip does not have. The axis is 1 long without clips."""


def prepare(grids: Sequence[Grid], config: VisionConfig, bucket: int | None = None) -> VisionInputs:
    """Positions, segments and merge plan of images whose patches are concatenated in this order.

    `bucket` is the padded number of patches and gives `bucket // merge_size²` feature rows; None
    means no padding in either. Raises ValueError for an empty batch, a grid that the tower cannot
    take (sides not multiples of `merge_size`, more frames than it has time embeddings), and a
    bucket that is too small or not a multiple of `merge_size²`.
    """
    if not grids:
        raise ValueError("vision: no images; a batch needs at least one grid")
    counts = [feature_count(grid, config) for grid in grids]
    sizes = [int(np.prod(grid)) for grid in grids]
    patches, features = sum(sizes), sum(counts)
    if bucket is not None:
        features = _bucket_features(patches, bucket, config)
    pad = (bucket or patches) - patches

    indices, weights = zip(*(position_neighbours(grid, config) for grid in grids), strict=True)
    cos, sin = zip(*(rope(grid, config) for grid in grids), strict=True)
    frames = config.pos_emb_time if any(grid[0] > 1 for grid in grids) else 1
    merge_indices = np.zeros((features, config.merge_size**2, frames), np.int32)
    merge_weights = np.zeros((features, frames), np.float32)
    patch = feature = 0
    for grid, size, count in zip(grids, sizes, counts, strict=True):
        rows = slice(feature, feature + count)
        merge_indices[rows, :, : grid[0]] = patch + _cells(grid, config)
        merge_weights[rows, : grid[0]] = 1 / grid[0]
        patch, feature = patch + size, feature + count
    return VisionInputs(
        pos_indices=_padded(indices, pad, 0),
        pos_weights=_padded(weights, pad, 0),
        frame=_padded([frame_rows(grid) for grid in grids], pad, -1),
        rope_cos=_padded(cos, pad, 0),
        rope_sin=_padded(sin, pad, 0),
        segments=np.pad(
            np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), (0, pad), constant_values=-1
        ),
        merge_indices=merge_indices,
        merge_weights=merge_weights,
    )


def feature_count(grid: Grid, config: VisionConfig) -> int:
    """Features of one image or clip, which is also its number of `media_token_id` positions.

    Raises ValueError when the tower cannot take the grid.
    """
    frames, height, width = grid
    merge = config.merge_size
    if not 1 <= frames <= config.pos_emb_time:
        raise ValueError(f"vision: {frames} frames; a clip has 1 to {config.pos_emb_time}")
    if height < 1 or width < 1 or height % merge or width % merge:
        raise ValueError(
            f"vision: grid of {height}×{width} patches; both must be positive multiples of {merge}"
        )
    return (height // merge) * (width // merge)


def check_media(tokens: Sequence[int], grids: Sequence[Grid], config: VisionConfig) -> None:
    """Refuse a prompt whose media positions are not as many as its images have features.

    `tokens` is a whole prompt with `media_token_id` repeated once per feature.
    """
    positions = sum(token == config.media_token_id for token in tokens)
    features = sum(feature_count(grid, config) for grid in grids)
    if positions != features:
        raise ValueError(
            f"prompt has {positions} media tokens (id {config.media_token_id}) but its "
            f"{len(grids)} images have {features} features; there must be one token per feature"
        )


def position_neighbours(
    grid: Grid, config: VisionConfig
) -> tuple[Int32[np.ndarray, "patch corner"], Float32[np.ndarray, "patch corner"]]:
    """Indices and weights that resize the position table to the grid.

    Bilinear with half-pixel centres and no antialiasing (torch `align_corners=False`); the
    identity when the grid has the table's size.
    """
    frames, height, width = grid
    row, row_weight = _axis_neighbours(height, config.pos_emb_height)
    col, col_weight = _axis_neighbours(width, config.pos_emb_width)
    indices = row[:, None, :, None] * config.pos_emb_width + col[None, :, None, :]
    weights = row_weight[:, None, :, None] * col_weight[None, :, None, :]
    return (
        np.tile(indices.reshape(-1, 4), (frames, 1)).astype(np.int32),
        np.tile(weights.reshape(-1, 4), (frames, 1)).astype(np.float32),
    )


def frame_rows(grid: Grid) -> Int32[np.ndarray, "patch"]:
    """Time embedding row per patch; −1 for an image, which has no time term."""
    frames, height, width = grid
    rows = np.arange(frames, dtype=np.int32) if frames > 1 else np.array([-1], np.int32)
    return np.repeat(rows, height * width)


def rope(
    grid: Grid, config: VisionConfig
) -> tuple[Float32[np.ndarray, "patch pair"], Float32[np.ndarray, "patch pair"]]:
    """Cosines and sines of the 2-D rotary embedding, repeated for every frame.

    Pair 2j of a head turns by `col·θ_j`, pair 2j+1 by `row·θ_j`, `θ_j = 10000^(−4j/head_dim)`.
    """
    frames, height, width = grid
    head = config.head_dim
    theta = 10000.0 ** (-np.arange(0, head, 4) / head)
    angles = np.empty((height, width, head // 4, 2))
    angles[..., 0] = np.arange(width)[:, None] * theta
    angles[..., 1] = np.arange(height)[:, None, None] * theta
    angles = np.tile(angles.reshape(height * width, head // 2), (frames, 1))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def time_embedding(config: VisionConfig) -> Float32[np.ndarray, "frame hidden"]:
    """`[sin(f·ω), cos(f·ω)]` in halves, `ω_i = 10000^(−2i/hidden)`; computed, never stored."""
    half = config.hidden_size // 2
    angles = np.arange(config.pos_emb_time)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _axis_neighbours(length: int, table: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.maximum((np.arange(length) + 0.5) * table / length - 0.5, 0)
    lower = np.minimum(source.astype(np.int64), table - 1)
    upper = np.minimum(lower + 1, table - 1)
    fraction = source - lower
    return np.stack([lower, upper], axis=-1), np.stack([1 - fraction, fraction], axis=-1)


def _cells(grid: Grid, config: VisionConfig) -> np.ndarray:
    """Patch numbers `[feature, cell, frame]` within one image."""
    frames, height, width = grid
    merge = config.merge_size
    numbers = np.arange(frames * height * width).reshape(
        frames, height // merge, merge, width // merge, merge
    )
    return numbers.transpose(1, 3, 2, 4, 0).reshape(-1, merge**2, frames)


def _bucket_features(patches: int, bucket: int, config: VisionConfig) -> int:
    cell = config.merge_size**2
    if bucket % cell:
        raise ValueError(f"vision: bucket of {bucket} patches; it must be a multiple of {cell}")
    if bucket < patches:
        raise ValueError(f"vision: {patches} patches do not fit a bucket of {bucket}")
    return bucket // cell


def _padded(parts: Sequence[np.ndarray], pad: int, value: int) -> np.ndarray:
    whole = np.concatenate(parts)
    return np.pad(whole, ((0, pad),) + ((0, 0),) * (whole.ndim - 1), constant_values=value)
