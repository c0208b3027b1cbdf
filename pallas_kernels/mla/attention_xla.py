"""MLA attention as XLA products: absorbed for few queries, expanded for many."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_platform
from pallas_kernels.linear.linear_xla import DOT_ROWS, side_by_side, streamed

QUERY_BLOCK = 256
"""Queries whose scores exist at once; bounds the scores to `block × context` per head."""
FEW_ROWS = 32
"""Queries per head up to which XLA's own loops over `kv_up` in place are the fastest on CPU."""
FEW_QUERIES = 16
"""The same for queries, of all heads, and the latents of one row."""
TERMS = 16
"""Rows of `kv_up` that are summed in one pass."""


def prefers_expanded(
    *, tokens: int, context: int, rank: int, nope: int, shared: int, value: int
) -> bool:
    """Whether expanding keys and values costs fewer multiplications than absorbing them."""
    projection = rank * (nope + value)
    expanded = context * projection + tokens * context * (nope + shared + value)
    absorbed = tokens * projection + tokens * context * (2 * rank + shared)
    return expanded <= absorbed


def mla_absorbed(
    q: Float[Array, "row token head query"],
    context: Float[Array, "row context latent"],
    kv_up: Float[Array, "head out latent"],
    starts: Int[Array, "row"],
) -> Float[Array, "row token head value"]:
    """`mla_reference` with `kv_up` moved to query and output: the latents are read as is."""
    _check(q, context, kv_up)
    rows, _, heads, _ = q.shape
    rank = kv_up.shape[2]
    nope = q.shape[-1] - (context.shape[2] - rank)
    scale = 1.0 / math.sqrt(q.shape[-1])
    query = absorbed_queries(q, kv_up, nope)

    def attend(query: Array, position: Array) -> Array:
        count = query.shape[1]
        scores = product(query.reshape(rows, count * heads, -1), context)
        weights = _softmax(scores.reshape(rows, count, heads, -1) * scale, position)
        weights = weights.astype(q.dtype).reshape(rows, count * heads, -1)
        # The whole latent, shared part and all: slicing it out first would copy the context.
        mixed = jnp.einsum("bxc,bcw->bxw", weights, context)
        return mixed.reshape(rows, count, heads, -1)[..., :rank]

    mixed = _over_query_blocks(attend, query, starts)
    return projected_values(mixed, kv_up, nope).astype(q.dtype)


def mla_expanded(
    q: Float[Array, "row token head query"],
    context: Float[Array, "row context latent"],
    kv_up: Float[Array, "head out latent"],
    starts: Int[Array, "row"],
) -> Float[Array, "row token head value"]:
    """`mla_reference` with keys and values expanded once and queries taken in blocks."""
    _check(q, context, kv_up)
    rows, length, width = context.shape
    heads, out, rank = kv_up.shape
    shared = width - rank
    nope = q.shape[-1] - shared
    scale = 1.0 / math.sqrt(q.shape[-1])
    expanded = jnp.einsum("bcr,kr->bck", context[..., :rank], kv_up.reshape(heads * out, rank))
    expanded = expanded.reshape(rows, length, heads, out)
    part = jnp.broadcast_to(context[:, :, None, rank:], (rows, length, heads, shared))
    keys = jnp.concatenate([expanded[..., :nope], part], axis=-1).transpose(0, 2, 1, 3)
    values = expanded[..., nope:].transpose(0, 2, 1, 3)

    def attend(query: Array, position: Array) -> Array:
        scores = jnp.einsum("bthd,bhcd->bhtc", query, keys, preferred_element_type=jnp.float32)
        weights = _softmax(scores * scale, position, head_axis=1).astype(q.dtype)
        return jnp.einsum("bhtc,bhcv->bthv", weights, values)

    return _over_query_blocks(attend, q, starts)


def absorbed_queries(
    q: Float[Array, "row token head query"], kv_up: Float[Array, "head out latent"], nope: int
) -> Float[Array, "row token head latent"]:
    """Queries that meet latents directly: their key part through `kv_up`, then the shared part."""
    rows, tokens, heads, _ = q.shape
    # Heads first and alone: a product batched over the axis that its operands have outermost is
    # several times faster on CPU.
    by_head = q[..., :nope].transpose(2, 0, 1, 3).reshape(heads, -1, nope)
    latent = _absorb(by_head, kv_up).reshape(heads, rows, tokens, -1).transpose(1, 2, 0, 3)
    return jnp.concatenate([latent, q[..., nope:]], axis=-1)


def projected_values(
    mixed: Float[Array, "row token head latent"], kv_up: Float[Array, "head out latent"], nope: int
) -> Float[Array, "row token head value"]:
    """Each head's values of the latents that its weights have mixed."""
    rows, tokens, heads, rank = mixed.shape
    by_head = mixed.transpose(2, 0, 1, 3).reshape(heads, -1, rank)
    out = _values(by_head, kv_up, nope)
    return out.reshape(heads, rows, tokens, -1).transpose(1, 2, 0, 3)


def _absorb(
    q: Float[Array, "head query nope"], kv_up: Float[Array, "head out latent"]
) -> Float[Array, "head query latent"]:
    """Queries times the key rows of `kv_up`.

    On CPU a slice in front of a product is a copy. A few queries sum the rows times their weights,
    element by element; while they are still few, reading the value rows too, times zero, costs
    less than the copy.
    """
    nope = q.shape[2]
    if _at_most(FEW_ROWS, q):
        return _weighted_rows(q, kv_up)
    if _at_most(DOT_ROWS - 1, q):
        zeros = jnp.zeros((*q.shape[:2], kv_up.shape[1] - nope), q.dtype)
        q = jax.lax.optimization_barrier(jnp.concatenate([q, zeros], axis=-1))
        return jax.lax.optimization_barrier(jnp.einsum("hxn,hnr->hxr", q, kv_up))
    q = jax.lax.optimization_barrier(q)
    return jnp.einsum("hxn,hnr->hxr", q, kv_up[:, :nope])


def _weighted_rows(
    q: Float[Array, "head query nope"], kv_up: Float[Array, "head out latent"]
) -> Float[Array, "head query latent"]:
    """`_absorb` as sums of `TERMS` rows each, which XLA reads in one pass, and the sum of those."""
    q = jax.lax.optimization_barrier(q)
    terms = [q[:, :, n, None] * kv_up[:, None, n] for n in range(q.shape[2])]
    sums = [
        jax.lax.optimization_barrier(functools.reduce(operator.add, terms[at : at + TERMS]))
        for at in range(0, len(terms), TERMS)
    ]
    return jax.lax.optimization_barrier(functools.reduce(operator.add, sums))


def _values(
    mixed: Float[Array, "head query latent"], kv_up: Float[Array, "head out latent"], nope: int
) -> Float[Array, "head query value"]:
    """Mixed latents times the value rows of `kv_up`, read in place while they are few."""
    if _at_most(FEW_ROWS, mixed):
        return jax.lax.optimization_barrier(side_by_side(mixed, kv_up[:, nope:]))
    if _at_most(DOT_ROWS - 1, mixed):
        return product(mixed, kv_up)[..., nope:]
    return product(mixed, kv_up[:, nope:])


def product(
    x: Float[Array, "batch row in"], w: Float[Array, "batch out in"]
) -> Float[Array, "batch row out"]:
    """`x wᵀ` per batch entry in float32, on CPU without a copy of w while the rows are few."""
    if _at_most(FEW_QUERIES, x):
        return jax.lax.optimization_barrier(side_by_side(x, w.astype(jnp.float32)))
    if _at_most(DOT_ROWS - 1, x):
        return streamed(x, w.astype(jnp.float32))
    return jnp.einsum("bxi,boi->bxo", x, w, preferred_element_type=jnp.float32)


def _at_most(rows: int, x: Float[Array, "batch row width"]) -> bool:
    """Whether x has so few rows per batch entry, and forms for CPU apply."""
    return device_platform() == "cpu" and x.dtype == jnp.float32 and x.shape[1] <= rows


def _softmax(scores: Array, position: Array, *, head_axis: int = 2) -> Array:
    """Float32 softmax over the context positions up to each query's own."""
    seen = jnp.arange(scores.shape[-1]) <= position[..., None]
    return jax.nn.softmax(jnp.where(jnp.expand_dims(seen, head_axis), scores, -jnp.inf), axis=-1)


def _over_query_blocks(
    attend: Callable[[Array, Array], Array], query: Array, starts: Array
) -> Array:
    """`attend` on blocks of queries, one after another, so that their scores never coexist."""
    rows, tokens = query.shape[:2]
    position = starts[:, None] + jnp.arange(tokens)
    if tokens <= QUERY_BLOCK:
        return attend(query, position)
    blocks = -(-tokens // QUERY_BLOCK)
    padding = blocks * QUERY_BLOCK - tokens
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    position = jnp.pad(position, ((0, 0), (0, padding)))
    split = query.reshape(rows, blocks, QUERY_BLOCK, *query.shape[2:]).swapaxes(0, 1)
    positions = position.reshape(rows, blocks, QUERY_BLOCK).swapaxes(0, 1)
    out = jax.lax.map(lambda block: attend(*block), (split, positions))
    return out.swapaxes(0, 1).reshape(rows, blocks * QUERY_BLOCK, *out.shape[3:])[:, :tokens]


def _check(q: Array, context: Array, kv_up: Array) -> None:
    shared = context.shape[-1] - kv_up.shape[-1]
    if not 0 <= shared < q.shape[-1] or kv_up.shape[1] <= q.shape[-1] - shared:
        raise ValueError(
            f"context width {context.shape[-1]}, latent width {kv_up.shape[-1]}, query width "
            f"{q.shape[-1]} and {kv_up.shape[1]} key and value rows per head do not fit together"
        )
    if q.shape[2] != kv_up.shape[0] or q.shape[0] != context.shape[0]:
        raise ValueError(f"query {q.shape} does not match context {context.shape} or {kv_up.shape}")
