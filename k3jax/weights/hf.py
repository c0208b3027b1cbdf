"""Loads released safetensors folders into `K3Params`, streamed file by file."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.quant import QuantArray
from k3jax.weights.hf_folder import Plan, plan
from k3jax.weights.host_arrays import dequantized, empty
from k3jax.weights.leaves import by_path, float_dtype, from_paths, placements
from k3jax.weights.model_folder import check_folder
from k3jax.weights.names import Part, Piece
from k3jax.weights.safetensors_file import DTYPES, StoredTensor, read_into


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
    check_folder(folder)
    config = K3Config.from_hf(folder) if config is None else config
    todo = plan(folder, config)
    spec = abstract(config, float_dtype(dtype))
    places = placements(sharding, spec)
    leaves = {
        path: _Leaf(leaf, dequantize_experts, places[path]) for path, leaf in by_path(spec).items()
    }
    for piece, _ in todo:
        leaves[piece.leaf].waiting += 1
    _stream(todo, leaves, progress)
    return from_paths({path: leaf.result for path, leaf in leaves.items()}, spec)


def _stream(todo: Plan, leaves: dict[str, _Leaf], progress: bool) -> None:
    total = sum(piece.size * DTYPES[tensor.dtype].itemsize for piece, tensor in todo)
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
            self.buffers[piece.part] = empty(array.shape, np.dtype(array.dtype))
        target = self.buffers[piece.part].reshape(-1)[piece.start : piece.start + piece.size]
        read_into(stream, tensor, target, bar.update)
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
        return jax.device_put(dequantized(packed), self.place)
