"""The safetensors container: headers checked against their files, and files written in a stream."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

# Only the dtypes that a model of ours can contain.
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The rest of what the format defines, so that the error is about the dtype and not about the size.
_OTHER_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2},
    **{"I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}

_MAX_HEADER = 100_000_000  # the limit of the reference implementation
_CHUNK = 1 << 26


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, in the order of their data; no tensor data is read.

    Raises ValueError naming the file, and the tensor where there is one, when the header is
    malformed, tensors overlap or leave gaps, or the file is shorter or longer than they need.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{file}: truncated or no safetensors file: {size} bytes, header of {length} bytes"
            )
        if length > _MAX_HEADER:
            raise ValueError(f"{file}: header of {length} bytes, the limit is {_MAX_HEADER}")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _no_duplicates(pairs, file))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the safetensors header must be a JSON object")
    header.pop("__metadata__", None)
    tensors = [_entry(name, entry, file, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "follows a gap"
            raise ValueError(
                f"{file}: tensor {tensor.name} {problem}: it starts at byte {tensor.offset} "
                f"of the file and not at {end}"
            )
        end += tensor.nbytes
        if end > size:
            raise ValueError(
                f"{file}: truncated: tensor {tensor.name} ends at byte {end}, the file at {size}"
            )
    if end != size:
        raise ValueError(f"{file}: {size - end} bytes follow the last tensor")
    return tensors


def read_into(
    stream: Any,
    tensor: StoredTensor,
    target: np.ndarray,
    progress: Callable[[int], object],
    *,
    chunk_bytes: int = _CHUNK,
) -> None:
    """Fill a flat array with the first elements of a tensor, converted to the array's dtype.

    `stream` is the tensor's file, opened unbuffered; `progress` is told the bytes of each chunk.
    """
    stored = DTYPES[tensor.dtype]
    step = chunk_bytes // stored.itemsize
    buffer = None if stored == target.dtype else np.empty(min(step, target.size), stored)
    stream.seek(tensor.offset)
    for start in range(0, target.size, step):
        part = target[start : start + step]
        chunk = part if buffer is None else buffer[: part.size]
        view = memoryview(chunk.view(np.uint8))
        while view:
            done = stream.readinto(view)
            if not done:
                raise ValueError(f"{tensor.file}: tensor {tensor.name} ended early; did it change?")
            view = view[done:]
        if buffer is not None:
            part[...] = chunk
        progress(chunk.nbytes)


def write_file(
    file: Path,
    tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]],
    data: Iterable[np.ndarray],
) -> None:
    """Write one file whose tensors are named, typed and shaped by `tensors`.

    `data` yields their values in the same order, each tensor in one or several contiguous arrays.
    Raises ValueError when it yields more or fewer bytes than `tensors` says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = 0
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for array in data:
            stream.write(memoryview(array.reshape(-1).view(np.uint8)))
            written += array.nbytes
        stream.flush()
        os.fsync(stream.fileno())
    if written != end:
        raise ValueError(f"{file}: wrote {written} bytes of tensors, the header says {end}")


def _no_duplicates(pairs: list[tuple[str, Any]], file: Path) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{file}: tensor {twice} is in the header twice")
    return found


def _entry(name: str, entry: Any, file: Path, base: int) -> StoredTensor:
    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"{file}: tensor {name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not whole(shape) or not whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{file}: tensor {name} has shape {shape} and data_offsets {offsets}")
    if dtype not in DTYPES and dtype not in _OTHER_BYTES:
        raise ValueError(f"{file}: tensor {name} has the unknown dtype {dtype!r}")
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else _OTHER_BYTES[dtype]
    nbytes = math.prod(shape) * itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"{file}: tensor {name} of shape {shape} and dtype {dtype} needs {nbytes} bytes, its "
            f"data_offsets {offsets} give {offsets[1] - offsets[0]}"
        )
    return StoredTensor(name, file, dtype, tuple(shape), base + offsets[0], nbytes)
