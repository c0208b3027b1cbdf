"""One decoding token of a KDA mixer between its projections, fused, for Hopper GPUs.

``mixer_step.kda_mixer_step`` says what is computed. One block of threads takes one row and head: it
reads that head's float32 state once, writes it once, and keeps everything between in registers and
shared memory. Both pools are updated in place.

Every thread of the warpgroup first holds one key or value channel of the vectors (convolution,
norms, gate); the state then lies as a matrix product's accumulator would, in two halves of its
value columns, the second being fetched while the first is worked on.

Axes: ``B`` rows, ``H`` heads, ``K`` key channels, ``V`` value channels (as many), ``W`` taps.
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
from pallas_kernels.mosaic import BY_COLUMN, BY_ROW, MATRIX, swizzled
from pallas_kernels.shapes import ModelShape


def supports(shape: ModelShape) -> Support:
    """Heads of 64 or 128 channels, as the layout of a matrix product has rows by 64."""
    if shape.kda_head not in (64, 128):
        return Support(
            False, f"a KDA head of {shape.kda_head} channels; the kernel takes 64 or 128"
        )
    return Support(True, f"{shape.kda_heads} KDA heads of {shape.kda_head} channels fit")


@functools.partial(jax.jit, static_argnames=("lower_bound", "eps", "interpret"))
def kda_mixer_step(
    projected: Float[Array, "B C"],
    decay_in: Float[Array, "B H K"],
    beta_in: Float[Array, "B H"],
    gate: Float[Array, "B H V"],
    conv: Float[Array, "C W"],
    a_log: Float[Array, "H"],
    decay_bias: Float[Array, "H K"],
    out_norm: Float[Array, "V"],
    state_pool: Float[Array, "slots H K V"],
    window_pool: Float[Array, "slots W-1 C"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    *,
    lower_bound: float | None,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "slots H K V"], Float[Array, "slots W-1 C"]]:
    """`mixer_step.kda_mixer_step` on checked arguments.

    `interpret` is None, or `plgpu.InterpretGPUParams` to run on a CPU.
    """
    rows, heads, key = decay_in.shape
    slots, taps = window_pool.shape[0], conv.shape[1]
    half = key // 2 if key > 64 else key
    halves = key // half
    out_dtype = projected.dtype

    def body(
        x_g, decay_g, beta_g, gate_g, conv_g, a_g, bias_g, norm_g, read_g, write_g, state_g,
        window_g, out_g, state_s, v_s, o_s, arrived,
    ):  # fmt: skip
        b, h = lax.axis_index("row"), lax.axis_index("head")
        read, write = read_g[b], write_g[b]
        fresh = read < 0
        kept = jnp.logical_and(write >= 0, write < slots)
        source = jnp.clip(read, 0, slots - 1)
        for j in range(halves):
            columns = pl.ds(j * half, half)
            plgpu.copy_gmem_to_smem(state_g.at[source, h, :, columns], state_s.at[j], arrived.at[j])

        def vector(ref):
            return plgpu.load(ref, layout=BY_ROW, optimized=False).astype(jnp.float32)

        raw, past = [], []
        for stream in range(3):
            raw.append(vector(x_g.at[b, stream, h]))
            past.append([vector(window_g.at[source, tap, stream, h]) for tap in range(taps - 1)])

        def convolved(stream):
            y = raw[stream] * vector(conv_g.at[stream, h, :, taps - 1])
            for tap in range(taps - 1):
                before = _zero_where(fresh, past[stream][tap])
                y += before * vector(conv_g.at[stream, h, :, tap])
            # The other paths round the convolution to the activations' dtype here.
            return (y * _sigmoid(y)).astype(out_dtype).astype(jnp.float32)

        q, k, v = convolved(0), convolved(1), convolved(2)
        q *= lax.rsqrt(jnp.sum(q * q) + 1e-6) * key**-0.5
        k *= lax.rsqrt(jnp.sum(k * k) + 1e-6)
        z = vector(decay_g.at[b, h]) + vector(bias_g.at[h])
        a = jnp.exp(a_g[h])
        if lower_bound is None:
            positive = jnp.maximum(z, 0.0)
            decay = jnp.exp(-a * (positive + jnp.log(1.0 + jnp.exp(z - 2.0 * positive))))
        else:
            decay = jnp.exp(lower_bound * _sigmoid(a * z))
        beta = _sigmoid(beta_g[b, h].astype(jnp.float32))
        v_s[...] = v
        plgpu.commit_smem()

        def over_values(x):
            return lax.broadcast_in_dim(x, (key, half), (0,))

        def over_keys(x):
            return lax.broadcast_in_dim(x, (key, half), (1,))

        for j in range(halves):
            columns = pl.ds(j * half, half)
            plgpu.barrier_wait(arrived.at[j])
            state = plgpu.load(state_s.at[j], layout=MATRIX)
            state = _zero_where(fresh, state) * over_values(decay)
            recalled = jnp.sum(state * over_values(k), axis=0)
            change = (plgpu.load(v_s.at[columns], layout=BY_COLUMN) - recalled) * beta
            state += over_values(k) * over_keys(change)
            o_s[columns] = jnp.sum(state * over_values(q), axis=0)
            state_s[j] = state
            plgpu.commit_smem()

            @pl.when(kept)
            def _():
                plgpu.copy_smem_to_gmem(state_s.at[j], state_g.at[write, h, :, columns])

        o = plgpu.load(o_s, layout=BY_ROW)
        o *= lax.rsqrt(jnp.sum(o * o) / key + eps) * vector(norm_g)
        out_g[b, h] = (o * _sigmoid(vector(gate_g.at[b, h]))).astype(out_dtype)

        @pl.when(kept)
        def _():
            for stream in range(3):
                inputs = [_zero_where(fresh, x) for x in past[stream]] + [raw[stream]]
                for tap in range(taps - 1):
                    window_g[write, tap, stream, h] = inputs[tap + 1].astype(window_pool.dtype)

        plgpu.wait_smem_to_gmem(0)

    state_ref = jax.new_ref(state_pool)
    window_ref = jax.new_ref(window_pool.reshape(slots, taps - 1, 3, heads, key))
    vector_s = plgpu.SMEM((key,), jnp.float32)
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, heads, key), out_dtype),
        scratch_types=[
            swizzled(halves, key, half, dtype=jnp.float32),
            vector_s,
            vector_s,
            plgpu.Barrier(num_barriers=halves),
        ],
        grid=(rows, heads),
        grid_names=("row", "head"),
        kernel_name="kda_mixer_step",
        interpret=interpret,
    )(
        projected.reshape(rows, 3, heads, key),
        decay_in,
        beta_in,
        gate,
        conv.reshape(3, heads, key, taps),
        a_log,
        decay_bias,
        out_norm,
        read_slots,
        write_slots,
        state_ref,
        window_ref,
    )
    return out, jax.freeze(state_ref), jax.freeze(window_ref).reshape(window_pool.shape)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _zero_where(zero: Array, x: Array) -> Array:
    return jnp.where(lax.broadcast_in_dim(zero, x.shape, ()), jnp.zeros_like(x), x)
