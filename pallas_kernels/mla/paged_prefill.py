"""MLA attention of prefill spans over paged latents: the checked entry point.

Keys and values are either expanded from the latents, or ``kv_up`` is moved to the queries
(absorbed) and the latents are read as they lie. With K3's sizes (latent 512 + 64, heads of
128 + 64 and 128), operations per head are:

    absorbed    2 · (576 + 512) = 2,176 per query and position
    expanded    2 · (192 + 128) =   640 per query and position, and 2 · 512 · 256 per position

so a span of more than 171 tokens costs less expanded, up to 3.4 times: 2,048 tokens after 6,144
cached ones take 0.90 TFLOP of attention and 0.21 of expanding, 3.07 absorbed. Expanding inside the
kernel, for each block of 128 queries anew, would cost 3.2 times what the attention itself does; so
it is a product of its own, whose 49 kB per position are written and read once per span (20 ns of
an H200's bandwidth against 26 ns for their product) and exist for `RUN_POSITIONS` at a time.
Shorter spans run absorbed, by the kernel that decodes, which gathers pages itself; in the expanded
form XLA gathers them, 1.2 kB of 50 per position.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.mla.attention_xla import prefers_expanded
from pallas_kernels.mla.expanded_gpu import BLOCK, TILE, Partial, attend, padded
from pallas_kernels.mla.paged_decode import check_paged, paged_absorbed
from pallas_kernels.mla.paged_decode_gpu import takes
from pallas_kernels.mla.paged_xla import gather_latents, mla_paged

RUN_POSITIONS = 8192
"""Positions of all rows together that are expanded at once: 0.4 GB at K3's 96 heads."""


def mla_paged_prefill(
    q: Float[Array, "row token head query"],
    pages: Float[Array, "page position latent"],
    kv_up: Float[Array, "head out latent"],
    page_table: Int[Array, "row page"],
    starts: Int[Array, "row"],
    lengths: Int[Array, "row"],
    *,
    run: int | None = None,
    expanded: bool | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "row token head value"]:
    """`reference.mla_reference` of spans over the cached latents of their own rows.

    The pages hold the new tokens too: row b has `starts[b] + lengths[b]` positions, and its query t
    sees those up to `starts[b] + t`. What pages hold beyond a row's positions is ignored. Outputs
    of padding tokens (t ≥ `lengths[b]`) are finite and mean nothing.

    `run` is how many positions the kernel has expanded at once, `expanded` whether it has them
    expanded at all; None chooses. `implementation` None asks the plan in use for "mla_prefill".
    """
    check_paged(q, pages, kv_up, page_table, starts, lengths)
    runs = chosen("mla_prefill") if implementation is None else implementation
    if runs is Implementation.XLA:
        return mla_paged(q, pages, kv_up, page_table, starts, lengths)
    rank = kv_up.shape[2]
    shared = pages.shape[2] - rank
    nope = q.shape[3] - shared
    if expanded is None:
        expanded = not takes(rank, shared, pages.shape[1]).ok or prefers_expanded(
            tokens=q.shape[1],
            context=page_table.shape[1] * pages.shape[1],
            rank=rank,
            nope=nope,
            shared=shared,
            value=kv_up.shape[1] - nope,
        )
    if not expanded:
        return paged_absorbed(
            q, pages, kv_up, page_table, starts, lengths, interpret=runs.interpret
        )
    return _expanded(q, pages, kv_up, page_table, starts, lengths, run, runs)


def _expanded(
    q: Array,
    pages: Array,
    kv_up: Array,
    page_table: Array,
    starts: Array,
    lengths: Array,
    run: int | None,
    runs: Implementation,
) -> Array:
    rows, tokens, heads, query = q.shape
    size, (_, out, rank) = pages.shape[1], kv_up.shape
    shared = pages.shape[2] - rank
    nope = query - shared
    width, part = padded(nope, out - nope), padded(shared)
    dtype = pages.dtype
    queries = jnp.concatenate([_wider(q[..., :nope], width), _wider(q[..., nope:], part)], axis=-1)
    queries = jnp.pad(queries, ((0, 0), (0, -tokens % BLOCK), (0, 0), (0, 0))).astype(dtype)
    sides = (kv_up[:, :nope], kv_up[:, nope:])
    weights = jnp.concatenate([_wider(side.swapaxes(1, 2), width) for side in sides], axis=-1)
    weights = weights.swapaxes(1, 2).reshape(heads * 2 * width, rank).astype(dtype)
    starts, counts = starts.astype(jnp.int32), (starts + lengths).astype(jnp.int32)
    positions = page_table.shape[1] * size
    unit = math.lcm(size, TILE)
    run = max(1, (RUN_POSITIONS // rows if run is None else run) // unit) * unit
    run = min(run, -(-positions // unit) * unit)
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % (run // size))))

    def add(number: Array | int, before: Partial | None) -> Array | Partial:
        entries = jax.lax.dynamic_slice_in_dim(page_table, number * (run // size), run // size, 1)
        first = jnp.full((1,), number * run, jnp.int32)
        context = gather_latents(pages, entries, counts, first[0])
        both = jnp.einsum("bcr,kr->bck", context[..., :rank], weights)
        return attend(
            queries,
            both.reshape(rows, run, heads, 2 * width),
            _wider(context[..., rank:], part),
            starts,
            counts,
            first,
            before,
            scale=1.0 / math.sqrt(query),
            interpret=runs.interpret,
        )

    if run >= positions:
        mixed = add(0, None)
    else:
        nothing = Partial.nothing(rows, queries.shape[1], heads, width)
        mixed = jax.lax.fori_loop(0, -(-counts.max() // run), add, nothing)
    mean = mixed.mean if isinstance(mixed, Partial) else mixed
    return mean[:, :tokens, :, : out - nope].astype(q.dtype)


def _wider(x: Array, width: int) -> Array:
    """`x` with zeros after its last axis."""
    missing = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x
