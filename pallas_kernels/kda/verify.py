"""Speculative tokens: their outputs without touching the state, then the state of those accepted.

Verification leaves a row's committed state alone and records what each token would write. Whatever
is then accepted is replayed from the records, so a rejected token costs nothing to undo.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.kda import verify_gpu

MAX_TOKENS = 8


class Trace(NamedTuple):
    """What replaying needs of every token, float32."""

    writes: Float32[Array, "B T H V"]
    """``u = beta (v − Sᵀ k)``, the write along the token's key."""
    keys: Float32[Array, "B T H K"]
    log_decay: Float32[Array, "B T H K"]


def kda_verify(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    lengths: Int[Array, "B"],
    state_pool: Float32[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float32[Array, "B T H V"], Trace]:
    """Outputs of up to `MAX_TOKENS` tokens per row, and the trace to replay them from.

    `reference.kda_verify` states the equations. q, k and log_decay are [B, T, H, K], v
    [B, T, H, V] and beta [B, T, H], prepared as for `kda_chunk`. Rows are right-padded: what lies
    from `lengths[b]` on is ignored, its outputs and writes being zero. A negative read slot is a
    fresh row. `implementation` None asks the plan in use for "kda_verify".
    """
    _check(k, v, state_pool, {"lengths": lengths, "read_slots": read_slots})
    for name, array in (("q", q), ("log_decay", log_decay)):
        if array.shape != k.shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be k's, {k.shape}")
    if beta.shape != k.shape[:-1]:
        raise ValueError(f"beta has shape {beta.shape}; it must be {k.shape[:-1]}")
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    runs = chosen("kda_verify") if implementation is None else implementation
    if runs is Implementation.XLA:
        state = _read(state_pool, read_slots)
        out, writes = _verify_xla(q, k, v, log_decay, beta, lengths, state)
    else:
        out, writes = verify_gpu.kda_verify(
            q, k, v, log_decay, beta, lengths, state_pool, read_slots, interpret=runs.interpret
        )
    return out, Trace(writes, k, log_decay)


def kda_replay(
    trace: Trace,
    counts: Int[Array, "B"],
    state_pool: Float32[Array, "slots H K V"],
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    *,
    implementation: Implementation | None = None,
) -> Float32[Array, "slots H K V"]:
    """The pool with each row's state after the first `counts[b]` tokens of its trace.

    `reference.kda_replay` states the equations; `read_slots` are those that were verified from, and
    a count is at most the length that was verified (a count of 0 moves the state unchanged). Slots
    are used as in `kda_decode`. The pool is updated in place when the caller's `jit` donates it.
    `implementation` None asks the plan in use for "kda_replay".
    """
    integers = {"counts": counts, "read_slots": read_slots, "write_slots": write_slots}
    _check(trace.keys, trace.writes, state_pool, integers)
    runs = chosen("kda_replay") if implementation is None else implementation
    if runs is Implementation.XLA:
        return _replay_xla(trace, counts, state_pool, read_slots, write_slots)
    return verify_gpu.kda_replay(
        *trace, counts, state_pool, read_slots, write_slots, interpret=runs.interpret
    )


def _verify_xla(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    lengths: Array,
    state: Array,
) -> tuple[Array, Array]:
    keep = jnp.arange(k.shape[1]) < lengths[:, None]
    masked = (jnp.where(keep[..., None, None], x, 0) for x in (q, k, v, log_decay, beta[..., None]))

    def token(state: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        q_t, k_t, v_t, g_t, beta_t = inputs
        state = state * jnp.exp(g_t)[..., None]
        write = beta_t * (v_t - jnp.sum(state * k_t[..., None], axis=-2))
        state = state + k_t[..., None] * write[..., None, :]
        return state, (jnp.sum(state * q_t[..., None], axis=-2), write)

    tokens_first = tuple(jnp.moveaxis(x, 1, 0) for x in masked)
    _, (out, writes) = lax.scan(token, state, tokens_first)
    # Whatever the state of a row without tokens holds.
    results = (jnp.moveaxis(x, 0, 1) for x in (out, writes))
    out, writes = (jnp.where(keep[..., None, None], x, 0) for x in results)
    return out, writes


def _replay_xla(
    trace: Trace, counts: Array, pool: Array, read_slots: Array, write_slots: Array
) -> Array:
    writes, k, log_decay = trace
    # Read once and for all: a read repeated inside the fusion that writes would need a copy.
    state = lax.optimization_barrier(_read(pool, read_slots))
    for t in range(k.shape[1]):
        after = state * jnp.exp(log_decay[:, t])[..., None]
        after = after + k[:, t, :, :, None] * writes[:, t, :, None, :]
        state = jnp.where((t < counts)[:, None, None, None], after, state)
    target = jnp.where(write_slots < 0, pool.shape[0], write_slots)
    return pool.at[target].set(state, mode="drop", unique_indices=True)


def _read(pool: Array, slots: Array) -> Array:
    return jnp.where(
        (slots < 0)[:, None, None, None], 0.0, jnp.take(pool, slots, axis=0, mode="clip")
    )


def _check(k: Array, v: Array, state_pool: Array, integers: dict[str, Array]) -> None:
    if k.ndim != 4 or not 1 <= k.shape[1] <= MAX_TOKENS:
        raise ValueError(f"k has shape {k.shape}; it must be [B, 1 to {MAX_TOKENS}, H, K]")
    if v.ndim != 4 or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {v.shape}; it must be {k.shape[:-1]} and a value axis")
    shape = (*state_pool.shape[:1], k.shape[2], k.shape[3], v.shape[3])
    if state_pool.shape != shape or state_pool.dtype != jnp.float32:
        raise ValueError(
            f"state_pool is {state_pool.dtype}{state_pool.shape}; it must be float32, {shape}"
        )
    for name, array in integers.items():
        if array.shape != k.shape[:1] or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} is {array.dtype}{array.shape}; it must be one integer per row, "
                f"({k.shape[0]},)"
            )
