"""What each chunk of a span does to any state, for Hopper GPUs: all that needs no state.

For the tokens of a chunk, with the words of ``chunk_xla``, this gives ``exp(G) ⊙ K``,
``exp(G) ⊙ Q``, ``P M diag(beta)``, ``((exp(G_N − G) ⊙ K)ᵀ M diag(beta))ᵀ`` and ``exp(G_N)``. One
warpgroup takes one chunk of one head.

Sums of log decays over ranges of tokens are matrix products of a matrix of zeros and ones with the
log decays, which are cut into two bfloat16 numbers each (16 bits of mantissa); nothing cancels.
``A`` and ``P`` come from neighbouring blocks of tokens, measured from their border, so that no
exponent is positive. With a bound on the decay the smallest blocks have up to 16 tokens and are
measured from their middle; without one the halving goes on to single tokens. Operands are then
bfloat16.

The inverse ``M`` grows from blocks of two tokens to the whole chunk, each product of three bfloat16
products of halves of float32 numbers: nearly equal keys make entries that cancel.

Axes: ``B`` rows, ``T`` tokens, ``H`` heads, ``N`` chunks, ``C`` tokens of a chunk, ``K`` key
channels.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.chunk_xla import LARGEST_EXPONENT
from pallas_kernels.mosaic import BY_COLUMN, BY_ROW, MATRIX, accumulator, swizzled

CHUNK = 64
"""Tokens of a chunk: the height of one warpgroup's matrix product."""
SQUARE = (CHUNK, CHUNK)
LARGEST_CENTRED = 16
"""Tokens of the largest block that is measured from its middle."""


class Chunks(NamedTuple):
    """Every chunk's matrices; those of chunks past a row's length are left unwritten."""

    keys: Float[Array, "B H N C K"]
    queries: Float[Array, "B H N C K"]
    writes: Float[Array, "B H N C K"]
    reads: Float[Array, "B H N C C"]
    decay: Float[Array, "B H N K"]


class Export(NamedTuple):
    """A row's chunk up to the token where its state is exported, in place of the whole chunk."""

    writes: Float[Array, "B H C K"]
    decay: Float[Array, "B H K"]


def centred_block(log_decay_bound: float | None) -> int:
    """Tokens of the blocks whose scores are measured from the middle; 1 means none are."""
    size = 1
    if log_decay_bound is not None:
        while size < LARGEST_CENTRED and -log_decay_bound * size <= LARGEST_EXPONENT:
            size *= 2
    return size


def prepare_chunks(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    export_counts: Int[Array, "B"] | None,
    *,
    log_decay_bound: float | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Chunks, Export | None]:
    """T is a multiple of `CHUNK`; q and k are bfloat16, the rest float32."""
    rows, tokens, heads, key = k.shape
    chunks = tokens // CHUNK
    smallest = centred_block(log_decay_bound)
    strips = [pl.ds(start, CHUNK) for start in range(0, key, CHUNK)]
    strip_numbers = range(len(strips))

    def body(*refs):
        inputs, outputs = refs[: len(arguments)], refs[len(arguments) :][: len(out)]
        b, c, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        count = inputs[4][b] - c * CHUNK

        @pl.when(count > 0)
        def _():
            _chunk(inputs, outputs, refs[len(arguments) + len(out) :], (b, c, h), count)

    def _chunk(inputs, outputs, scratch, at, count):
        q_g, k_g, decay_g, beta_g = inputs[:4]
        keys_g, queries_g, writes_g, reads_g, total_g = outputs[:5]
        left_s, right_s, q_s, k_s, ranges_s, high_s, low_s, beta_s, arrived = scratch[:9]
        # Heads of 128 channels leave room for it where the queries were.
        read_s = q_s if len(strips) == 2 else scratch[-1]
        b, c, h = at
        here = pl.ds(c * CHUNK, CHUNK)
        for n, strip in enumerate(strips):
            plgpu.copy_gmem_to_smem(q_g.at[b, here, h, strip], q_s.at[n], arrived)
            plgpu.copy_gmem_to_smem(k_g.at[b, here, h, strip], k_s.at[n], arrived)

        def numbers():
            """Numbers of rows and columns, made anew so that no masks are kept from use to use."""
            row, column = lax.optimization_barrier(
                [
                    plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
                    for layout in (BY_ROW, BY_COLUMN)
                ]
            )
            return (lax.broadcast_in_dim(x, SQUARE, (n,)) for n, x in enumerate((row, column)))

        row, column = numbers()
        for n, strip in enumerate(strips):
            decays = plgpu.load(decay_g.at[b, here, h, strip], layout=MATRIX, optimized=False)
            decays = jnp.where(row < count, decays, jnp.zeros_like(decays))
            high_s[n], low_s[n] = _halves(decays)
        strength = plgpu.load(beta_g.at[b, here, h], layout=BY_ROW, optimized=False)
        beta_s[...] = strength
        plgpu.barrier_wait(arrived)

        @pl.when(count < CHUNK)
        def _():
            for ref in (q_s, k_s):
                for n in strip_numbers:
                    x = plgpu.load(ref.at[n], layout=MATRIX)
                    ref[n] = jnp.where(row < count, x, jnp.zeros_like(x))

        def wide(ref, n):
            return plgpu.load(ref.at[n], layout=MATRIX).astype(jnp.float32)

        def put(ref, n, x):
            ref[n] = x.astype(jnp.bfloat16)

        def send(ref, n, target):
            plgpu.copy_smem_to_gmem(ref.at[n], target)

        def sent():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def each_strip(act):
            """One strip after the other: at once, their numbers would not fit into registers."""

            def one(n, carry):
                act(n, pl.ds(n * CHUNK, CHUNK))
                return carry

            lax.fori_loop(0, len(strips), one, 0)

        def set_ranges(members):
            plgpu.commit_smem()
            ranges_s[0] = members.astype(jnp.bfloat16)
            plgpu.commit_smem()

        def sums(n):
            """Sums of the log decays of the tokens that each row of `ranges_s` names."""
            return _products([(ranges_s.at[0], ref.at[n]) for ref in (high_s, low_s)])

        def scores(rows_ref, columns_ref):
            return _products(
                [(rows_ref.at[n], columns_ref.at[n].transpose((1, 0))) for n in strip_numbers]
            )

        def halving(step, scored):
            recall, read = scored
            row, column = numbers()
            size = lax.shift_right_logical(CHUNK // 2, step)
            later = (row & size) != 0
            border = (row & -2 * size) + size
            since = jnp.logical_and(column >= border, column <= row)
            until = jnp.logical_and(column > row, column < border)
            set_ranges(jnp.where(later, _one(since), _one(until)))

            @each_strip
            def _(n, strip):
                decayed = jnp.exp(sums(n))
                put(right_s, n, wide(k_s, n) * decayed)
                put(left_s, n, wide(q_s, n) * decayed)

            plgpu.commit_smem()
            meet = _meet(row, column, size)
            recall = jnp.where(meet, scores(right_s, right_s), recall)
            return recall, jnp.where(meet, scores(left_s, right_s), read)

        zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), MATRIX)
        halvings = (CHUNK // smallest).bit_length() - 1
        recall, read = lax.fori_loop(0, halvings, halving, (zeros, zeros))
        if smallest == 1:
            read = jnp.where(row == column, scores(q_s, k_s), read)
        else:
            row, column = numbers()
            together = (row & -smallest) == (column & -smallest)
            middle = (row & -smallest) + smallest // 2
            since = jnp.logical_and(column >= middle, column <= row)
            until = jnp.logical_and(column > row, column < middle)
            set_ranges(jnp.where(row >= middle, _one(since), -_one(until)))

            @each_strip
            def _(n, strip):
                exponent = sums(n)
                put(right_s, n, wide(k_s, n) * jnp.exp(-exponent))
                put(left_s, n, wide(k_s, n) * jnp.exp(exponent))

            plgpu.commit_smem()
            own = jnp.logical_and(together, column < row)
            recall = jnp.where(own, scores(left_s, right_s), recall)
            plgpu.commit_smem()

            @each_strip
            def _(n, strip):
                put(left_s, n, wide(q_s, n) * jnp.exp(sums(n)))

            plgpu.commit_smem()
            own = jnp.logical_and(together, column <= row)
            read = jnp.where(own, scores(left_s, right_s), read)

        row, column = numbers()
        set_ranges(_one(column <= row))

        @each_strip
        def _(n, strip):
            decayed = jnp.exp(sums(n))
            put(right_s, n, wide(k_s, n) * decayed)
            put(left_s, n, wide(q_s, n) * decayed)
            total = jnp.sum(wide(high_s, n) + wide(low_s, n), axis=0)
            total_g[b, h, c, strip] = jnp.exp(total)

        plgpu.commit_smem()

        @each_strip
        def _(n, strip):
            send(right_s, n, keys_g.at[b, h, c, :, strip])
            send(left_s, n, queries_g.at[b, h, c, :, strip])

        def put_halves(ref, x):
            ref[0], ref[1] = _halves(x)

        def product(left_ref, right_ref):
            """float32, but for 16 bits of mantissa in the operands."""
            plgpu.commit_smem()
            pairs = [(left_ref.at[i], right_ref.at[j]) for i, j in ((0, 0), (0, 1), (1, 0))]
            return _products(pairs)

        put_halves(read_s, read)
        row, column = numbers()
        recall = recall * lax.broadcast_in_dim(strength, SQUARE, (0,))
        recall = jnp.where(row < count, recall, jnp.zeros_like(recall))

        def merging(step, inverse):
            row, column = numbers()
            below = jnp.where(_meet(row, column, lax.shift_left(2, step)), recall, 0.0)
            plgpu.commit_smem()
            put_halves(left_s, inverse)
            put_halves(right_s, below)
            half_way = product(left_s, right_s)
            plgpu.commit_smem()
            put_halves(left_s, half_way)
            put_halves(right_s, inverse)
            return inverse - product(left_s, right_s)

        row, column = numbers()
        inverse = _one(row == column) - jnp.where(_meet(row, column, 1), recall, 0.0)
        sent()
        inverse = lax.fori_loop(0, CHUNK.bit_length() - 2, merging, inverse)
        row, column = numbers()
        by_column = plgpu.load(beta_s, layout=BY_COLUMN)
        inverse = inverse * lax.broadcast_in_dim(by_column, SQUARE, (1,))
        inverse = jnp.where(column < count, inverse, jnp.zeros_like(inverse))
        plgpu.commit_smem()
        put_halves(right_s, inverse)
        put(ranges_s, 0, product(read_s, right_s))
        plgpu.commit_smem()
        send(ranges_s, 0, reads_g.at[b, h, c])
        sent()

        def write(out, before, last):
            """The transposed inverse, which is still in `right_s`, by keys decayed to `last`."""
            set_ranges(_one(before))

            @each_strip
            def _(n, strip):
                decayed = jnp.exp(sums(n)) * wide(k_s, n)
                put(left_s, n, jnp.where(row < last, decayed, 0.0))

            plgpu.commit_smem()

            @each_strip
            def _(n, strip):
                pairs = [(right_s.at[i].transpose((1, 0)), left_s.at[n]) for i in (0, 1)]
                written = _products(pairs)
                plgpu.commit_smem()
                put(left_s, n, written)
                plgpu.commit_smem()
                send(left_s, n, out.at[:, strip])

            sent()

        write(writes_g.at[b, h, c], column > row, CHUNK)
        if export_counts is not None:
            last = inputs[5][b] - c * CHUNK

            @pl.when(jnp.logical_and(last > 0, last <= CHUNK))
            def _():
                write(outputs[5].at[b, h], jnp.logical_and(column > row, column < last), last)

                @each_strip
                def _(n, strip):
                    both = wide(high_s, n) + wide(low_s, n)
                    both = jnp.where(row < last, both, 0.0)
                    outputs[6][b, h, strip] = jnp.exp(jnp.sum(both, axis=0))

        plgpu.wait_smem_to_gmem(0)

    arguments = [q, k, log_decay, beta, lengths]
    lead = (rows, heads, chunks)
    out = [jax.ShapeDtypeStruct((*lead, CHUNK, key), jnp.bfloat16) for _ in range(3)]
    out.append(jax.ShapeDtypeStruct((*lead, *SQUARE), jnp.bfloat16))
    out.append(jax.ShapeDtypeStruct((*lead, key), jnp.float32))
    if export_counts is not None:
        arguments.append(export_counts)
        out.append(jax.ShapeDtypeStruct((rows, heads, CHUNK, key), jnp.bfloat16))
        out.append(jax.ShapeDtypeStruct((rows, heads, key), jnp.float32))
    tiles = [2, 2, len(strips), len(strips), 1, len(strips), len(strips)]
    results = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            *(swizzled(count, *SQUARE, dtype=jnp.bfloat16) for count in tiles),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * len(strips)),
            *([] if len(strips) == 2 else [swizzled(2, *SQUARE, dtype=jnp.bfloat16)]),
        ],
        grid=(rows, chunks, heads),
        grid_names=("row", "chunk", "head"),
        kernel_name="kda_prefill_chunks",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arguments)
    return Chunks(*results[:5]), None if export_counts is None else Export(*results[5:])


def _one(condition: Array) -> Array:
    return jnp.where(condition, 1.0, 0.0)


def _meet(row: Array, column: Array, size: int | Array) -> Array:
    """Where the later block of `size` tokens of a pair, as rows, meets its earlier one."""
    pair = ~(2 * size - 1)
    later = jnp.logical_and((row & size) != 0, (column & size) == 0)
    return jnp.logical_and(later, (row & pair) == (column & pair))


def _halves(x: Array) -> tuple[Array, Array]:
    """Two bfloat16 numbers whose sum has 16 bits of a float32's mantissa."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def _products(pairs: list[tuple[Any, Any]]) -> Array:
    """The sum of the products of pairs of 64 by 64 matrices, float32."""

    def multiply(sums):
        for left, right in pairs:
            plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(multiply, accumulator(*SQUARE))
