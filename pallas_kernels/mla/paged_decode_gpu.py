"""Attention of few absorbed queries over paged latents, for Hopper GPUs: flash decoding.

``paged_decode.mla_paged_decode`` says what is computed. A block of threads takes one row of the
batch, 64 (token, head) queries and one part of the context. It walks its part 64 positions at a
time, the next tile's pages being fetched meanwhile, with an online softmax. Its two warpgroups both
compute the tile's scores and each sums half of the latent's columns.

Parts of one row are joined outside by their softmax statistics (``join_parts``).

Axes: ``B`` rows, ``M`` queries (token-major, then head), ``D`` latent and shared key part,
``R`` latent, ``S`` parts of the context.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Support
from pallas_kernels.mosaic import BY_ROW, MATRIX, SHARED_MEMORY, accumulator, lanes, swizzled
from pallas_kernels.shapes import ModelShape

TILE = 64
"""Positions per step, and queries per block: the height of one warpgroup's matrix product."""
HIDDEN = -1e30
"""Score of a position that a query must not see; minus infinity would give NaN differences."""
LANES = lanes(jnp.bfloat16)


def supports(shape: ModelShape) -> Support:
    """bfloat16, latents by whole swizzled rows, pages that tile 64 positions."""
    if shape.activation_dtype != "bfloat16":
        return Support(False, f"latents are {shape.activation_dtype}; the kernel takes bfloat16")
    return takes(shape.latent, shape.shared_key, shape.page_size)


def takes(latent: int, shared: int, page_size: int) -> Support:
    """The rules of `supports` for bfloat16 pages."""
    width = latent + shared
    if latent % (2 * LANES) or width % LANES:
        return Support(
            False,
            f"latents of {latent} + {shared}; the kernel takes a multiple of 128, and of 64 "
            "together",
        )
    if 3 * TILE * width * 2 > SHARED_MEMORY - 2048:
        return Support(False, f"three tiles of {width} columns do not fit into shared memory")
    tiled = TILE % page_size == 0 or page_size % TILE == 0
    if not tiled or page_size % 8:
        return Support(
            False, f"pages of {page_size} positions; the kernel takes 8, 16, 32 or 64 · n"
        )
    return Support(True, f"latents of {latent} + {shared} in pages fit")


def context_parts(rows: int, queries: int, positions: int, *, processors: int = 132) -> int:
    """Into how many parts to cut contexts of up to `positions`, so that all processors work.

    A part has at least four tiles: below that, joining costs more than it gains.
    """
    blocks = rows * -(-queries // TILE)
    return max(1, min(processors // blocks, positions // (4 * TILE)))


@functools.partial(jax.jit, static_argnames=("latent", "scale", "parts", "interpret"))
def paged_attention(
    q: Float[Array, "B M D"],
    pages: Float[Array, "page position D"],
    page_table: Int[Array, "B pages"],
    limits: Int[Array, "B M"],
    counts: Int[Array, "B"],
    *,
    latent: int,
    scale: float,
    parts: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B S M R"], Float[Array, "B S M"], Float[Array, "B S M"]]:
    """Each part's attention; M must be a multiple of 64.

    Query m of row b sees positions below `limits[b, m]`, at most `counts[b]`, the positions that
    hold tokens. Returns the weighted mean of latents, the largest score and the sum of weights
    relative to it, all float32; a part without positions has mean 0 and sum 0.
    """
    rows, queries, width = q.shape
    page_size = pages.shape[1]
    half = latent // 2

    def body(
        q_g, pages_g, table_g, limit_g, count_g, out_g, largest_g, total_g,
        q_s, kv_s, q_arrived, kv_arrived, kv_free, *weights_s,
    ):  # fmt: skip
        b, block, part = (lax.axis_index(name) for name in ("row", "block", "part"))
        group = lax.axis_index("group")
        count = count_g[b]
        tiles = lax.div(count + (TILE - 1), TILE)
        share = lax.div(tiles + (parts - 1), parts)
        first = jnp.minimum(part * share, tiles)
        steps = jnp.minimum(first + share, tiles) - first
        block_rows = pl.ds(block * TILE, TILE)
        columns = pl.ds(group * half, half)

        def fetch(step, slot):
            start = (first + step) * TILE
            size = min(page_size, TILE)
            for piece in range(TILE // size):
                at = start + piece * size
                # A tile may reach past the last page in use, and past the table.
                entry = jnp.minimum(lax.div(at, page_size), page_table.shape[1] - 1)
                page = jnp.clip(table_g[b, entry], 0, pages.shape[0] - 1)
                inside = pl.ds(lax.rem(at, page_size), size) if page_size > TILE else slice(None)
                plgpu.copy_gmem_to_smem(
                    pages_g.at[page, inside],
                    kv_s.at[slot, pl.ds(piece * size, size)],
                    kv_arrived.at[slot],
                )

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(q_g.at[b, block_rows], q_s, q_arrived)

            @pl.when(steps > 0)
            def _():
                fetch(0, 0)

        plgpu.barrier_wait(q_arrived)
        limit = plgpu.load(limit_g.at[b, block_rows], layout=BY_ROW, optimized=False)
        limit = jnp.minimum(limit, lax.broadcast_in_dim(count, (TILE,), ()))

        def step(i, carry):
            largest, total, mean = carry
            slot, other = lax.rem(i, 2), lax.rem(i + 1, 2)

            @pl.when(jnp.logical_and(group == 0, i + 1 < steps))
            def _():
                @pl.when(i >= 1)
                def _():
                    plgpu.barrier_wait(kv_free.at[other])

                fetch(i + 1, other)

            plgpu.barrier_wait(kv_arrived.at[slot])

            def multiply(scores_ref):
                plgpu.wgmma(scores_ref, q_s, kv_s.at[slot].transpose((1, 0)))
                return scores_ref[...]

            scores = pl.run_scoped(multiply, accumulator(TILE, TILE)) * scale
            start = (first + i) * TILE
            position = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=MATRIX) + start
            seen = position < lax.broadcast_in_dim(limit, (TILE, TILE), (0,))
            scores = jnp.where(seen, scores, HIDDEN)
            new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink = jnp.exp(largest - new_largest)
            weights = jnp.exp(scores - lax.broadcast_in_dim(new_largest, (TILE, TILE), (0,)))
            weights = jnp.where(seen, weights, 0.0)
            total = total * shrink + jnp.sum(weights, axis=1)
            mean = mean * lax.broadcast_in_dim(shrink, (TILE, half), (0,))
            weights = weights.astype(q.dtype)

            # What lies past the last token may be anything; zero times NaN would be NaN.
            @pl.when(start + TILE > count)
            def _():
                token = plgpu.broadcasted_iota(jnp.int32, (TILE, LANES), 0, layout=MATRIX)
                for strip in range(half // LANES):
                    strip_columns = pl.ds(group * half + strip * LANES, LANES)
                    values = plgpu.load(kv_s.at[slot, :, strip_columns], layout=MATRIX)
                    values = jnp.where(token < count - start, values, jnp.zeros_like(values))
                    kv_s[slot, :, strip_columns] = values
                plgpu.commit_smem()

            if interpret is not None:  # The interpreter's wgmma takes no operand in registers.
                weights_s[0][group] = weights
                plgpu.commit_smem()
                weights = weights_s[0].at[group]

            def accumulate(mean_ref):
                plgpu.wgmma(mean_ref, weights, kv_s.at[slot, :, columns])
                plgpu.wgmma_wait(0)

            if interpret is None:
                mean = pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(mean))
            else:  # Nor can it start an accumulator from a value.

                def from_zero(mean_ref):
                    accumulate(mean_ref)
                    return mean_ref[...]

                mean += pl.run_scoped(from_zero, accumulator(TILE, half))

            @pl.when(i + 2 < steps)
            def _():
                plgpu.barrier_arrive(kv_free.at[slot])

            return new_largest, total, mean

        largest = plgpu.layout_cast(jnp.full((TILE,), HIDDEN, jnp.float32), BY_ROW)
        total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
        mean = plgpu.layout_cast(jnp.zeros((TILE, half), jnp.float32), MATRIX)
        largest, total, mean = lax.fori_loop(0, steps, step, (largest, total, mean))
        share_of_one = 1.0 / jnp.maximum(total, 1e-30)
        mean = mean * lax.broadcast_in_dim(share_of_one, (TILE, half), (0,))
        # A strided piece of a tiled shared array cannot be copied out, so registers go straight.
        out_g[b, part, block_rows, columns] = mean

        @pl.when(group == 0)
        def _():
            largest_g[b, part, block_rows] = largest
            total_g[b, part, block_rows] = total

    pieces = TILE // min(page_size, TILE)
    scratch = [
        swizzled(TILE, width, dtype=q.dtype),
        swizzled(2, TILE, width, dtype=q.dtype),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=pieces, num_barriers=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=2),
    ]
    if interpret is not None:
        scratch.append(swizzled(2, TILE, TILE, dtype=q.dtype))
    statistics = jax.ShapeDtypeStruct((rows, parts, queries), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, parts, queries, latent), jnp.float32),
            statistics,
            statistics,
        ],
        scratch_types=scratch,
        grid=(rows, queries // TILE, parts),
        grid_names=("row", "block", "part"),
        num_threads=2,
        thread_name="group",
        kernel_name="mla_paged_decode",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, pages, page_table, limits, counts)


def join_parts(
    mean: Float[Array, "B S M R"], largest: Float[Array, "B S M"], total: Float[Array, "B S M"]
) -> Float[Array, "B M R"]:
    """Attention over all parts from that of each; zero where no part has a position."""
    if mean.shape[1] == 1:
        return mean[:, 0]
    weight = total * jnp.exp(largest - jnp.max(largest, axis=1, keepdims=True))
    weight = weight / jnp.maximum(jnp.sum(weight, axis=1, keepdims=True), 1e-30)
    return jnp.sum(weight[..., None] * mean, axis=1)
