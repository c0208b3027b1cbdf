"""Causal attention of a prefill span to expanded keys and values, for Hopper GPUs.

``paged_prefill`` expands the keys and values of a run of context positions and calls this once per
run. A block of threads takes one head and 128 queries of one row: each of two warpgroups leads 64
of them past the positions, 128 at a time, with an online softmax. A third warpgroup fetches two
tiles ahead; keys are replaced as soon as both have scored them, before the values are summed.
Tiles that all 64 queries see whole are not masked, and those that no query of the block sees are
neither fetched nor computed.

The shared key part stays one array for all heads, so that a position costs a head ``W + W`` numbers
and not ``W + S + W``.

Axes: ``B`` rows, ``T`` queries, ``H`` heads, ``C`` positions of the run, ``W`` a head's key
channels and as many value channels, ``S`` shared key channels.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.implementation import Support
from pallas_kernels.mosaic import BY_ROW, MATRIX, SHARED_MEMORY, accumulator, lanes, swizzled
from pallas_kernels.shapes import ModelShape

QUERIES = 64
"""Queries of a warpgroup: the height of its matrix products."""
GROUPS = 2
"""Warpgroups that compute; one more fetches."""
BLOCK = QUERIES * GROUPS
TILE = 128
"""Positions per step."""
STAGES = 2
HIDDEN = -1e30
"""Score of a position that a query must not see; minus infinity would give NaN differences."""
WIDEST = 128
"""Channels per head: a warpgroup's sums of values and its scores must fit into registers."""


class Partial(NamedTuple):
    """Attention to some positions, to which others can be added."""

    mean: Float32[Array, "B T H W"]
    """Weighted mean of their values."""
    largest: Float32[Array, "B H T"]
    """Largest score as a power of two."""
    total: Float32[Array, "B H T"]
    """Sum of the weights, relative to the largest."""

    @classmethod
    def nothing(cls, rows: int, tokens: int, heads: int, width: int) -> "Partial":
        """Attention to no position."""
        statistics = jnp.zeros((rows, heads, tokens), jnp.float32)
        mean = jnp.zeros((rows, tokens, heads, width), jnp.float32)
        return cls(mean, statistics + HIDDEN, statistics)


def supports(shape: ModelShape) -> Support:
    """bfloat16 and heads of at most 128 channels; pages may have any size."""
    if shape.activation_dtype != "bfloat16":
        return Support(False, f"latents are {shape.activation_dtype}; the kernel takes bfloat16")
    width, shared = padded(shape.head_key, shape.head_value), padded(shape.shared_key)
    heads = f"heads of {shape.head_key} + {shape.shared_key} and {shape.head_value}"
    if width > WIDEST:
        return Support(False, f"{heads}; the kernel takes up to {WIDEST} and as many")
    if _shared_bytes(width, shared) > SHARED_MEMORY - 1024:
        return Support(False, f"tiles of {heads} do not fit into shared memory")
    return Support(True, f"{heads} fit")


def padded(*channels: int) -> int:
    """The channels that the kernel gives to the widest of these."""
    lane = lanes(jnp.bfloat16)
    return max(lane, *(-(-c // lane) * lane for c in channels))


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def attend(
    q: BFloat16[Array, "B T H W+S"],
    both: BFloat16[Array, "B C H 2*W"],
    shared_key: BFloat16[Array, "B C S"],
    starts: Int32[Array, "B"],
    counts: Int32[Array, "B"],
    first: Int32[Array, "1"],
    before: Partial | None,
    *,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> BFloat16[Array, "B T H W"] | Partial:
    """Attention to `C` positions, the first of which is number `first[0]` of every row.

    Keys come before values in `both`. Query t of row b sees positions up to `starts[b] + t`;
    `counts[b]` is how many the row has in all, and those beyond may hold any finite number. W and S
    are multiples of 64, T and C of 128. `before` None says that these are all positions and `first`
    is 0: the result is final, and zero for blocks of queries that lie beyond `counts[b]`.
    Otherwise the positions are added to `before`, whose arrays are reused.
    """
    rows, tokens, heads, _ = q.shape
    positions, shared = shared_key.shape[1:]
    width = q.shape[3] - shared
    blocks = tokens // BLOCK
    to_log2 = scale * math.log2(math.e)

    def body(q_g, both_g, shared_g, starts_g, counts_g, first_g, *refs):
        outputs = 1 if before is None else 3
        out_g, scratch = refs[:outputs], refs[outputs:]
        q_s, q_shared_s, key_s, shared_s, value_s, *barriers = scratch
        q_arrived, key_arrived, value_arrived, key_free, value_free, *weights_s = barriers
        b, head, group = (lax.axis_index(name) for name in ("row", "head", "group"))
        # Blocks that see the most start first.
        top = (blocks - 1 - lax.axis_index("block")) * BLOCK
        start, count, first = starts_g[b], counts_g[b], first_g[0]
        seen = jnp.minimum(jnp.minimum(start + top + BLOCK, count) - first, positions)
        idle = jnp.logical_or(start + top >= count, seen <= 0)
        steps = jnp.where(idle, 0, lax.div(seen + (TILE - 1), TILE))

        def fetch(step, carry):
            slot = lax.rem(step, STAGES)
            tile = pl.ds(step * TILE, TILE)

            @pl.when(step >= STAGES)
            def _():
                plgpu.barrier_wait(key_free.at[slot])

            keys_g, values_g = (
                both_g.at[b, tile, head, pl.ds(side * width, width)] for side in (0, 1)
            )
            plgpu.copy_gmem_to_smem(keys_g, key_s.at[slot], key_arrived.at[slot])
            plgpu.copy_gmem_to_smem(shared_g.at[b, tile], shared_s.at[slot], key_arrived.at[slot])

            @pl.when(step >= STAGES)
            def _():
                plgpu.barrier_wait(value_free.at[slot])

            plgpu.copy_gmem_to_smem(values_g, value_s.at[slot], value_arrived.at[slot])
            return carry

        def add_tile(step, carry, *, low, masked):
            largest, total, mixed = carry
            slot = lax.rem(step, STAGES)
            wanted = step + STAGES < steps
            plgpu.barrier_wait(key_arrived.at[slot])

            def multiply(scores_ref):
                plgpu.wgmma(scores_ref, q_s.at[group], key_s.at[slot].transpose((1, 0)))
                shared_part = shared_s.at[slot].transpose((1, 0))
                plgpu.wgmma(scores_ref, q_shared_s.at[group], shared_part)
                return scores_ref[...]

            scores = pl.run_scoped(multiply, accumulator(QUERIES, TILE))

            @pl.when(wanted)
            def _():
                plgpu.barrier_arrive(key_free.at[slot])

            if masked:
                query, position = (
                    plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=MATRIX)
                    for axis in (0, 1)
                )
                visible = position + (first + step * TILE) <= query + (start + low)
                scores = jnp.where(visible, scores, HIDDEN)
            new_largest = jnp.maximum(largest, jnp.max(scores, axis=1) * to_log2)
            shrink = jnp.exp2(largest - new_largest)
            above = lax.broadcast_in_dim(new_largest, scores.shape, (0,))
            weights = jnp.exp2(scores * to_log2 - above)
            total = total * shrink + jnp.sum(weights, axis=1)
            mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, (0,))
            weights = weights.astype(q.dtype)
            plgpu.barrier_wait(value_arrived.at[slot])
            if interpret is not None:  # The interpreter's wgmma takes no operand in registers.
                weights_s[0][group] = weights
                plgpu.commit_smem()
                weights = weights_s[0].at[group]

            def mix(mixed_ref):
                plgpu.wgmma(mixed_ref, weights, value_s.at[slot])
                plgpu.wgmma_wait(0)

            if interpret is None:
                mixed = pl.run_state(mix)(plgpu.WGMMAAccumulatorRef.init(mixed))
            else:  # Nor can it start an accumulator from a value.

                def from_zero(mixed_ref):
                    mix(mixed_ref)
                    return mixed_ref[...]

                mixed += pl.run_scoped(from_zero, accumulator(QUERIES, width))

            @pl.when(wanted)
            def _():
                plgpu.barrier_arrive(value_free.at[slot])

            return new_largest, total, mixed

        @pl.when(group == GROUPS)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            lax.fori_loop(0, steps, fetch, 0)

        @pl.when(jnp.logical_and(group < GROUPS, jnp.logical_or(before is None, steps > 0)))
        def _():
            plgpu.set_max_registers(240, action="increase")
            low = top + group * QUERIES
            queries = pl.ds(low, QUERIES)

            @pl.when(steps > 0)
            def _():
                arrived = q_arrived.at[group]
                q_head = q_g.at[b, queries, head]
                plgpu.copy_gmem_to_smem(q_head.at[:, pl.ds(0, width)], q_s.at[group], arrived)
                shared_part = q_head.at[:, pl.ds(width, shared)]
                plgpu.copy_gmem_to_smem(shared_part, q_shared_s.at[group], arrived)
                plgpu.barrier_wait(arrived)

            if before is None:
                largest = plgpu.layout_cast(jnp.full((QUERIES,), HIDDEN, jnp.float32), BY_ROW)
                total = plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), BY_ROW)
                mixed = plgpu.layout_cast(jnp.zeros((QUERIES, width), jnp.float32), MATRIX)
            else:
                mean_g, largest_g, total_g = out_g
                largest, total = (
                    plgpu.load(ref.at[b, head, queries], layout=BY_ROW, optimized=False)
                    for ref in (largest_g, total_g)
                )
                mixed = plgpu.load(mean_g.at[b, queries, head], layout=MATRIX, optimized=False)
                mixed = mixed * lax.broadcast_in_dim(total, mixed.shape, (0,))
            # Tiles that the first query sees whole need no mask.
            whole = jnp.clip(lax.div(start + low + 1 - first, TILE), 0, steps)
            carry = (largest, total, mixed)
            for begin, end, masked in ((0, whole, False), (whole, steps, True)):
                step = functools.partial(add_tile, low=low, masked=masked)
                carry = lax.fori_loop(begin, end, step, carry)
            largest, total, mixed = carry
            share_of_one = 1.0 / jnp.maximum(total, 1e-30)
            mean = mixed * lax.broadcast_in_dim(share_of_one, mixed.shape, (0,))
            if before is None:
                q_s[group] = mean.astype(q.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_s.at[group], out_g[0].at[b, queries, head])
                plgpu.wait_smem_to_gmem(0)
            else:
                mean_g, largest_g, total_g = out_g
                mean_g[b, queries, head] = mean
                largest_g[b, head, queries] = largest
                total_g[b, head, queries] = total

    scratch = [
        swizzled(GROUPS, QUERIES, width, dtype=q.dtype),
        swizzled(GROUPS, QUERIES, shared, dtype=q.dtype),
        swizzled(STAGES, TILE, width, dtype=q.dtype),
        swizzled(STAGES, TILE, shared, dtype=q.dtype),
        swizzled(STAGES, TILE, width, dtype=q.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
    ]
    if interpret is not None:
        scratch.append(swizzled(GROUPS, QUERIES, TILE, dtype=q.dtype))
    kept = () if before is None else tuple(jax.new_ref(x) for x in before)
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, tokens, heads, width), q.dtype) if not kept else (),
        scratch_types=scratch,
        grid=(rows, heads, blocks),
        grid_names=("row", "head", "block"),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="mla_prefill",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, both, shared_key, starts, counts, first, *kept)
    return Partial(*(jax.freeze(ref) for ref in kept)) if kept else out


def _shared_bytes(width: int, shared: int) -> int:
    """Shared memory of a block of threads, but for its barriers."""
    return 2 * (BLOCK * (width + shared) + STAGES * TILE * (2 * width + shared))
