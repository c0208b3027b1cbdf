"""One token of the gated delta rule per row, for decoding."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One step of ``reference.kda_recurrent``."""
    decay = jnp.exp(log_decay)
    # Both reads of the state happen before the update: S'ᵀq = (decay S)ᵀq + (k·q) β d.
    recalled = jnp.sum(state * (decay * k)[..., None], axis=-2)
    read = jnp.sum(state * (decay * q)[..., None], axis=-2)
    change = beta[..., None] * (v - recalled)
    out = read + jnp.sum(q * k, axis=-1, keepdims=True) * change
    return out, state * decay[..., None] + k[..., None] * change[..., None, :]


def kda_decode(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
) -> tuple[Float[Array, "B H V"], Float[Array, "slots H K V"]]:
    """One step for rows whose states live in a pool, row after row so that the pool is never copied."""
    slots = state_pool.shape[0]
    writes = (write_slots >= 0) & (write_slots < slots)
    write_at = jnp.where(writes, write_slots, 0)
    read_at = jnp.clip(read_slots, 0, slots - 1)

    def row(index, carry):
        pool, out = carry
        token = (lax.dynamic_slice_in_dim(x, index, 1) for x in (q, k, v, log_decay, beta))
        state = lax.dynamic_slice_in_dim(pool, read_at[index], 1)
        state = jnp.where(read_slots[index] < 0, 0.0, state)
        row_out, state = kda_step(*token, state)
        kept = lax.dynamic_slice_in_dim(pool, write_at[index], 1)
        # The barrier keeps the reads of the pool out of the fusion that writes it, which would
        # otherwise need a copy of the pool to read from.
        state, pool = lax.optimization_barrier((jnp.where(writes[index], state, kept), pool))
        pool = lax.dynamic_update_slice_in_dim(pool, state, write_at[index], 0)
        return pool, lax.dynamic_update_slice_in_dim(out, row_out, index, 0)

    pool, out = lax.fori_loop(0, q.shape[0], row, (state_pool, jnp.zeros(v.shape, jnp.float32)))
    return out, pool
