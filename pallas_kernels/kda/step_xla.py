"""One token of the gated delta rule per row, for decoding.

Both reads of the state come before its update, so that the state is read once for both::

    recalled = (D S)ᵀ k        d = beta (v − recalled)        D = diag(exp(log_decay))
    o        = (D S)ᵀ q + (k·q) d                             = S'ᵀ q of the reference
    S'       = D S + k dᵀ
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

RUN = 16
"""Key channels whose terms one expression adds up where a whole pool is read."""


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

    With as many slots as rows, as batch inference has, the pool is advanced as it lies, by all
    cores, unless a row reads or writes another's slot. Else row after row. Which it is depends on
    the slots alone; the two differ by float rounding.
    """
    # Computed once: without the barrier norms, gates and masks are again in every reader's fusion.
    q, k, v, log_decay, beta = lax.optimization_barrier((q, k, v, log_decay, beta))
    rows, slots = q.shape[0], state_pool.shape[0]
    if rows == 0:
        return v, state_pool
    fresh = read_slots < 0
    kept = (write_slots >= 0) & (write_slots < slots)
    by_row = functools.partial(
        _decode_rows, read_slots=read_slots, write_slots=write_slots, fresh=fresh, kept=kept
    )
    at_once = functools.partial(_decode_pool, fresh=fresh, kept=kept)
    if rows != slots:
        return by_row(q, k, v, log_decay, beta, state_pool)
    if rows == 1:
        return at_once(q, k, v, log_decay, beta, state_pool)
    own = jnp.arange(rows)
    in_place = jnp.all((fresh | (read_slots == own)) & (~kept | (write_slots == own)))
    return lax.cond(in_place, at_once, by_row, q, k, v, log_decay, beta, state_pool)


def _decode_rows(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state_pool: Float[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    fresh: Bool[Array, "B"],
    kept: Bool[Array, "B"],
) -> tuple[Float[Array, "B H V"], Float[Array, "slots H K V"]]:
    """Row after row, each read, advanced and written back before the next.

    The pool is never copied, a row's state stays in cache between its uses, and a dropped row can
    write back what it has just read, whatever other rows have done to that slot. XLA gives an
    update in place one core.
    """
    read_at = jnp.clip(read_slots, 0, state_pool.shape[0] - 1)
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


def _decode_pool(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    states: Float[Array, "B H K V"],
    fresh: Bool[Array, "B"],
    kept: Bool[Array, "B"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Row b owns slot b: two passes over the pool, a read and an update, by all cores.

    Fresh rows are masked in each pass: masked once before them, XLA would keep a copy of the pool.
    """
    fresh, kept = (x[:, None, None, None] for x in (fresh, kept))
    decay = jnp.exp(log_decay)
    queries = lax.optimization_barrier(jnp.stack([decay * k, decay * q], axis=-2))
    seen = jnp.where(fresh, 0.0, _read_in_runs(queries, states))
    change = beta[..., None] * (v - seen[..., 0, :])
    out = seen[..., 1, :] + jnp.sum(q * k, axis=-1, keepdims=True) * change
    change = lax.optimization_barrier(change)  # or the update computes it for every element
    decayed = jnp.where(fresh, 0.0, states) * decay[..., None]
    return out, jnp.where(kept, decayed + k[..., None] * change[..., None, :], states)


def _read(
    queries: Float[Array, "B H Q K"], state: Float[Array, "B H K V"]
) -> Float[Array, "B H Q V"]:
    """``queries · state`` as a multiply and sum, which XLA's CPU compiler runs in one pass."""
    return jnp.sum(queries[..., None] * state[:, :, None], axis=-2)


def _read_in_runs(
    queries: Float[Array, "B H Q K"], states: Float[Array, "B H K V"]
) -> Float[Array, "B H Q V"]:
    """`_read` in a form that XLA compiles itself, splits over all cores and vectorises over V."""
    batch, heads, key, value = states.shape
    run = math.gcd(key, RUN)
    if run < RUN // 2:  # the partial sums would be half as large as the pool, or larger
        return _read(queries, states)
    terms = states.reshape(batch, heads, 1, key // run, run, value)
    queries = queries.reshape(*queries.shape[:3], key // run, run, 1)
    partial = sum(queries[..., i, :] * terms[..., i, :] for i in range(run))
    return jnp.sum(lax.optimization_barrier(partial), axis=-2)


def _zero_where(zero: Bool[Array, ""], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(zero, 0.0, x)
