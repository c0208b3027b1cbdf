"""Grouped products with MXFP4 expert weights, for Hopper GPUs: decoded on the way to the product.

``experts_gpu.experts_by_tile`` arranges rows into tiles that share an expert and joins the
results. A block of threads takes one tile and 64 outputs of its expert: weights stream through
shared memory as they are stored, are decoded in registers and are the first operand of a
transposed product, so that a tile may have as few as eight rows.

A byte holds two neighbouring inputs. Decoding its low and high halves apart gives the even and the
odd inputs of 128 as two planes, so x comes with its inputs in that order (``by_planes``) instead
of the weights being rearranged.

Axes: ``tile``, ``M`` rows of a tile, ``E`` experts, ``N`` outputs, ``K`` inputs.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.implementation import Support
from pallas_kernels.mosaic import BY_ROW, MATRIX, SHARED_MEMORY, accumulator, swizzled
from pallas_kernels.shapes import ModelShape

OUTPUTS = 64
"""Outputs per block: the height of one warpgroup's matrix product."""
PLANE = 64
"""Bytes, and inputs per plane, of one pair of products."""
SCALED = 16
"""Bytes that share one scale: 32 inputs."""


def supports(shape: ModelShape) -> Support:
    """MXFP4 weights, bfloat16 rows, widths by the kernel's blocks."""
    if shape.experts == 0:
        return Support(False, "the model has no routed experts")
    if shape.expert_format != "mxfp4":
        return Support(False, f"experts are {shape.expert_format or 'floats'}, not mxfp4")
    if shape.activation_dtype != "bfloat16":
        return Support(False, f"rows are {shape.activation_dtype}; the kernel takes bfloat16")
    block = 2 * PLANE
    if shape.expert_in % block or shape.expert_width % block:
        return Support(
            False,
            f"experts of {shape.expert_in} × {shape.expert_width}; the kernel takes multiples of "
            f"{block}",
        )
    return Support(True, f"experts of {shape.expert_in} × {shape.expert_width} fit")


def by_planes(x: Float[Array, "*row K"]) -> Float[Array, "*row K"]:
    """Of every 128 inputs first the even ones, then the odd ones."""
    split = x.reshape(*x.shape[:-1], -1, PLANE, 2)
    return split.swapaxes(-1, -2).reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("activation", "out_dtype", "interpret"))
def tile_product(
    x: Float[Array, "tile M K"],
    experts: Int[Array, "tile"],
    values: UInt8[Array, "E N half_K"],
    scales: UInt8[Array, "E N blocks"],
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None,
    out_dtype: jnp.dtype,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tile out M"]:
    """`W_e xᵀ` of every tile, e = `experts[tile]`, summed in float32; x as `by_planes` gives it.

    With an activation, W's first half of outputs are the gate's and its second half the other
    operand's, and there are half as many results. M is a multiple of 8, K of 128, and the results
    are a multiple of 64. A tile whose expert is E or more is left unwritten.
    """
    tiles, rows, inputs = x.shape
    count, outputs, _ = values.shape
    results = outputs if activation is None else outputs // 2
    operands = 1 if activation is None else 2
    planes = 2 if inputs % (4 * PLANE) == 0 else 1  # pairs of planes per step
    width = planes * PLANE
    steps = inputs // (2 * width)
    stage = operands * OUTPUTS * width + rows * 2 * width * 2
    stages = max(2, min(4, steps, (SHARED_MEMORY // 2 - 2048) // stage))

    def body(x_g, experts_g, values_g, scales_g, out_g, x_s, values_s, arrived, *weights_s):
        tile, block = lax.axis_index("tile"), lax.axis_index("block")
        expert = experts_g[tile]

        def fetch(step, slot):
            plgpu.copy_gmem_to_smem(
                x_g.at[tile, :, pl.ds(step * 2 * width, 2 * width)], x_s.at[slot], arrived.at[slot]
            )
            for operand in range(operands):
                first = operand * results + block * OUTPUTS
                plgpu.copy_gmem_to_smem(
                    values_g.at[expert, pl.ds(first, OUTPUTS), pl.ds(step * width, width)],
                    values_s.at[slot, operand],
                    arrived.at[slot],
                )

        def accumulate(*sums):
            for step in range(min(stages - 1, steps)):
                fetch(step, step)

            def step_body(step, carry):
                slot = lax.rem(step, stages)
                # All threads are done with the slot that is fetched into next.
                plgpu.commit_smem()

                @pl.when(step + stages - 1 < steps)
                def _():
                    fetch(step + stages - 1, lax.rem(step + stages - 1, stages))

                plgpu.barrier_wait(arrived.at[slot])
                for plane in range(planes):
                    for operand in range(operands):
                        first = operand * results + block * OUTPUTS
                        scale = []
                        for group in range(PLANE // SCALED):
                            column = (step * planes + plane) * (PLANE // SCALED) + group
                            source = scales_g.at[expert, pl.ds(first, OUTPUTS), column]
                            loaded = plgpu.load(source, layout=BY_ROW, optimized=False)
                            scale.append(_power(loaded))
                        packed = plgpu.load(
                            values_s.at[slot, operand, :, pl.ds(plane * PLANE, PLANE)],
                            layout=plgpu.Layout.WGMMA_UPCAST_2X,
                            optimized=False,
                        )
                        packed = plgpu.layout_cast(packed.astype(jnp.uint16), MATRIX)
                        spread = _by_group(scale)
                        for half in range(2):
                            weights = _decode(packed, half) * spread
                            if weights_s:  # The interpreter takes no operand in registers.
                                weights_s[0][...] = weights
                                plgpu.commit_smem()
                                weights = weights_s[0]
                            column = (plane * 2 + half) * PLANE
                            inputs_s = x_s.at[slot, :, pl.ds(column, PLANE)]
                            plgpu.wgmma(sums[operand], weights, inputs_s.transpose((1, 0)))
                            plgpu.wgmma_wait(0)
                return carry

            lax.fori_loop(0, steps, step_body, 0)
            return tuple(total[...] for total in sums)

        @pl.when(expert < count)
        def _():
            totals = pl.run_scoped(
                accumulate, *(accumulator(OUTPUTS, rows) for _ in range(operands))
            )
            result = totals[0] if activation is None else activation(*totals)
            out_g[tile, pl.ds(block * OUTPUTS, OUTPUTS)] = result.astype(out_dtype)

    scratch = [
        swizzled(stages, rows, 2 * width, dtype=x.dtype),
        plgpu.SMEM((stages, operands, OUTPUTS, width), jnp.uint8),
        plgpu.Barrier(num_arrivals=1 + operands, num_barriers=stages),
    ]
    if interpret is not None:
        scratch.append(swizzled(OUTPUTS, PLANE, dtype=x.dtype))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles, results, rows), out_dtype),
        scratch_types=scratch,
        grid=(tiles, results // OUTPUTS),
        grid_names=("tile", "block"),
        kernel_name="mxfp4_tile_product",
        interpret=interpret,
    )(x, experts, values, scales)


def _decode(packed: jax.Array, half: int) -> jax.Array:
    """E2M1 codes in the low or high half of bytes, as bfloat16; exact.

    From code 2 on, the magnitude's bits at the place of bfloat16's exponent and first mantissa bit
    only lack the exponent's bias. Codes 0 and 1 (zero and a half) are put right apart: made as
    bfloat16's own subnormals, they would depend on how the machine treats those.
    """
    sign = (packed << (12 - 4 * half)) & 0x8000
    magnitude = (packed << 6 if half == 0 else packed << 2) & 0x01C0
    number = magnitude + (126 << 7)
    small = jnp.where(magnitude == 0, jnp.zeros_like(number), jnp.full_like(number, 126 << 7))
    number = jnp.where(magnitude < 0x0080, small, number)
    return lax.bitcast_convert_type(number | sign, jnp.bfloat16)


def _power(scale: jax.Array) -> jax.Array:
    """E8M0 as bfloat16: the same exponent bits; 2^-127 becomes zero and NaN becomes infinity."""
    return lax.bitcast_convert_type(scale.astype(jnp.uint16) << 7, jnp.bfloat16)


def _by_group(scale: list[jax.Array]) -> jax.Array:
    """One column of scales per 16 columns of the result."""
    shape = (OUTPUTS, PLANE)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    spread = lax.broadcast_in_dim(scale[-1], shape, (0,))
    for group in range(len(scale) - 2, -1, -1):
        below = column < (group + 1) * SCALED
        spread = jnp.where(below, lax.broadcast_in_dim(scale[group], shape, (0,)), spread)
    return spread
