"""Routed experts for many rows: every expert's rows side by side, as one batched product.

All experts then have as many places as the fullest one needs, rounded up to one of a few prepared
sizes. The weights are streamed from where they lie: slicing out one expert at a time would copy it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.linear.linear_xla import DOT_ROWS, streamed
from pallas_kernels.moe.reference import Activation, Weight, decode


def experts_by_capacity(
    x: Float[Array, "row latent"],
    indices: Int[Array, "row choice"],
    weights: Float[Array, "row choice"],
    gate_up: Weight,
    down: Weight,
    activation: Activation,
    valid: Bool[Array, "row"],
) -> Float[Array, "row latent"]:
    """As `experts`, whatever the routing; reads every expert's weights once. Differentiable."""
    rows, choices = indices.shape
    count = jax.tree.leaves(gate_up)[0].shape[0]
    # A choice that repeats an earlier one of its row shares that one's place.
    same = (indices[:, :, None] == indices[:, None, :]).argmax(-1)
    own = (same == jnp.arange(choices)) & valid[:, None]
    expert = jnp.where(own, indices, count).reshape(-1)
    # A pair's place among the pairs of its expert, in row order.
    order = jnp.argsort(expert, stable=True)
    ranked = expert[order]
    first = jnp.searchsorted(ranked, jnp.arange(count + 1))
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size) - first[ranked])
    place = jnp.take_along_axis(place.reshape(rows, choices), same, axis=1)
    shares = jnp.where(valid[:, None], weights, 0)[..., None]

    def run(capacity: int) -> Float[Array, "row latent"]:
        slot = first[:-1, None] + jnp.arange(capacity)
        filled = slot < first[1:, None]
        source = order[jnp.minimum(slot, order.size - 1)] // choices
        packed = jnp.where(filled[..., None], x[source], 0)
        gate, up = jnp.split(_products(packed, decode(gate_up)), 2, axis=-1)
        y = _products(activation(gate, up), decode(down)).reshape(count * capacity, -1)
        target = indices * capacity + jnp.minimum(place, capacity - 1)
        taken = y[target].astype(jnp.float32)
        return (taken * shares).sum(1)

    prepared = capacities(rows, choices, count)
    fullest = jnp.diff(first).max()
    branch = jnp.searchsorted(jnp.asarray(prepared), fullest)
    return jax.lax.switch(branch, [functools.partial(run, size) for size in prepared])


def capacities(rows: int, choices: int, experts: int) -> list[int]:
    """Places per expert to prepare a program for: a little over the mean, thrice that, and all."""
    mean = rows * choices / experts
    sizes = {8 * -(-int(spread * mean + 8) // 8) for spread in (1.25, 3.0)}
    return [*sorted(size for size in sizes if size < rows), rows]


def _products(
    x: Float[Array, "expert row in"], w: Float[Array, "expert out in"]
) -> Float[Array, "expert row out"]:
    if x.shape[1] < DOT_ROWS and x.dtype == jnp.float32:
        return streamed(x, w)
    out = jax.lax.dot_general(
        x,
        w.astype(x.dtype),
        (((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    return out.astype(x.dtype)
