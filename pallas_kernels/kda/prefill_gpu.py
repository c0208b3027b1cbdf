"""Whole spans of the gated delta rule from and to a state pool, for Hopper GPUs.

``prefill.kda_prefill`` says what is computed. Two kernels: ``prefill_chunks_gpu`` turns every chunk
of 64 tokens into four small matrices, all chunks at once; the one here carries the state through
the chunks of a row in order, four matrix products for each. With the words of ``chunk_xla``::

    R  = V − (exp(G) ⊙ K) S
    O  = (exp(G) ⊙ Q) S + (P M diag(beta)) R
    S' = diag(exp(G_N)) S + ((exp(G_N − G) ⊙ K)ᵀ M diag(beta)) R

A block of threads takes one row, one head and 64 value columns, whose state stays in registers,
float32, from the first chunk to the last. Products take bfloat16 and sum in float32.

Axes: ``B`` rows, ``T`` tokens, ``H`` heads, ``N`` chunks, ``C`` tokens of a chunk, ``K`` key
channels, ``V`` value channels.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Support
from pallas_kernels.kda.prefill_chunks_gpu import CHUNK, prepare_chunks
from pallas_kernels.mosaic import BY_ROW, MATRIX, accumulator, swizzled
from pallas_kernels.shapes import ModelShape

COLUMNS = 64
"""Value columns of a block: a state of 128 by 64 is half of a warpgroup's registers."""


def supports(shape: ModelShape) -> Support:
    """bfloat16, as products round to it; heads of 64 or 128 channels, as products take 64 rows."""
    if shape.activation_dtype != "bfloat16":
        return Support(
            False, f"activations are {shape.activation_dtype}; the kernel multiplies bfloat16"
        )
    if shape.kda_head not in (64, 128):
        return Support(
            False, f"a KDA head of {shape.kda_head} channels; the kernel takes 64 or 128"
        )
    return Support(True, f"{shape.kda_heads} KDA heads of {shape.kda_head} channels fit")


@functools.partial(jax.jit, static_argnames=("log_decay_bound", "interpret"))
def kda_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    exports: tuple[Int[Array, "B"], Int[Array, "B"]] | None,
    *,
    log_decay_bound: float | None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "slots H K V"]]:
    """`prefill.kda_prefill` on checked arguments; copies them when T is no multiple of 64."""
    tokens = k.shape[1]
    padding = -tokens % CHUNK
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    log_decay, beta = log_decay.astype(jnp.float32), beta.astype(jnp.float32)
    if padding:
        q, k, v, log_decay, beta = (
            jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
            for x in (q, k, v, log_decay, beta)
        )
    chunks, export = prepare_chunks(
        q, k, log_decay, beta, lengths, None if exports is None else exports[0],
        log_decay_bound=log_decay_bound, interpret=interpret,
    )  # fmt: skip
    inputs = [*chunks, v, lengths, read_slots, write_slots]
    if exports is not None and export is not None:
        inputs += [*export, *exports]
    out, state_pool = _scan_chunks(inputs, state_pool, interpret)
    return out[:, :tokens], state_pool


def _scan_chunks(
    inputs: list[Array],
    state_pool: Float[Array, "slots H K V"],
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "slots H K V"]]:
    """`inputs` are chunks, values, lengths, read and write slots, then what is exported, if any."""
    rows, tokens, heads, values = inputs[5].shape
    slots, _, key, _ = state_pool.shape
    most = tokens // CHUNK
    exporting = len(inputs) > 9

    def body(*refs):
        keys_g, queries_g, writes_g, reads_g, decay_g, v_g, length_g, read_g, write_g = refs[:9]
        exports = refs[9 : len(inputs)]
        state_g, out_g, *scratch = refs[len(inputs) :]
        keys_s, queries_s, writes_s, reads_s, v_s, state_s, rest_s, arrived = scratch[:8]
        b, h, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        columns = pl.ds(part * COLUMNS, COLUMNS)
        length, read, write = length_g[b], read_g[b], write_g[b]
        steps = lax.div(length + (CHUNK - 1), CHUNK)

        def fetch(c, slot):
            at = (b, h, c)
            for source, target in (
                (keys_g.at[at], keys_s),
                (queries_g.at[at], queries_s),
                (writes_g.at[at], writes_s),
                (reads_g.at[at], reads_s),
                (v_g.at[b, pl.ds(c * CHUNK, CHUNK), h, columns], v_s),
            ):
                plgpu.copy_gmem_to_smem(source, target.at[slot], arrived.at[slot])

        @pl.when(steps > 0)
        def _():
            fetch(0, 0)

        source = jnp.clip(read, 0, slots - 1)
        state = plgpu.load(state_g.at[source, h, :, columns], layout=MATRIX, optimized=False)
        state = jnp.where(lax.broadcast_in_dim(read < 0, state.shape, ()), 0.0, state)

        def advanced(state, decay_ref, writes_ref):
            decay = plgpu.load(decay_ref, layout=BY_ROW, optimized=False)
            change = _products(key, [(writes_ref.transpose((1, 0)), rest_s)])
            return state * lax.broadcast_in_dim(decay, state.shape, (0,)) + change

        def step(c, state):
            slot = lax.rem(c, 2)
            state_s[...] = state.astype(jnp.bfloat16)
            # From here on all threads are done with the chunk before.
            plgpu.commit_smem()

            @pl.when(c + 1 < steps)
            def _():
                fetch(c + 1, 1 - slot)

            plgpu.barrier_wait(arrived.at[slot])
            recalled = _products(CHUNK, [(keys_s.at[slot], state_s)])
            rest = plgpu.load(v_s.at[slot], layout=MATRIX).astype(jnp.float32) - recalled
            token = plgpu.broadcasted_iota(jnp.int32, rest.shape, 0, layout=MATRIX)
            rest = jnp.where(token < length - c * CHUNK, rest, jnp.zeros_like(rest))
            rest_s[...] = rest.astype(jnp.bfloat16)
            plgpu.commit_smem()
            pairs = [(queries_s.at[slot], state_s), (reads_s.at[slot], rest_s)]
            out_g[b, pl.ds(c * CHUNK, CHUNK), h, columns] = _products(CHUNK, pairs)
            if exporting:
                writes_e, decay_e, counts_g, targets_g = exports
                writes_es, arrived_e = scratch[8:]
                count, target = counts_g[b], targets_g[b]
                wanted = jnp.logical_and(count >= 1, count <= length)
                wanted = jnp.logical_and(wanted, lax.div(count - 1, CHUNK) == c)

                @pl.when(jnp.logical_and(wanted, _inside(target, slots)))
                def _():
                    plgpu.copy_gmem_to_smem(writes_e.at[b, h], writes_es, arrived_e)
                    plgpu.barrier_wait(arrived_e)
                    state_g[target, h, :, columns] = advanced(state, decay_e.at[b, h], writes_es)

            return advanced(state, decay_g.at[b, h, c], writes_s.at[slot])

        state = lax.fori_loop(0, steps, step, state)

        @pl.when(_inside(write, slots))
        def _():
            state_g[write, h, :, columns] = state

        def blank(c, carry):
            nothing = plgpu.layout_cast(jnp.zeros((CHUNK, COLUMNS), jnp.float32), MATRIX)
            out_g[b, pl.ds(c * CHUNK, CHUNK), h, columns] = nothing
            return carry

        lax.fori_loop(steps, most, blank, 0)

    state_ref = jax.new_ref(state_pool)
    by_key = swizzled(2, CHUNK, key, dtype=jnp.bfloat16)
    square = swizzled(2, CHUNK, CHUNK, dtype=jnp.bfloat16)
    scratch = [
        by_key, by_key, by_key, square, square,
        swizzled(key, COLUMNS, dtype=jnp.bfloat16), swizzled(CHUNK, COLUMNS, dtype=jnp.bfloat16),
        plgpu.Barrier(num_arrivals=5, num_barriers=2),
    ]  # fmt: skip
    if exporting:
        scratch += [swizzled(CHUNK, key, dtype=jnp.bfloat16), plgpu.Barrier()]
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, tokens, heads, values), jnp.float32),
        scratch_types=scratch,
        grid=(rows, heads, values // COLUMNS),
        grid_names=("row", "head", "part"),
        kernel_name="kda_prefill_scan",
        interpret=interpret,
    )(*inputs, state_ref)
    return out, jax.freeze(state_ref)


def _products(rows: int, pairs: list[tuple[Any, Any]]) -> Array:
    def multiply(sums):
        for left, right in pairs:
            plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(multiply, accumulator(rows, COLUMNS))


def _inside(slot: Array, slots: int) -> Array:
    return jnp.logical_and(slot >= 0, slot < slots)
