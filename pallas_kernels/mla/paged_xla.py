"""MLA attention over paged latents, block by block as far as the longest row reaches."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.implementation import device_platform
from pallas_kernels.mla.attention_xla import (
    absorbed_queries,
    mla_absorbed,
    mla_expanded,
    prefers_expanded,
    product,
    projected_values,
)

BLOCK_TOKENS = 512
"""Positions of a row that are gathered and attended to at once."""
BATCH_TOKENS = 2048
"""The same of all rows together on CPU, so that they are still in its caches when they are read
again. Without it `scripts/benchmark_model.py` decoded 32 rows at 208 tokens/s, with it at 223."""


def mla_paged(
    q: Float[Array, "row token head query"],
    pages: Float[Array, "page position latent"],
    kv_up: Float[Array, "head out latent"],
    page_table: Int[Array, "row page"],
    starts: Int[Array, "row"],
    lengths: Int[Array, "row"],
) -> Float[Array, "row token head value"]:
    """`reference.mla_reference` of queries over the cached latents of their own rows.

    The pages hold the new tokens too: row b has `starts[b] + lengths[b]` positions. A page table
    of more positions than a block is walked by a loop that ends with the longest row, so
    its width costs nothing and one program serves every context. What pages hold beyond a row's
    positions is ignored.
    """
    size, entries = pages.shape[1], page_table.shape[1]
    shared = pages.shape[2] - kv_up.shape[2]
    nope = q.shape[3] - shared
    expand = prefers_expanded(
        tokens=q.shape[1],
        context=min(entries * size, BLOCK_TOKENS),
        rank=kv_up.shape[2],
        nope=nope,
        shared=shared,
        value=kv_up.shape[1] - nope,
    )
    counts = starts + lengths
    block = _block_pages(q.shape[0], size)
    if entries <= block:
        context = gather_latents(pages, page_table, counts, 0).astype(q.dtype)
        return (mla_expanded if expand else mla_absorbed)(q, context, kv_up, starts)
    page_table = jnp.pad(page_table, ((0, 0), (0, -entries % block)))
    walk = _walk_expanded if expand else _walk_absorbed
    return walk(q, pages, kv_up, page_table, starts, counts, block)


def _block_pages(rows: int, page_size: int) -> int:
    tokens = BLOCK_TOKENS
    if device_platform() == "cpu":
        tokens = min(tokens, BATCH_TOKENS // max(1, rows))
    return max(1, tokens // page_size)


Attend = Callable[[Array], tuple[Array, Callable[[Array], Array]]]
"""From a block of latents: unscaled scores [..., query, position], and what mixes its values."""


def _walk_absorbed(
    q: Array,
    pages: Array,
    kv_up: Array,
    page_table: Array,
    starts: Array,
    counts: Array,
    block: int,
) -> Array:
    rows, tokens, heads, _ = q.shape
    rank = kv_up.shape[2]
    nope = q.shape[-1] - (pages.shape[2] - rank)
    query = absorbed_queries(q, kv_up, nope).reshape(rows, tokens * heads, -1)
    query = jax.lax.optimization_barrier(query)
    position = jnp.repeat(starts[:, None] + jnp.arange(tokens), heads, axis=1)

    def attend(context: Array) -> tuple[Array, Callable[[Array], Array]]:
        def mix(weights: Array) -> Array:
            # The whole latent, shared part and all: slicing it out first would copy the block.
            return jnp.einsum("bxc,bcw->bxw", weights, context, preferred_element_type=jnp.float32)

        return product(query, context), mix

    scale = 1.0 / math.sqrt(q.shape[-1])
    out = _walk(attend, pages, page_table, position, counts, block, pages.shape[2], q.dtype, scale)
    out = out.reshape(rows, tokens, heads, -1)[..., :rank].astype(q.dtype)
    return projected_values(out, kv_up, nope).astype(q.dtype)


def _walk_expanded(
    q: Array,
    pages: Array,
    kv_up: Array,
    page_table: Array,
    starts: Array,
    counts: Array,
    block: int,
) -> Array:
    rows, tokens, heads, _ = q.shape
    _, out_rows, rank = kv_up.shape
    shared = pages.shape[2] - rank
    nope = q.shape[-1] - shared
    flat = kv_up.reshape(heads * out_rows, rank)
    query = jax.lax.optimization_barrier(q.transpose(0, 2, 1, 3))
    position = starts[:, None, None] + jnp.arange(tokens)
    position = jnp.broadcast_to(position, (rows, heads, tokens))

    def attend(context: Array) -> tuple[Array, Callable[[Array], Array]]:
        both = jnp.einsum("bcr,kr->bck", context[..., :rank], flat)
        both = both.reshape(rows, -1, heads, out_rows).transpose(0, 2, 1, 3)
        both = jax.lax.optimization_barrier(both)
        part = jnp.broadcast_to(context[:, None, :, rank:], (*both.shape[:3], shared))
        keys = jnp.concatenate([both[..., :nope], part], axis=-1)
        values = both[..., nope:]

        def mix(weights: Array) -> Array:
            return jnp.einsum(
                "bhtc,bhcv->bhtv", weights, values, preferred_element_type=jnp.float32
            )

        scores = jnp.einsum("bhtd,bhcd->bhtc", query, keys, preferred_element_type=jnp.float32)
        return scores, mix

    scale = 1.0 / math.sqrt(q.shape[-1])
    out = _walk(attend, pages, page_table, position, counts, block, out_rows - nope, q.dtype, scale)
    return out.astype(q.dtype).transpose(0, 2, 1, 3)


def _walk(
    attend: Attend,
    pages: Float[Array, "page position latent"],
    page_table: Int[Array, "row page"],
    position: Int[Array, "row ... query"],
    counts: Int[Array, "row"],
    block: int,
    width: int,
    dtype: jnp.dtype,
    scale: float,
) -> Float32[Array, "row ... query out"]:
    """Softmax over all blocks that any row needs, carried from block to block."""
    span = block * pages.shape[1]

    def body(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, mixed = carry
        entries = jax.lax.dynamic_slice_in_dim(page_table, number * block, block, axis=1)
        context = gather_latents(pages, entries, counts, number * span).astype(dtype)
        scores, mix = attend(context)
        seen = number * span + jnp.arange(span) <= position[..., None]
        scores = jnp.where(seen, scores * scale, -jnp.inf)
        top = jnp.maximum(best, scores.max(-1))
        shrink, weights = jnp.exp(best - top), jnp.exp(scores - top[..., None])
        mixed = mixed * shrink[..., None] + mix(weights.astype(dtype))
        return top, total * shrink + weights.sum(-1), mixed

    nothing = jnp.zeros(position.shape, jnp.float32)
    start = (nothing - jnp.inf, nothing, jnp.zeros((*position.shape, width), jnp.float32))
    blocks = jnp.maximum(1, -(-counts.max() // span))
    _, total, mixed = jax.lax.fori_loop(0, blocks, body, start)
    return mixed / total[..., None]


def gather_latents(
    pages: Float[Array, "page position latent"],
    page_table: Int[Array, "row page"],
    counts: Int[Array, "row"],
    first: Int[Array, ""] | int,
) -> Float[Array, "row context latent"]:
    """Latents of the pages in order, the first at position `first`; zero from `counts[b]` on."""
    rows, entries = page_table.shape
    context = jnp.take(pages, page_table, axis=0, mode="clip")
    context = context.reshape(rows, entries * pages.shape[1], -1)
    known = first + jnp.arange(context.shape[1]) < counts[:, None]
    context = jnp.where(known[..., None], context, jnp.zeros((), pages.dtype))
    # Gathered once, not again inside each product that reads it.
    return jax.lax.optimization_barrier(context)
