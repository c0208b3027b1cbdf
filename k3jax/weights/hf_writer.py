"""Writes `K3Params` as a folder in the released format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.quant import BLOCK, QuantArray, quantize
from k3jax.weights.config_json import config_json
from k3jax.weights.leaves import by_path, checked, float_dtype
from k3jax.weights.model_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, new_model_folder
from k3jax.weights.names import Piece, layout, pieces, stored_name
from k3jax.weights.safetensors_file import DTYPES, write_file

_CHUNK = 1 << 24  # elements converted at a time

Shard = list[tuple[str, np.dtype, Piece]]


def save(
    params: K3Params,
    config: K3Config,
    path: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: Any = jnp.bfloat16,
    overwrite: bool = False,
) -> None:
    """Write `config.json` and the weights, with the released names, shapes and dtypes.

    `dtype` is that of matrices and norms; what the release stores in float32 stays float32. Packed
    experts are written as they are, float experts are quantised when `config.expert_format` says
    so. One file, or several and an index when it would exceed `max_shard_bytes` (a larger tensor
    has a file of its own). Nothing appears at `path` before everything is written.

    Raises ValueError when `params` is not what `config` implies, when a leaf is quantised that the
    format stores plain, or when the folder already holds a model and `overwrite` is not set.
    """
    matrix_dtype = float_dtype(dtype)
    leaves = _leaves(params, config)
    data = config_json(config, matrix_dtype.name)
    shards = _shards(config, matrix_dtype, max_shard_bytes)
    with new_model_folder(Path(path), overwrite=overwrite) as folder:
        names = [SINGLE_FILE]
        if len(shards) > 1:
            count = len(shards)
            names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
            (folder / INDEX_FILE).write_text(_index(names, shards), encoding="utf-8")
        for name, shard in zip(names, shards, strict=True):
            tensors = [(tensor, dtype, piece.shape) for tensor, dtype, piece in shard]
            write_file(folder / name, tensors, _data(shard, leaves))
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _leaves(params: K3Params, config: K3Config) -> dict[str, Any]:
    """The leaves by path, each one that the format can store."""
    leaves = checked(params, config)
    for path, spec in by_path(abstract(config)).items():
        leaf = leaves[path]
        packed = spec.format if isinstance(spec, QuantArray) else None
        if isinstance(leaf, QuantArray) and leaf.format != packed:
            stored = f"in {packed}" if packed else "as plain floats"
            raise ValueError(
                f"parameter {path} is quantised to {leaf.format}, the config stores it {stored}; "
                "dequantize it first"
            )
    return leaves


def _shards(config: K3Config, dtype: np.dtype, limit: int) -> list[Shard]:
    """The tensors of each file: in model order between files, aligned to their size within one."""
    style = layout(config)
    shards: list[Shard] = [[]]
    used = 0
    for piece in pieces(config):
        stored = DTYPES["U8"] if piece.part else DTYPES["F32"] if piece.float32 else dtype
        size = math.prod(piece.shape) * stored.itemsize
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append((stored_name(piece.name, style), stored, piece))
        used += size
    for shard in shards:
        shard.sort(key=lambda tensor: (-tensor[1].itemsize, tensor[0]))
    return shards


def _index(names: list[str], shards: list[Shard]) -> str:
    weight_map = {
        tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _, _ in shard
    }
    total = sum(
        math.prod(piece.shape) * dtype.itemsize for shard in shards for _, dtype, piece in shard
    )
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def _data(shard: Shard, leaves: dict[str, Any]) -> Iterator[np.ndarray]:
    for _, dtype, piece in shard:
        run = _run(piece, leaves[piece.leaf])
        for start in range(0, run.size, _CHUNK):
            yield run[start : start + _CHUNK].astype(dtype, copy=False)
        yield np.zeros(math.prod(piece.shape) - run.size, dtype)


def _run(piece: Piece, leaf: Any) -> np.ndarray:
    """The flat values that a piece takes from its leaf."""
    if isinstance(leaf, QuantArray):
        leaf = getattr(leaf, piece.part)
    elif piece.part:
        return _quantized_run(piece, leaf)
    return np.asarray(leaf).reshape(-1)[piece.start : piece.start + piece.size]


def _quantized_run(piece: Piece, leaf: Any) -> np.ndarray:
    """The same from a float leaf that the file stores packed: one expert's matrix quantised."""
    per_element = 2 if piece.part == "values" else BLOCK
    start, size = piece.start * per_element, piece.size * per_element
    matrix = np.asarray(leaf).reshape(-1)[start : start + size].reshape(-1, leaf.shape[-1])
    packed = quantize(jnp.asarray(matrix), "mxfp4")
    return np.asarray(getattr(packed, piece.part)).reshape(-1)
