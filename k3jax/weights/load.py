"""Loads a model folder of either format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.weights import hf
from k3jax.weights.hf_folder import matrix_dtype, plan
from k3jax.weights.leaves import by_path
from k3jax.weights.model_folder import is_native
from k3jax.weights.native import load_native, native_leaves


def load_model(
    path: str | Path,
    *,
    dtype: Any = None,
    dequantize_experts: bool = False,
    progress: bool = True,
    sharding: Any = None,
) -> tuple[K3Params, K3Config]:
    """Parameters and config of a released folder or of one that `save_native` wrote.

    `dtype` is that of matrices and norms; by default float32 for a released folder and the stored
    dtypes for ours. The other options are those of `hf.load`. Raises FileNotFoundError when the
    folder holds no model, and ValueError naming tensor and file when it is not a sound one.
    """
    folder = Path(path)
    if is_native(folder):
        return load_native(
            folder, dtype=dtype, dequantize_experts=dequantize_experts, sharding=sharding
        )
    config = K3Config.from_hf(folder)
    params = hf.load(
        folder,
        config,
        dtype=jnp.float32 if dtype is None else dtype,
        dequantize_experts=dequantize_experts,
        progress=progress,
        sharding=sharding,
    )
    return params, config


def stored_dtype(path: str | Path) -> np.dtype:
    """The dtype in which a model folder stores matrices and norms; float32 when they differ."""
    folder = Path(path)
    if not is_native(folder):
        return matrix_dtype(plan(folder, K3Config.from_hf(folder)))
    leaves = native_leaves(folder)
    found = {
        np.dtype(leaves[name].dtype)
        for name, spec in by_path(abstract(K3Config.from_hf(folder), jnp.bfloat16)).items()
        if spec.dtype == jnp.bfloat16
    }
    return found.pop() if len(found) == 1 else np.dtype(np.float32)
