"""Makes released model folders through the safetensors library, not through our writer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy  # noqa: F401  (gives numpy the dtype bfloat16 that safetensors asks it for)
import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]

INDEX = "model.safetensors.index.json"


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a folder, whatever its files."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def folder_of(path: Path, source: Path, tensors: Tensors | None = None) -> Path:
    """A one-file folder with the config of `source`, and its tensors unless others are given."""
    path.mkdir()
    shutil.copy(source / "config.json", path)
    save_file(tensors_of(source) if tensors is None else tensors, path / "model.safetensors")
    return path


def sharded(path: Path, source: Path, file_of: Callable[[str], str]) -> Path:
    """The model of `source` in several files: `file_of` says in which one each tensor is."""
    path.mkdir()
    shutil.copy(source / "config.json", path)
    tensors = tensors_of(source)
    weight_map = {name: file_of(name) for name in tensors}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
