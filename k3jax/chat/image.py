"""Turns an image into the patches that the vision tower reads (kimi_k3_vision_processing.py)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from k3jax.chat.image_source import ImageSource, open_image


class ResizePlan(NamedTuple):
    """Sizes of one image in pixels: after resizing, and the padding right and below."""

    new_width: int
    new_height: int
    pad_width: int
    pad_height: int
    num_tokens: int


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """One image for the tower.

    Attributes:
        pixel_values: normalised patches, row-major over the grid, each channel first.
        grid: (frames, patch rows, patch columns); one frame.
        num_tokens: features the image becomes, the ids to put in place of its `<|media_pad|>`.
        width, height: of the original image in pixels.
    """

    pixel_values: Float32[np.ndarray, "patch 3 pixel_row pixel_column"]
    grid: tuple[int, int, int]
    num_tokens: int
    width: int
    height: int

    @property
    def prompt(self) -> str:
        """Control text that stands for the image in a prompt; names the original size."""
        return image_prompt(self.width, self.height)


@dataclass(frozen=True)
class Background:
    """What shows through transparent pixels (`transparent_bg_config`)."""

    pattern: Literal["chessboard", "white", "black", "gray"] = "chessboard"
    square: int = 8
    white_first: bool = True
    white: int = 255
    gray: int = 180

    def draw(self, height: int, width: int) -> UInt8[np.ndarray, "height width 1"]:
        """Gray levels of the background."""
        if self.pattern != "chessboard":
            level = {"white": 255, "black": 0, "gray": 128}[self.pattern]
            return np.full((height, width, 1), level, np.uint8)
        rows = np.arange(height)[:, None, None] // self.square
        columns = np.arange(width)[None, :, None] // self.square
        odd = (rows + columns) % 2 == 1
        return np.where(odd == self.white_first, self.gray, self.white).astype(np.uint8)


@dataclass(frozen=True)
class ImageProcessor:
    """Image preprocessing; the defaults are the release's `media_proc_cfg`.

    Attributes:
        patch_size: pixels per patch side.
        merge_size: patches per token side.
        in_patch_limit: patches per image before padding.
        patch_limit_on_one_side: patches per image side before padding.
        image_mean, image_std: per channel, of values in 0..1.
        background: composited under images with transparency; None drops the alpha channel.
        fill_before_resize: composite before resizing instead of after.
    """

    patch_size: int = 14
    merge_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    background: Background | None = Background()
    fill_before_resize: bool = False

    @classmethod
    def from_dir(cls, path: str | Path) -> "ImageProcessor":
        """Read a checkpoint folder.

        Uses `media_proc_cfg` of preprocessor_config.json; without that file the release's values,
        with patch and merge size from `vision_config` of config.json if it has them.

        Raises:
            ValueError: a file that is not JSON or a field that cannot be used, with the file name.
        """
        folder = Path(path)
        file = folder / "preprocessor_config.json"
        if not file.is_file():
            file = folder / "config.json"
        if not file.is_file():
            return cls()
        try:
            config = json.loads(file.read_bytes())
            if file.name == "preprocessor_config.json":
                return cls.from_config(config["media_proc_cfg"])
            vision = config.get("vision_config") or {}
            return cls(
                patch_size=_count(vision, "patch_size", 14),
                merge_size=_merge_size(vision),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: malformed or missing {error}") from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ImageProcessor":
        """Build from a `media_proc_cfg`.

        Raises:
            ValueError: a field that is no positive number, an unknown background or fill stage, or
                `fixed_output_tokens`, which the release does not use.
        """
        if config.get("fixed_output_tokens") is not None:
            raise ValueError("fixed_output_tokens is set; only resizing by limits is supported")
        stage = config.get("transparent_bg_fill_stage", "before_resize")
        if stage not in ("before_resize", "after_resize"):
            raise ValueError(f"transparent_bg_fill_stage {stage!r} is unknown")
        return cls(
            patch_size=_count(config, "patch_size", 14),
            merge_size=_merge_size(config),
            in_patch_limit=_count(config, "in_patch_limit", 65536),
            patch_limit_on_one_side=_count(config, "patch_limit_on_one_side", 512),
            image_mean=_channels(config, "image_mean"),
            image_std=_channels(config, "image_std"),
            background=_background(config.get("transparent_bg_config")),
            fill_before_resize=stage == "before_resize",
        )

    def process(self, image: ImageSource) -> ProcessedImage:
        """Preprocess one image.

        Args:
            image: file contents, a path, a PIL image, or uint8 `[height, width]` gray,
                `[height, width, 3]` RGB or `[height, width, 4]` RGBA.

        Raises:
            ValueError: it cannot be read or decoded, naming it and why.
        """
        opened = open_image(image)
        patches, grid = self.patches(opened)
        levels = (np.arange(256) / 255.0).astype(np.float32)[:, None] - np.array(self.image_mean)
        table = levels.astype(np.float32) * (1.0 / np.array(self.image_std))
        channel = np.arange(3)[:, None, None]
        return ProcessedImage(
            pixel_values=table.astype(np.float32)[patches, channel],
            grid=grid,
            num_tokens=grid[1] * grid[2] // self.merge_size**2,
            width=opened.width,
            height=opened.height,
        )

    def patches(
        self, image: Image.Image
    ) -> tuple[UInt8[np.ndarray, "patch 3 pixel_row pixel_column"], tuple[int, int, int]]:
        """Patches before normalisation, and the grid.

        Raises:
            ValueError: PIL cannot resize or convert an image of this mode.
        """
        plan = self.resize_plan(image.width, image.height)
        try:
            if self.fill_before_resize:
                image = self._fill(image)
            image = image.resize((plan.new_width, plan.new_height), Image.Resampling.BICUBIC)
            pixels = np.asarray(self._fill(image))
        except (OSError, ValueError) as error:
            raise ValueError(f"image of mode {image.mode} cannot be converted: {error}") from None
        pixels = np.pad(pixels, ((0, plan.pad_height), (0, plan.pad_width), (0, 0)))
        size = self.patch_size
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        split = pixels.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
        return split.reshape(rows * columns, 3, size, size), (1, rows, columns)

    def resize_plan(self, width: int, height: int) -> ResizePlan:
        """Sizes for an image of `width` × `height` pixels.

        The token count can exceed `in_patch_limit / merge_size²` a little: padding comes last.
        """
        patch, side = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        area = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(self.in_patch_limit / area), side / width, side / height)
        new_width = min(max(1, int(width * scale)), side)
        new_height = min(max(1, int(height * scale)), side)
        token = patch * self.merge_size
        pad_width, pad_height = -new_width % token, -new_height % token
        tokens = ((new_width + pad_width) // token) * ((new_height + pad_height) // token)
        return ResizePlan(new_width, new_height, pad_width, pad_height, tokens)

    def _fill(self, image: Image.Image) -> Image.Image:
        """RGB, with transparency composited over the background in float32, truncated."""
        transparent = "A" in image.getbands() or "transparency" in image.info
        if image.mode == "RGB" or not transparent or self.background is None:
            return image.convert("RGB")
        rgba = np.asarray(image.convert("RGBA"))
        alpha = rgba[:, :, 3:].astype(np.float32) / 255.0
        under = self.background.draw(image.height, image.width)
        return Image.fromarray((alpha * rgba[:, :, :3] + (1 - alpha) * under).astype(np.uint8))


def image_prompt(width: int, height: int) -> str:
    """Control text that stands for an image of this original size in a prompt."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def _merge_size(config: Mapping[str, Any]) -> int:
    value = config.get("merge_kernel_size", 2)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return _count({"merge_kernel_size": value}, "merge_kernel_size", 2)


def _channels(config: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    value = config.get(key, [0.5, 0.5, 0.5])
    numbers = isinstance(value, list | tuple) and all(isinstance(x, int | float) for x in value)
    if not numbers or len(value) != 3 or (key == "image_std" and not all(value)):
        raise ValueError(f"{key} must be three numbers, not {value!r}")
    return float(value[0]), float(value[1]), float(value[2])


def _background(config: Mapping[str, Any] | None) -> Background | None:
    if config is None:
        return None
    pattern = config.get("pattern", "black")
    if pattern not in ("chessboard", "white", "black", "gray"):
        raise ValueError(f"transparent_bg_config.pattern {pattern!r} is unknown")
    return Background(
        pattern=pattern,
        square=_count(config, "chessboard_square_size", 16),
        white_first=bool(config.get("chessboard_square_on_top_left", True)),
        white=int(config.get("chessboard_white_value", 255)),
        gray=int(config.get("chessboard_gray_value", 200)),
    )
