"""The logical leaves of `K3Params` by path; a QuantArray is one leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.quant import QuantArray


def by_path(params: Any) -> dict[str, Any]:
    """Leaves under names such as `layers.3.ffn.gate_up`, in the order of the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantised)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def from_paths(leaves: dict[str, Any], like: K3Params) -> K3Params:
    """The inverse of `by_path` for a tree shaped like `like`."""
    treedef = jax.tree.structure(like, is_leaf=is_quantised)
    return jax.tree.unflatten(treedef, [leaves[path] for path in by_path(like)])


def placements(sharding: Any, like: K3Params) -> dict[str, Any]:
    """The sharding of each leaf of `like`, from none, one for all, or a tree of them."""
    paths = list(by_path(like))
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return dict.fromkeys(paths, sharding)
    treedef = jax.tree.structure(like, is_leaf=is_quantised)
    return dict(zip(paths, treedef.flatten_up_to(sharding), strict=True))


def checked(params: K3Params, config: K3Config) -> dict[str, Any]:
    """`by_path(params)` after comparing it with what `config` implies.

    Raises ValueError naming the leaf that is missing, superfluous, of the wrong shape or no float.
    """
    leaves, expected = by_path(params), by_path(abstract(config))
    for path in sorted(expected.keys() ^ leaves.keys()):
        has = "lack" if path in expected else "have"
        raise ValueError(f"the parameters {has} {path}, unlike the config")
    for path, spec in expected.items():
        leaf = leaves[path]
        if tuple(leaf.shape) != tuple(spec.shape):
            raise ValueError(
                f"parameter {path} has shape {tuple(leaf.shape)}, the config implies {spec.shape}"
            )
        if not isinstance(leaf, QuantArray) and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"parameter {path} has dtype {leaf.dtype}, expected a float")
    return leaves


def float_dtype(dtype: Any) -> np.dtype:
    """A dtype that matrices can have, or ValueError."""
    found = np.dtype(dtype)
    if found not in (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)):
        raise ValueError(f"dtype = {found}, expected bfloat16, float16 or float32")
    return found


def is_quantised(node: Any) -> bool:
    """Whether a node of a parameter tree is a QuantArray."""
    return isinstance(node, QuantArray)
