"""The residual sum, its mixture over depth and RMSNorm in one kernel, for Hopper GPUs.

``mix.residual_mix`` says what is computed. A block of threads takes one row, piece by piece: first
all candidates' scores side by side, then, now from the processor's cache, their weighted sum, which
waits in shared memory for its norm. Nothing but the two results is written. These are loops, since
unrolled the compiler would keep every candidate in registers, and spill.

Axes: ``B`` rows, ``D`` hidden width.
"""

import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.implementation import Support
from pallas_kernels.shapes import ModelShape

THREADS = 128
MAX_WIDTH = 32768
"""A row of float32 in shared memory, with room for a second block."""


def supports(shape: ModelShape) -> Support:
    """Rows that a warpgroup's threads share evenly, and that fit into shared memory."""
    if shape.activation_dtype not in ("bfloat16", "float32"):
        return Support(False, f"rows are {shape.activation_dtype}; the kernel takes bfloat16")
    if shape.hidden % THREADS or shape.hidden > MAX_WIDTH:
        return Support(
            False,
            f"rows of {shape.hidden}; the kernel takes multiples of {THREADS} up to {MAX_WIDTH}",
        )
    return Support(True, f"rows of {shape.hidden} fit")


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def residual_mix(
    candidates: Sequence[Float[Array, "B D"]],
    y: Float[Array, "B D"] | None,
    mix: tuple[Float[Array, "D"], Float[Array, "D"]] | None,
    weight: Float[Array, "D"],
    *,
    eps: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
    """`mix.residual_mix` on checked arguments; the last candidate is x, which y is added to.

    Without y the sum is x itself, which is returned and not written again.
    """
    *bank, x = candidates
    rows, width = x.shape
    dtype = x.dtype
    vector = next(n for n in (4, 2, 1) if width % (n * THREADS) == 0)
    piece = vector * THREADS
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)
    inputs = [x, *([] if y is None else [y]), *bank, *(mix or ()), weight]

    def body(*refs):
        row = lax.axis_index("row")
        *refs, mixed_s = refs
        given, results = list(refs[: len(inputs)]), list(refs[len(inputs) :])
        x_g, y_g = given.pop(0), None if y is None else given.pop(0)
        bank_g, weight_g = [given.pop(0) for _ in bank], given.pop()
        total_g, out_g = None if y is None else results[0], results[-1]

        def load(ref, *at):
            return plgpu.load(ref.at[at], layout=layout, optimized=False).astype(jnp.float32)

        def rounded(v):
            return v.astype(dtype).astype(jnp.float32)

        def candidates_at(columns):
            total = load(x_g, row, columns)
            if y_g is not None:
                total = rounded(total + load(y_g, row, columns))
            return [total, *(load(one_g, row, columns) for one_g in bank_g)]

        def over_pieces(work, carry):
            return lax.fori_loop(
                0, width // piece, lambda n, carry: work(pl.ds(n * piece, piece), carry), carry
            )

        def splat(value):
            return plgpu.layout_cast(jnp.full((piece,), value, jnp.float32), layout)

        def add_scores(columns, sums):
            direction = load(given[0], columns) * load(given[1], columns)
            return [
                (squares + v * v, products + v * direction)
                for (squares, products), v in zip(sums, candidates_at(columns), strict=True)
            ]

        shares = [1.0]
        if bank_g:
            zeros = [(splat(0.0), splat(0.0)) for _ in candidates]
            scores = [
                jnp.sum(products) * lax.rsqrt(jnp.sum(squares) / width + eps)
                for squares, products in over_pieces(add_scores, zeros)
            ]
            best = functools.reduce(jnp.maximum, scores)
            shares = [jnp.exp(score - best) for score in scores]
            whole = functools.reduce(jnp.add, shares)
            shares = [share / whole for share in shares]

        def mix_piece(columns, squares):
            values = candidates_at(columns)
            if total_g is not None:
                total_g[row, columns] = values[0].astype(dtype)
            mixed = values[0]
            if bank_g:
                terms = [v * share for v, share in zip(values, shares, strict=True)]
                mixed = rounded(functools.reduce(jnp.add, terms))
            mixed_s[columns] = mixed.astype(dtype)
            return squares + mixed * mixed

        squares = over_pieces(mix_piece, splat(0.0))
        scale = lax.rsqrt(jnp.sum(squares) / width + eps)

        def norm_piece(columns, carry):
            # Each thread reads back what it has written itself.
            normed = rounded(load(mixed_s, columns) * scale)
            out_g[row, columns] = (normed * rounded(load(weight_g, columns))).astype(dtype)
            return carry

        over_pieces(norm_piece, ())

    out = jax.ShapeDtypeStruct((rows, width), dtype)
    results = plgpu.kernel(
        body,
        out_type=[out] if y is None else [out, out],
        scratch_types=[plgpu.SMEM((width,), dtype)],
        grid=(rows,),
        grid_names=("row",),
        kernel_name="residual_mix",
        interpret=interpret,
    )(*inputs)
    return (x, results[0]) if y is None else (results[0], results[1])
