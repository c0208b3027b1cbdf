"""Muon for the matrices, AdamW for everything else, and the schedule of their step sizes."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from k3jax.model.params import K3Params, MoEParams

MATRIX_RATE = 0.02
"""Muon's step for a square matrix: the spectral norm of one update."""
VECTOR_RATE = 4e-3
"""AdamW's step for norms, gates, router, embedding and head."""
MOMENTUM = 0.95
DECAY = 0.01
BALANCE_RATE = 2e-3
"""Step of the router's selection bias, by the sign of the load's error (no auxiliary loss)."""

_STACKED = {"qkv": 3, "gate_up": 2}
"""Leaves that hold several matrices one above the other."""
_VECTORS = ("embed", "lm_head", "router", "norm", "_mix", "conv", "beta", "decay_bias", "decay_log")


class OptimizerState(struct.PyTreeNode):
    """Moments shaped like the parameters: `first` for all, `second` only used by AdamW."""

    first: K3Params
    second: K3Params


def init(params: K3Params) -> OptimizerState:
    """All moments zero; leaves of Muon keep a scalar as second moment."""

    def second(path: Any, leaf: Array) -> Array:
        return jnp.zeros(()) if is_matrix(path, leaf) else jnp.zeros_like(leaf)

    return OptimizerState(
        first=jax.tree.map(jnp.zeros_like, params),
        second=jax.tree_util.tree_map_with_path(second, params),
    )


def is_matrix(path: Any, leaf: Array) -> bool:
    """Whether Muon moves this leaf."""
    name = jax.tree_util.keystr(path)
    return leaf.ndim >= 2 and not any(part in name for part in _VECTORS)


def rate(step: int, steps: int, *, warmup: int = 40, cooldown: float = 0.7) -> float:
    """Warm-up, then constant, then linearly down to 2 % over the last `cooldown` of all steps."""
    rest = (steps - step) / max(1.0, cooldown * steps)
    return min(1.0, (step + 1) / warmup, 0.02 + 0.98 * max(0.0, rest))


def update(
    params: K3Params,
    gradients: K3Params,
    state: OptimizerState,
    loads: Float[Array, "sparse_layer expert"],
    step: Array,
    factor: Array,
) -> tuple[K3Params, OptimizerState]:
    """One step with step sizes scaled by `factor`; `step` counts from 0."""
    norm = optax.tree.norm(gradients)
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)), gradients)
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    paths, leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
    gs, firsts = jax.tree.leaves(gradients), jax.tree.leaves(state.first)
    seconds = jax.tree.leaves(state.second)
    muon = [is_matrix(path, leaf) for path, leaf in flat]
    new_first = [
        MOMENTUM * m + (g if is_muon else (1 - MOMENTUM) * g)
        for m, g, is_muon in zip(firsts, gs, muon, strict=True)
    ]
    nesterov = {i: gs[i] + MOMENTUM * new_first[i] for i, is_muon in enumerate(muon) if is_muon}
    directions = _orthogonal(
        {i: nesterov[i] for i in nesterov}, {i: jax.tree_util.keystr(paths[i]) for i in nesterov}
    )
    new_leaves, new_second = [], []
    for i, (leaf, g, v) in enumerate(zip(leaves, gs, seconds, strict=True)):
        if muon[i]:
            move = MATRIX_RATE * directions[i] + MATRIX_RATE * DECAY * leaf
        else:
            v = 0.98 * v + 0.02 * g * g
            first = new_first[i] / (1 - MOMENTUM ** (step + 1))
            second = v / (1 - 0.98 ** (step + 1))
            move = VECTOR_RATE * first / (jnp.sqrt(second) + 1e-8)
        new_leaves.append(leaf - factor * move)
        new_second.append(v)
    params = jax.tree.unflatten(tree, new_leaves)
    first, second = jax.tree.unflatten(tree, new_first), jax.tree.unflatten(tree, new_second)
    return _balance(params, loads), OptimizerState(first, second)


def _balance(params: K3Params, loads: Float[Array, "sparse_layer expert"]) -> K3Params:
    """Move each selection bias towards equal loads."""
    layers, seen = list(params.layers), 0
    for number, layer in enumerate(layers):
        if isinstance(layer.ffn, MoEParams):
            error = loads[seen].mean() - loads[seen]
            bias = layer.ffn.score_bias + BALANCE_RATE * jnp.sign(error)
            layers[number] = layer.replace(ffn=layer.ffn.replace(score_bias=bias))
            seen += 1
    return params.replace(layers=tuple(layers))


def _orthogonal(matrices: dict[int, Array], names: dict[int, str]) -> dict[int, Array]:
    """Each matrix with all singular values near one, times `sqrt(max(1, out/in))`.

    Matrices of one shape (up to transposition) go through the iteration together.
    """
    groups: dict[tuple[int, int], list[tuple[int, Array, bool]]] = defaultdict(list)
    for i, m in matrices.items():
        parts = next((n for key, n in _STACKED.items() if names[i].endswith(key)), 1)
        stack = m.reshape(-1, m.shape[-2] // parts, m.shape[-1])
        tall = stack.shape[1] > stack.shape[2]
        stack = stack.swapaxes(1, 2) if tall else stack
        groups[stack.shape[1], stack.shape[2]].append((i, stack, tall))
    result: dict[int, Array] = {}
    for (short, long), members in groups.items():
        whole = newton_schulz(jnp.concatenate([stack for _, stack, _ in members]))
        start = 0
        for i, stack, tall in members:
            piece = whole[start : start + len(stack)]
            start += len(stack)
            piece = piece.swapaxes(1, 2) * (long / short) ** 0.5 if tall else piece
            result[i] = piece.reshape(matrices[i].shape)
    return result


def newton_schulz(m: Float[Array, "stack short long"]) -> Float[Array, "stack short long"]:
    """Push all singular values into about 0.7..1.2 by five quintic steps (Jordan et al., Muon)."""
    x = m / (jnp.linalg.norm(m, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(5):
        square = x @ x.swapaxes(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x
