"""Our own format: the parameter tree as Orbax stores it, bit for bit, in any dtype or quantisation.

A folder holds `config.json` as released, `orbax/` with the arrays, and `k3jax.json` which says of
each leaf its dtype and, when it is quantised, its format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.quant import BLOCK, QuantArray
from k3jax.weights.config_json import config_json
from k3jax.weights.host_arrays import dequantized
from k3jax.weights.leaves import by_path, checked, float_dtype, from_paths, placements
from k3jax.weights.model_folder import (
    CONFIG_FILE,
    NATIVE_MANIFEST,
    NATIVE_WEIGHTS,
    new_model_folder,
)

_VERSION = 1


def save_native(
    params: K3Params, config: K3Config, path: str | Path, *, overwrite: bool = False
) -> None:
    """Write parameters and config; nothing appears at `path` before everything is written.

    Raises ValueError when `params` is not what `config` implies, or when the folder already holds
    a model and `overwrite` is not set.
    """
    leaves = checked(params, config)
    manifest = {
        "version": _VERSION,
        "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
    }
    data = config_json(config)
    with new_model_folder(Path(path), overwrite=overwrite) as folder:
        with _checkpointer() as checkpointer:
            checkpointer.save(folder.absolute() / NATIVE_WEIGHTS, _arrays(leaves))
        for name, content in ((NATIVE_MANIFEST, manifest), (CONFIG_FILE, data)):
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


def load_native(
    path: str | Path,
    *,
    dtype: Any = None,
    dequantize_experts: bool = False,
    sharding: Any = None,
) -> tuple[K3Params, K3Config]:
    """Read what `save_native` wrote: bit for bit, unless `dtype` asks for another one.

    `dtype` is that of matrices and norms, as in `abstract`. The devices need not be those that
    wrote the folder; `sharding` is one `jax.sharding.Sharding` or a tree like the parameters.
    Raises FileNotFoundError without such a folder, and ValueError naming what is wrong in it.
    """
    folder = Path(path)
    config = K3Config.from_hf(folder)
    like = abstract(config, jnp.float32 if dtype is None else float_dtype(dtype))
    specs = _specs(folder, like)
    if dtype is not None:
        wanted = {name: leaf.dtype for name, leaf in by_path(like).items()}
        specs = {name: _with_dtype(spec, wanted[name]) for name, spec in specs.items()}
    places = placements(sharding, like)
    leaves = _restore(folder / NATIVE_WEIGHTS, specs, places)
    if dequantize_experts:
        for name, leaf in leaves.items():
            if isinstance(leaf, QuantArray):
                leaves[name] = jax.device_put(dequantized(leaf), places[name])
    return from_paths(leaves, like), config


def native_leaves(path: str | Path) -> dict[str, Any]:
    """The leaves of a native folder by path, with shapes, dtypes and quantisation but no data."""
    return _specs(Path(path), abstract(K3Config.from_hf(path)))


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # slow to import, and only this format needs it

    # Not StandardCheckpointer: its background thread still creates folders after a failed save.
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _describe(leaf: Any) -> str | dict[str, str]:
    dtype = jnp.dtype(leaf.dtype).name
    return {"format": leaf.format, "dtype": dtype} if isinstance(leaf, QuantArray) else dtype


def _specs(folder: Path, like: K3Params) -> dict[str, Any]:
    """The stored leaves: shapes from the config, dtypes and formats from the manifest."""
    file = folder / NATIVE_MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"no {NATIVE_MANIFEST} in {folder}: not a folder in our format")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    described = manifest.get("leaves") if isinstance(manifest, dict) else None
    if not isinstance(described, dict) or manifest.get("version") != _VERSION:
        raise ValueError(f"{file} is not a manifest of version {_VERSION}")
    expected = by_path(like)
    for name in sorted(expected.keys() ^ described.keys()):
        has = "lacks" if name in expected else "has"
        raise ValueError(f"{file} {has} {name}, unlike the config")
    specs = {}
    for name, leaf in expected.items():
        try:
            specs[name] = _spec(described[name], tuple(leaf.shape))
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{file}: {name} cannot be {described[name]!r}") from None
    return specs


def _spec(description: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(description, str):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(description))
    dtype, format = jnp.dtype(description["dtype"]), description["format"]
    *stack, width = shape
    if format == "mxfp4":
        values = jax.ShapeDtypeStruct((*stack, width // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*stack, width // BLOCK), jnp.uint8)
    elif format == "int8":
        values = jax.ShapeDtypeStruct(shape, jnp.int8)
        scales = jax.ShapeDtypeStruct(tuple(stack), jnp.float32)
    else:
        raise ValueError(format)
    return QuantArray(values, scales, format=format, dtype=dtype)  # pyright: ignore[reportArgumentType]


def _with_dtype(spec: Any, dtype: Any) -> Any:
    if isinstance(spec, QuantArray):
        return spec.replace(dtype=jnp.dtype(dtype))
    return jax.ShapeDtypeStruct(spec.shape, dtype)


def _arrays(leaves: dict[str, Any]) -> dict[str, Any]:
    """Plain arrays under flat names, so that what is stored does not depend on our classes."""
    arrays = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, QuantArray):
            arrays |= {f"{name}.values": leaf.values, f"{name}.scales": leaf.scales}
        else:
            arrays[name] = leaf
    return arrays


def _restore(folder: Path, specs: dict[str, Any], places: dict[str, Any]) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: the folder has lost its weights")
    targets = {name: _target(spec, places[name]) for name, spec in specs.items()}
    flat = _arrays(targets)
    try:
        with _checkpointer() as checkpointer:
            stored = checkpointer.metadata(folder.absolute()).item_metadata or {}
            for name, target in flat.items():
                if name not in stored or tuple(stored[name].shape) != target.shape:
                    found = tuple(stored[name].shape) if name in stored else "nothing"
                    raise ValueError(f"{name} is {found}, the config implies {target.shape}")
            arrays = checkpointer.restore(folder.absolute(), flat)
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder}: the Orbax weights cannot be read: {reason}") from None
    return {
        name: target.replace(values=arrays[f"{name}.values"], scales=arrays[f"{name}.scales"])
        if isinstance(target, QuantArray)
        else arrays[name]
        for name, target in targets.items()
    }


def _target(spec: Any, place: Any) -> Any:
    """The spec with a device on each array."""
    # Without one Orbax would look for the very devices that wrote the folder.
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.broadcast(here if place is None else place, spec)
    return jax.tree.map(
        lambda array, place: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place),
        spec,
        places,
    )
