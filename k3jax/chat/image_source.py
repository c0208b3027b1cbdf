"""Decodes an image from bytes, a path or an array, with one clear error when it is broken."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

ImageSource = bytes | str | Path | Image.Image | np.ndarray


def open_image(image: ImageSource) -> Image.Image:
    """Decode an image completely.

    Raises:
        ValueError: naming the source and what is wrong with it.
    """
    if isinstance(image, np.ndarray):
        return _from_array(image)
    source, name = image, "image"
    if isinstance(image, bytes):
        source, name = io.BytesIO(image), f"image of {len(image)} bytes"
    elif not isinstance(image, Image.Image):
        name = f"image {image}"
    try:
        opened = source if isinstance(source, Image.Image) else Image.open(source)
        opened.load()
    except UnidentifiedImageError:
        raise ValueError(f"{name} is in no known image format") from None
    except FileNotFoundError:
        raise ValueError(f"{name} does not exist") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None
    if not opened.width or not opened.height:
        raise ValueError(f"{name} is empty: {opened.width}x{opened.height} pixels")
    return opened


def _from_array(array: np.ndarray) -> Image.Image:
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not shaped or not array.size:
        raise ValueError(
            f"image array must be uint8 [height, width] or [height, width, 3 or 4] and not empty, "
            f"not {array.dtype} {list(array.shape)}"
        )
    return Image.fromarray(array)
