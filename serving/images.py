"""Preprocessed images of a request, through the vision tower, as the prompt's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax.config import VisionConfig
from k3jax.engine.generate import PromptImages
from k3jax.engine.images import image_features, tower_grids, tower_memory
from k3jax.model.params import VisionParams
from k3jax.model.vision_inputs import Grid, feature_count
from serving.engine_loop import EngineLoop
from serving.wire import FieldError

_DTYPES = {"float32": np.float32, "int64": np.int64, "uint32": np.uint32, "int32": np.int32}
_GRID_TENSORS = ("grid_thws", "image_grid_thw", "grid_thw")


class ImageEncoder:
    """Runs the tower on the engine's thread, between two steps, because the device is its own."""

    def __init__(self, params: VisionParams, config: VisionConfig, loop: EngineLoop) -> None:
        self._params, self._config, self._loop = params, config, loop

    async def encode(
        self, items: Sequence[pb.MultimodalItem], prompt: Sequence[int]
    ) -> PromptImages:
        """Features of all images, in order. Raises FieldError for one that does not fit."""
        images = [self._image(item, f"mm_inputs.items[{i}]") for i, item in enumerate(items)]
        expected = sum(feature_count(grid, self._config) for _, grid in images)
        found = sum(token == self._config.media_token_id for token in prompt)
        if found != expected:
            raise FieldError(
                "mm_inputs", f"the images have {expected} features for {found} media tokens"
            )
        return await self._features(images)

    def grids(self, max_context: int) -> list[Grid]:
        """An image for every compiled tower that a prompt of this context can ask for."""
        return tower_grids(self._config, max_context * self._config.merge_size**2)

    def memory(self, grid: Grid) -> Any:
        """XLA's memory analysis of the tower for one of `grids`; on the engine's thread."""
        return tower_memory(self._params, self._config, grid)

    def run(self, grid: Grid) -> None:
        """Put a gray image through the tower; on the engine's thread."""
        image_features(self._params, self._config, [(self._gray(grid), grid)])

    async def probe(self, room: int) -> tuple[tuple[int, ...], PromptImages]:
        """The media tokens and features of the largest of `grids` that `room` tokens can hold."""
        merge = self._config.merge_size
        fitting = [g for g in self.grids(room) if feature_count(g, self._config) <= room]
        grid = fitting[-1] if fitting else (1, merge, merge)
        images = await self._features([(self._gray(grid), grid)])
        return (self._config.media_token_id,) * len(images.features), images

    async def _features(self, images: Sequence[tuple[np.ndarray, Grid]]) -> PromptImages:
        features: Any = await self._loop.call(
            lambda engine: image_features(self._params, self._config, images)
        )
        return PromptImages(features)

    def _gray(self, grid: Grid) -> np.ndarray:
        size = self._config.patch_size
        return np.zeros((int(np.prod(grid)), 3, size, size), np.float32)

    def _image(self, item: pb.MultimodalItem, where: str) -> tuple[np.ndarray, Grid]:
        if item.modality != common.IMAGE:
            name = common.Modality.Name(item.modality)
            raise FieldError(f"{where}.modality", f"{name} is not supported, only IMAGE")
        pixels = to_array(item.encoder_input, f"{where}.encoder_input")
        size = self._config.patch_size
        if pixels.dtype != np.float32 or pixels.ndim != 4 or pixels.shape[1:] != (3, size, size):
            raise FieldError(
                f"{where}.encoder_input",
                f"expected float32 [patches, 3, {size}, {size}], not {pixels.dtype} "
                f"{list(pixels.shape)}",
            )
        return pixels, self._grid(item, len(pixels), where)

    def _grid(self, item: pb.MultimodalItem, patches: int, where: str) -> Grid:
        tensors = item.model_specific_tensors
        name = next((name for name in _GRID_TENSORS if name in tensors), None)
        if name is None:
            raise FieldError(
                f"{where}.model_specific_tensors", f"expected one of {', '.join(_GRID_TENSORS)}"
            )
        where = f"{where}.model_specific_tensors[{name!r}]"
        grid = to_array(tensors[name], where)
        if not np.issubdtype(grid.dtype, np.integer):
            raise FieldError(where, f"grid of {grid.dtype}, expected integers")
        values = [int(value) for value in grid.reshape(-1)]
        if len(values) != 3 or min(values) < 1 or np.prod(values, dtype=object) != patches:
            raise FieldError(where, f"grid {values} for {patches} patches")
        merge = self._config.merge_size
        if values[0] != 1 or values[1] % merge or values[2] % merge:
            raise FieldError(where, f"grid {values}, expected one frame and multiples of {merge}")
        return values[0], values[1], values[2]


def to_array(tensor: pb.TensorData, where: str) -> np.ndarray:
    """A tensor sent within the message. Raises FieldError for one elsewhere, or malformed."""
    payload = tensor.WhichOneof("payload")
    if payload != "inline":
        raise FieldError(where, f"expected its bytes inline, not {payload}")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise FieldError(f"{where}.dtype", f"{tensor.dtype!r} is none of {', '.join(_DTYPES)}")
    shape = tuple(tensor.shape)
    wanted = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    if len(tensor.inline) != wanted:
        raise FieldError(
            where, f"{len(tensor.inline)} bytes for {tensor.dtype} {list(shape)}, expected {wanted}"
        )
    return np.frombuffer(tensor.inline, dtype).reshape(shape)
