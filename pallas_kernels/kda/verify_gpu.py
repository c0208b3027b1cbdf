"""A few tokens per row against states that stay as they are, and replaying some, for Hopper GPUs.

``verify`` says what is computed. A block of threads takes one row, one head and 64 value columns;
it reads that part of the state once, keeps it in registers, float32 like everything here, and goes
through the tokens in order as a decoding step does. Replaying writes it once, in place.

Axes: ``B`` rows, ``T`` tokens, ``H`` heads, ``K`` key channels, ``V`` value channels.
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
from pallas_kernels.mosaic import BY_COLUMN, BY_ROW, MATRIX
from pallas_kernels.shapes import ModelShape

COLUMNS = 64
"""Value columns of a block: a state of 128 by 64 is half of a warpgroup's registers."""


def supports(shape: ModelShape) -> Support:
    """Heads of 64 or 128 channels, as the layout of a matrix product has rows by 64."""
    if shape.kda_head not in (64, 128):
        return Support(
            False, f"a KDA head of {shape.kda_head} channels; the kernels take 64 or 128"
        )
    return Support(True, f"{shape.kda_heads} KDA heads of {shape.kda_head} channels fit")


@functools.partial(jax.jit, static_argnames="interpret")
def kda_verify(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    lengths: Int[Array, "B"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H V"]]:
    """Outputs and writes of `verify.kda_verify` on checked arguments."""
    rows, tokens, heads, _ = k.shape

    def body(q_g, k_g, v_g, decay_g, beta_g, length_g, read_g, state_g, out_g, write_g):
        b, h, columns = _place()
        length = jnp.minimum(length_g[b], tokens)

        def token(t, state):
            at = (b, t, h)
            q_t, k_t, g_t = (_vector(ref.at[at], BY_ROW) for ref in (q_g, k_g, decay_g))
            state = state * _over_values(jnp.exp(g_t))
            recalled = jnp.sum(state * _over_values(k_t), axis=0)
            error = _vector(v_g.at[(*at, columns)], BY_COLUMN) - recalled
            write = error * beta_g[at].astype(jnp.float32)
            write_g[(*at, columns)] = write
            state += _over_values(k_t) * lax.broadcast_in_dim(write, state.shape, (1,))
            out_g[(*at, columns)] = jnp.sum(state * _over_values(q_t), axis=0)
            return state

        state = _state(state_g, read_g[b], h, columns)
        lax.fori_loop(0, length, token, state)

        def blank(t, carry):
            nothing = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), BY_COLUMN)
            for ref in (out_g, write_g):
                ref[b, t, h, columns] = nothing
            return carry

        lax.fori_loop(length, tokens, blank, 0)

    result = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    out, writes = plgpu.kernel(
        body,
        out_type=[result, result],
        grid=(rows, heads, v.shape[-1] // COLUMNS),
        grid_names=("row", "head", "part"),
        kernel_name="kda_verify",
        interpret=interpret,
    )(q, k, v, log_decay, beta, lengths, read_slots, state_pool)
    return out, writes


@functools.partial(jax.jit, static_argnames="interpret")
def kda_replay(
    writes: Float[Array, "B T H V"],
    k: Float[Array, "B T H K"],
    log_decay: Float[Array, "B T H K"],
    counts: Int[Array, "B"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "slots H K V"]:
    """`verify.kda_replay` on checked arguments."""
    rows, tokens, heads, _ = k.shape
    slots = state_pool.shape[0]

    def body(write_g, k_g, decay_g, count_g, read_g, target_g, state_g):
        b, h, columns = _place()
        target = target_g[b]

        def token(t, state):
            at = (b, t, h)
            decay = jnp.exp(_vector(decay_g.at[at], BY_ROW))
            write = _vector(write_g.at[(*at, columns)], BY_COLUMN)
            change = lax.broadcast_in_dim(write, state.shape, (1,))
            return state * _over_values(decay) + _over_values(_vector(k_g.at[at], BY_ROW)) * change

        @pl.when(jnp.logical_and(target >= 0, target < slots))
        def _():
            state = _state(state_g, read_g[b], h, columns)
            state = lax.fori_loop(0, jnp.minimum(count_g[b], tokens), token, state)
            state_g[target, h, :, columns] = state

    state_ref = jax.new_ref(state_pool)
    plgpu.kernel(
        body,
        out_type=[],
        grid=(rows, heads, writes.shape[-1] // COLUMNS),
        grid_names=("row", "head", "part"),
        kernel_name="kda_replay",
        interpret=interpret,
    )(writes, k, log_decay, counts, read_slots, write_slots, state_ref)
    return jax.freeze(state_ref)


def _place() -> tuple[Array, Array, Any]:
    b, h, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    return b, h, pl.ds(part * COLUMNS, COLUMNS)


def _state(state_g: Any, slot: Array, head: Array, columns: Any) -> Array:
    source = jnp.clip(slot, 0, state_g.shape[0] - 1)
    state = plgpu.load(state_g.at[source, head, :, columns], layout=MATRIX, optimized=False)
    return jnp.where(lax.broadcast_in_dim(slot < 0, state.shape, ()), 0.0, state)


def _vector(ref: Any, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _over_values(x: Array) -> Array:
    return lax.broadcast_in_dim(x, (x.shape[0], COLUMNS), (0,))
