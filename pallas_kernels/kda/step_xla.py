"""One token of the gated delta rule per row, for decoding.

Both reads of the state come before its update, so that the state is read once for both::

    recalled = (D S)ᵀ k        d = beta (v − recalled)        D = diag(exp(log_decay))
    o        = (D S)ᵀ q + (k·q) d                             = S'ᵀ q of the reference
    S'       = D S + k dᵀ
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One step of ``reference.kda_recurrent``, all float32."""
    decay = jnp.exp(log_decay)
    seen = _read(jnp.stack([decay * k, decay * q], axis=-2), state)
    change = beta[..., None] * (v - seen[..., 0, :])
    out = seen[..., 1, :] + jnp.sum(q * k, axis=-1, keepdims=True) * change
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
    """One step for rows whose states live in a pool, all float32.

    Row after row, each read, advanced and written back before the next: the pool is never copied,
    a row's state stays in cache between its uses, and a dropped row can write back what it has just
    read, whatever other rows have done to that slot.
    """
    # Computed once: without the barrier norms, gates and masks are again in every reader's fusion.
    q, k, v, log_decay, beta = lax.optimization_barrier((q, k, v, log_decay, beta))
    slots = state_pool.shape[0]
    fresh = read_slots < 0
    kept = (write_slots >= 0) & (write_slots < slots)
    read_at = jnp.clip(read_slots, 0, slots - 1)
    write_at = jnp.where(kept, write_slots, read_at)
    decay = jnp.exp(log_decay)
    queries = jnp.stack([decay * k, decay * q], axis=-2)
    q_dot_k = jnp.sum(q * k, axis=-1, keepdims=True)

    def row(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        pool, out = carry

        def of_row(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, index, 1)

        # Without the barriers the read of the pool, or the change, would be computed again inside
        # the fusion that writes the pool, which would then need a copy of the pool.
        state, pool = lax.optimization_barrier(
            (lax.dynamic_slice_in_dim(pool, read_at[index], 1), pool)
        )
        seen = _zero_where(fresh[index], _read(of_row(queries), state))
        change = of_row(beta)[..., None] * (of_row(v) - seen[..., 0, :])
        row_out = seen[..., 1, :] + of_row(q_dot_k) * change
        change = lax.optimization_barrier(change)
        decayed = _zero_where(fresh[index], state) * of_row(decay)[..., None]
        advanced = decayed + of_row(k)[..., None] * change[..., None, :]
        written = jnp.where(kept[index], advanced, state)
        pool = lax.dynamic_update_slice_in_dim(pool, written, write_at[index], 0)
        return pool, lax.dynamic_update_slice_in_dim(out, row_out, index, 0)

    pool, out = lax.fori_loop(0, q.shape[0], row, (state_pool, jnp.zeros(v.shape, jnp.float32)))
    return out, pool


def _read(
    queries: Float[Array, "B H Q K"], state: Float[Array, "B H K V"]
) -> Float[Array, "B H Q V"]:
    """``queries · state`` as a multiply and sum, which XLA's CPU compiler runs in one pass."""
    return jnp.sum(queries[..., None] * state[:, :, None], axis=-2)


def _zero_where(zero: Bool[Array, ""], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(zero, 0.0, x)
