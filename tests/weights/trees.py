"""Parameter trees to write, and what it means for two to be the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.model.params import K3Params, abstract
from k3jax.quant import QuantArray, dequantize


def random_params(config: K3Config, seed: int = 0, *, as_stored: bool = True) -> K3Params:
    """Random float32 parameters, by default such that the released dtypes hold them exactly."""
    rng = np.random.default_rng(seed)

    def leaf(spec: Any) -> jax.Array:
        if spec.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, spec.shape, np.uint8))
        floats = rng.standard_normal(spec.shape, np.float32)
        return jnp.asarray(floats.astype(jnp.bfloat16).astype(spec.dtype) if as_stored else floats)

    return jax.tree.map(leaf, abstract(config))


def equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure, dtypes and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in pairs
    )


def all_dequantized(params: K3Params) -> K3Params:
    """The tree with every packed leaf as floats."""
    decode = jax.jit(dequantize)  # compiles one program per shape instead of one per operation
    return jax.tree.map(
        lambda leaf: decode(leaf) if isinstance(leaf, QuantArray) else leaf,
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantArray),
    )


class Unreadable:
    """A leaf that fails when its values are wanted."""

    def __init__(self, array: np.ndarray):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise OSError("disk full")
