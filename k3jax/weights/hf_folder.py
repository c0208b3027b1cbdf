"""What a folder of safetensors files holds, checked against the config before any data is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.config import K3Config
from k3jax.weights.model_folder import INDEX_FILE, SINGLE_FILE, check_folder
from k3jax.weights.names import (
    TEXT_PREFIX,
    VISION_PREFIXES,
    Piece,
    pieces,
    plain_name,
    stored_name,
)
from k3jax.weights.safetensors_file import DTYPES, StoredTensor, read_header

Plan = list[tuple[Piece, StoredTensor]]


def plan(folder: Path, config: K3Config) -> Plan:
    """Every tensor of the folder with the piece of the model that it is, in file order.

    Reads headers only. Raises FileNotFoundError for a missing folder or file, and ValueError naming
    tensor and file when the files do not hold exactly the tensors that `config` implies.
    """
    stored = stored_tensors(folder)
    by_name: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = plain_name(tensor.name)
        if name in by_name:
            other = by_name[name]
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is also in {other.file} as {other.name}"
            )
        by_name[name] = tensor
    result: Plan = []
    missing: list[str] = []
    for piece in pieces(config):
        tensor = by_name.pop(piece.name, None)
        if tensor is None:
            missing.append(piece.name)
        else:
            _check(piece, tensor)
            result.append((piece, tensor))
    if missing:
        raise ValueError(_missing(missing, by_name, stored, folder, config))
    if by_name:
        raise ValueError(_unexplained(by_name, config))
    result.sort(key=lambda pair: (pair[1].file, pair[1].offset))
    return result


def matrix_dtype(todo: Plan) -> np.dtype:
    """The dtype of the stored matrices and norms; float32 when they differ."""
    found = {
        DTYPES[tensor.dtype] for piece, tensor in todo if piece.part == "" and not piece.float32
    }
    return found.pop() if len(found) == 1 else np.dtype(np.float32)


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of `model.safetensors`, or of the files that the index names.

    Raises as `plan` does when files are missing or broken, when index and headers disagree, or
    when the folder holds safetensors files that are not part of the model.
    """
    check_folder(folder)
    present = {file.name for file in folder.glob("*.safetensors")}
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
    elif SINGLE_FILE in present:
        weight_map, names = None, [SINGLE_FILE]
    elif present:
        raise FileNotFoundError(
            f"{folder} holds {min(present)} but neither {SINGLE_FILE} nor {INDEX_FILE}"
        )
    else:
        raise FileNotFoundError(f"no weights in {folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    stray = sorted(present - set(names))
    if stray:
        listed = SINGLE_FILE if weight_map is None else INDEX_FILE
        raise ValueError(f"{folder / stray[0]} is not part of the model that {listed} describes")
    for name in names:
        if not (folder / name).is_file():
            assert weight_map is not None
            tensor = next(key for key, value in weight_map.items() if value == name)
            raise FileNotFoundError(
                f"{folder / name} is missing; {INDEX_FILE} names it for {tensor}"
            )
    tensors = [tensor for name in names for tensor in read_header(folder / name)]
    if weight_map is not None:
        _check_index(index, weight_map, tensors)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = json.loads(index.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index} is not valid JSON: {error}") from None
    weight_map: Any = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise ValueError(f"{index}: tensor {name} is in {file!r}, which is not a file name")
    return weight_map


def _check_index(index: Path, weight_map: dict[str, str], tensors: Iterable[StoredTensor]) -> None:
    found: dict[str, Path] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise ValueError(f"{tensor.file}: tensor {tensor.name} is also in {found[tensor.name]}")
        found[tensor.name] = tensor.file
        if tensor.name not in weight_map:
            raise ValueError(f"{tensor.file}: tensor {tensor.name} is not in {index.name}")
        if weight_map[tensor.name] != tensor.file.name:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is here, but {index.name} says "
                f"{weight_map[tensor.name]}"
            )
    for name, file in weight_map.items():
        if name not in found:
            raise ValueError(f"{index.parent / file}: no tensor {name}, which {index.name} lists")


def _check(piece: Piece, tensor: StoredTensor) -> None:
    allowed = ("BF16", "F16", "F32") if piece.part == "" else ("U8",)
    if tensor.dtype not in allowed:
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}, "
            f"expected {' or '.join(allowed)}"
        )
    if not piece.fits(tensor.shape):
        expected = f"at least {piece.size} values in one axis" if piece.padded else piece.shape
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, "
            f"the config implies {expected}"
        )


def _missing(
    missing: list[str],
    unused: dict[str, StoredTensor],
    stored: list[StoredTensor],
    folder: Path,
    config: K3Config,
) -> str:
    name = missing[0]
    plain = name.removesuffix("_packed").removesuffix("_scale")
    if plain != name and plain in unused:
        tensor = unused[plain]
        return (
            f"{tensor.file}: tensor {tensor.name} holds plain {tensor.dtype}, but the config's "
            "quantization_config says that experts are packed MXFP4"
        )
    if config.expert_format is None and f"{name}_packed" in unused:
        tensor = unused[f"{name}_packed"]
        return (
            f"{tensor.file}: tensor {tensor.name} is packed, but the config has no "
            "quantization_config"
        )
    wrapped = any(tensor.name.startswith(TEXT_PREFIX) for tensor in stored)
    name = stored_name(name, "k3" if wrapped else "kimi-linear")
    files = sorted({tensor.file.name for tensor in stored})
    where = folder / files[0] if len(files) == 1 else f"any of the {len(files)} files of {folder}"
    more = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
    return f"tensor {name} is not in {where}{more}"


def _unexplained(unused: dict[str, StoredTensor], config: K3Config) -> str:
    name, tensor = next(iter(unused.items()))
    why = "the config implies no such tensor"
    if config.vision is None and name.startswith(VISION_PREFIXES):
        why = "the config has no vision_config"
    more = f" (and {len(unused) - 1} others)" if len(unused) > 1 else ""
    return f"{tensor.file}: unexplained tensor {tensor.name}{more}: {why}"
