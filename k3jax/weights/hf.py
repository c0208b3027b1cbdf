"""Loads released safetensors folders into `K3Params`, streamed file by file."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.quant import QuantArray, dequantize
from k3jax.weights.hf_folder import Plan, plan
from k3jax.weights.names import Part, Piece
from k3jax.weights.safetensors_file import DTYPES, StoredTensor, read_chunks, read_into

_CHUNK = 1 << 26
_ALIGNMENT = 64  # what XLA's CPU client asks of memory that it takes over without a copy


def load(
    path: str | Path,
    config: K3Config | None = None,
    *,
    dtype: Any = jnp.float32,
    dequantize_experts: bool = False,
    progress: bool = True,
    sharding: Any = None,
) -> K3Params:
    """Read a released folder: `model.safetensors`, or several files and their index.

    Everything is checked before any tensor data is read. `dtype` is that of matrices and norms;
    what the maths needs in float32 is float32, and packed experts stay packed (a QuantArray that
    stands for `dtype`) unless `dequantize_experts`. `sharding` is one `jax.sharding.Sharding` or a
    tree of them shaped like the parameters; each leaf goes to its devices once it is complete.
    Host memory above the result is bounded by the incomplete leaves, less than a file when files
    hold whole layers. `config` defaults to the folder's `config.json`.

    Raises FileNotFoundError without config or weights, and ValueError naming tensor and file when
    they are not what the config implies.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"no such folder: {folder}")
    config = K3Config.from_hf(folder) if config is None else config
    todo = plan(folder, config)
    spec, treedef = jax.tree_util.tree_flatten_with_path(abstract(config, dtype), is_leaf=_is_quant)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in spec]
    places = _places(sharding, treedef, len(paths))
    leaves = {
        path: _Leaf(leaf, dequantize_experts, place)
        for path, (_, leaf), place in zip(paths, spec, places, strict=True)
    }
    for piece, _ in todo:
        leaves[piece.leaf].waiting += 1
    _stream(todo, leaves, progress)
    return jax.tree.unflatten(treedef, [leaves[path].result for path in paths])


def _is_quant(node: Any) -> bool:
    return isinstance(node, QuantArray)


def _places(sharding: Any, treedef: Any, count: int) -> list[Any]:
    """The sharding of each leaf, a packed leaf counting as one."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return [sharding] * count
    return treedef.flatten_up_to(sharding)


def _stream(todo: Plan, leaves: dict[str, _Leaf], progress: bool) -> None:
    total = sum(tensor.nbytes for _, tensor in todo)
    with tqdm(
        total=total,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not (progress and sys.stderr.isatty()),
    ) as bar:
        for file, group in itertools.groupby(todo, key=lambda pair: pair[1].file):
            with file.open("rb", buffering=0) as stream:
                for piece, tensor in group:
                    leaves[piece.leaf].fill(piece, tensor, stream, bar)


class _Leaf:
    """One logical leaf while its pieces arrive: host arrays first, then the finished JAX value."""

    def __init__(self, spec: Any, dequantize_experts: bool, place: Any) -> None:
        self.spec, self.dequantize, self.place = spec, dequantize_experts, place
        self.waiting = 0
        self.buffers: dict[Part, np.ndarray] = {}
        self.result: Any = None

    def fill(self, piece: Piece, tensor: StoredTensor, stream: Any, bar: tqdm) -> None:
        if piece.part not in self.buffers:
            array = getattr(self.spec, piece.part) if piece.part else self.spec
            self.buffers[piece.part] = _empty(array.shape, np.dtype(array.dtype))
        target = self.buffers[piece.part].reshape(-1)[piece.start : piece.start + piece.size]
        _read(stream, tensor, target, bar)
        self.waiting -= 1
        if self.waiting == 0:
            self.result = self._finish()
            self.buffers = {}

    def _finish(self) -> Any:
        if not isinstance(self.spec, QuantArray):
            return jax.device_put(self.buffers[""], self.place)
        values, scales = self.buffers["values"], self.buffers["scales"]
        packed = QuantArray(values, scales, format=self.spec.format, dtype=self.spec.dtype)  # pyright: ignore[reportArgumentType]
        if not self.dequantize:
            return jax.device_put(packed, self.place)
        floats = _empty(self.spec.shape, np.dtype(self.spec.dtype))
        # One expert at a time: decoding needs several arrays of its output's size.
        for expert in range(floats.shape[0]):
            one = jax.tree.map(lambda array, expert=expert: jnp.asarray(array[expert]), packed)
            floats[expert] = dequantize(one)
        return jax.device_put(floats, self.place)


def _read(stream: BinaryIO, tensor: StoredTensor, target: np.ndarray, bar: tqdm) -> None:
    """Fill `target` from the first elements of the tensor, in the target's dtype."""
    if DTYPES[tensor.dtype] == target.dtype:
        stream.seek(tensor.offset)
        step = _CHUNK // target.itemsize
        for start in range(0, target.size, step):
            chunk = target[start : start + step]
            read_into(stream, tensor, chunk)
            bar.update(chunk.nbytes)
    else:
        start = 0
        for chunk in read_chunks(stream, tensor, target.size):
            _convert(chunk, target[start : start + chunk.size])
            start += chunk.size
            bar.update(chunk.nbytes)
    bar.update(tensor.nbytes - target.size * DTYPES[tensor.dtype].itemsize)


def _convert(source: np.ndarray, target: np.ndarray) -> None:
    if source.dtype == jnp.bfloat16 and target.dtype == np.float32:
        # The upper half of a float32; three times faster than a cast of this dtype.
        np.left_shift(source.view(np.uint16), 16, out=target.view(np.uint32), dtype=np.uint32)
    else:
        target[...] = source


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that `jax.device_put` on a CPU can keep without copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)
