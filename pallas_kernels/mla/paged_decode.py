"""MLA attention of one to eight new tokens per row over paged latents: the checked entry point."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.mla.paged_decode_gpu import (
    TILE,
    context_parts,
    join_parts,
    paged_attention,
)
from pallas_kernels.mla.paged_xla import mla_paged

MAX_TOKENS = 8


def mla_paged_decode(
    q: Float[Array, "row token head query"],
    pages: Float[Array, "page position latent"],
    kv_up: Float[Array, "head out latent"],
    page_table: Int[Array, "row page"],
    starts: Int[Array, "row"],
    lengths: Int[Array, "row"],
    *,
    parts: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "row token head value"]:
    """`reference.mla_reference` of queries over the cached latents of their own rows.

    The pages hold the new tokens too: row b has `starts[b] + lengths[b]` positions, and its query t
    sees those up to `starts[b] + t`. `kv_up` is moved to query and output, so that latents are read
    as they lie; what pages hold beyond a row's positions is ignored. Outputs of padding tokens
    (t ≥ `lengths[b]`) are finite and mean nothing. At most `MAX_TOKENS` tokens.

    `parts` cuts every context for the kernel; None chooses. `implementation` None asks the plan in
    use for "mla_decode".
    """
    if q.ndim != 4 or not 1 <= q.shape[1] <= MAX_TOKENS:
        raise ValueError(f"q has shape {q.shape}; it must be [row, 1 to {MAX_TOKENS}, head, query]")
    check_paged(q, pages, kv_up, page_table, starts, lengths)
    runs = chosen("mla_decode") if implementation is None else implementation
    if runs is Implementation.XLA:
        return mla_paged(q, pages, kv_up, page_table, starts, lengths)
    return paged_absorbed(
        q, pages, kv_up, page_table, starts, lengths, parts=parts, interpret=runs.interpret
    )


def paged_absorbed(
    q: Float[Array, "row token head query"],
    pages: Float[Array, "page position latent"],
    kv_up: Float[Array, "head out latent"],
    page_table: Int[Array, "row page"],
    starts: Int[Array, "row"],
    lengths: Int[Array, "row"],
    *,
    parts: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "row token head value"]:
    """`mla_paged_decode` by the kernel, for any number of tokens."""
    rows, tokens, heads, _ = q.shape
    latent = kv_up.shape[2]
    nope = q.shape[-1] - (pages.shape[2] - latent)
    kv_up = kv_up.astype(q.dtype)
    # XLA multiplies a lone vector as a sum, for which it first turns the weights round in memory.
    alone = [(0, 1 if rows * tokens == 1 else 0), (0, 0), (0, 0), (0, 0)]
    q_latent = jnp.einsum("bthn,hnr->bthr", jnp.pad(q[..., :nope], alone), kv_up[:, :nope])[:rows]
    query = jnp.concatenate([q_latent, q[..., nope:]], axis=-1).astype(pages.dtype)
    query = query.reshape(rows, tokens * heads, -1)
    padding = -query.shape[1] % TILE
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0)))
    token = jnp.arange(query.shape[1]) // heads
    counts = jnp.where(lengths > 0, starts + lengths, 0).astype(jnp.int32)
    limits = (starts[:, None] + 1 + token).astype(jnp.int32)
    positions = page_table.shape[1] * pages.shape[1]
    if parts is None:
        parts = context_parts(rows, query.shape[1], positions)
    mixed = join_parts(
        *paged_attention(
            query,
            pages,
            page_table,
            limits,
            counts,
            latent=latent,
            scale=1.0 / math.sqrt(q.shape[-1]),
            parts=parts,
            interpret=interpret,
        )
    )
    mixed = mixed[:, : tokens * heads].reshape(rows, tokens, heads, latent).astype(q.dtype)
    return jnp.einsum("bthr,hvr->bthv", mixed, kv_up[:, nope:])


def check_paged(
    q: Array, pages: Array, kv_up: Array, page_table: Array, starts: Array, lengths: Array
) -> None:
    """Raises ValueError naming the argument whose shape does not fit the others."""
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; it must be [row, token, head, query]")
    if 0 in q.shape:
        raise ValueError(f"q has shape {q.shape}; no axis may be empty")
    for name, array in (("pages", pages), ("kv_up", kv_up)):
        if array.ndim != 3:
            raise ValueError(f"{name} has shape {array.shape}; it must have three axes")
    shared = pages.shape[2] - kv_up.shape[2]
    if not 0 <= shared < q.shape[-1] or kv_up.shape[1] <= q.shape[-1] - shared:
        raise ValueError(
            f"pages of width {pages.shape[2]}, queries of width {q.shape[-1]} and kv_up "
            f"{kv_up.shape} do not fit together"
        )
    if kv_up.shape[0] != q.shape[2]:
        raise ValueError(f"kv_up is of {kv_up.shape[0]} heads, q of {q.shape[2]}")
    for name, array, rank in (
        ("page_table", page_table, 2), ("starts", starts, 1), ("lengths", lengths, 1)
    ):  # fmt: skip
        if array.ndim != rank or array.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has shape {array.shape}; q has {q.shape[0]} rows")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} is {array.dtype}; it must be of integers")
