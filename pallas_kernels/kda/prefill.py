"""Spans of tokens per row, each from one slot of a state pool to another: the entry point."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.kda import kda_chunk, prefill_gpu

Tokens = tuple[Array, Array, Array, Array, Array]


class Exports(NamedTuple):
    """Where each row's state is kept besides, part of the way through its span.

    The state after the row's first `counts[b]` tokens goes to `slots[b]`; nothing is kept where
    the count is not between 1 and the row's length, or the slot is negative or past the pool.
    """

    counts: Int[Array, "B"]
    slots: Int[Array, "B"]


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
    *,
    exports: Exports | None = None,
    log_decay_bound: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "slots H K V"]]:
    """Run a span per row through the delta rule; returns float32 outputs and the pool.

    `reference.kda_prefill` states the equations. Tokens are prepared as for `kda_chunk`, and
    `log_decay_bound` is its; rows are right-padded, and what lies from `lengths[b]` on is ignored,
    its outputs being zero. Slots are used as in `kda_decode`: a negative read slot is a fresh row;
    a negative write slot, or one past the pool, drops the state. No slot may be written twice in
    one call, exports included, nor written by one row and read by another; neither is checked. The
    pool is updated in place when the caller's `jit` donates it.

    The XLA form multiplies in float32; the kernel multiplies bfloat16 and sums, decays, inverts and
    keeps states in float32. `implementation` None asks the plan in use for "kda_prefill".
    """
    _check(q, k, v, log_decay, beta, lengths, state_pool, read_slots, write_slots, exports)
    if log_decay_bound is not None and not -math.inf < log_decay_bound <= 0.0:
        raise ValueError(
            f"log_decay_bound is {log_decay_bound}; it must be finite and not positive"
        )
    runs = chosen("kda_prefill") if implementation is None else implementation
    if runs is not Implementation.XLA:
        return prefill_gpu.kda_prefill(
            q, k, v, log_decay, beta, lengths, state_pool, read_slots, write_slots,
            exports, log_decay_bound=log_decay_bound, interpret=runs.interpret,
        )  # fmt: skip
    tokens = (q, k, v, log_decay, beta)
    initial = jnp.take(state_pool, read_slots, axis=0, mode="clip")
    initial = jnp.where((read_slots < 0)[:, None, None, None], 0.0, initial)
    # Read once and for all: a read repeated inside later fusions would outlive the pool's update,
    # and XLA would copy the pool to keep it.
    initial = lax.optimization_barrier(initial)
    before = _masked(tokens, lengths)
    out, final = kda_chunk(*before, initial, log_decay_bound=log_decay_bound)
    if exports is not None:
        wanted = (exports.counts >= 1) & (exports.counts <= lengths)
        before = _masked(tokens, jnp.minimum(exports.counts, lengths))
        _, kept = kda_chunk(*before, initial, log_decay_bound=log_decay_bound)
        state_pool = _write(state_pool, jnp.where(wanted, exports.slots, -1), kept)
    return out, _write(state_pool, write_slots, final)


def _masked(tokens: Tokens, counts: Int[Array, "B"]) -> Tokens:
    keep = jnp.arange(tokens[0].shape[1]) < counts[:, None]

    def masked(x: Array) -> Array:
        return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0)

    q, k, v, log_decay, beta = tokens
    return masked(q), masked(k), masked(v), masked(log_decay), masked(beta)


def _write(
    pool: Float[Array, "slots H K V"], slots: Int[Array, "B"], states: Float[Array, "B H K V"]
) -> Float[Array, "slots H K V"]:
    target = jnp.where(slots < 0, pool.shape[0], slots)
    return pool.at[target].set(states, mode="drop", unique_indices=True)


def _check(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    lengths: Array,
    state_pool: Array,
    read_slots: Array,
    write_slots: Array,
    exports: Exports | None,
) -> None:
    if k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"k has shape {k.shape} and v {v.shape}; they must be [B, T, H, K or V]")
    if 0 in k.shape[:2]:
        raise ValueError(f"k has shape {k.shape}; there must be at least one row and one token")
    rows, _, heads, key = k.shape
    integers = {"lengths": lengths, "read_slots": read_slots, "write_slots": write_slots}
    if exports is not None:
        integers |= {"exports.counts": exports.counts, "exports.slots": exports.slots}
    for name, array in integers.items():
        if array.shape != (rows,) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(
                f"{name} is {array.dtype}{array.shape}; it must be one integer per row, ({rows},)"
            )
    expected = {
        "q": (q, k.shape),
        "v": (v, (*k.shape[:-1], v.shape[-1])),
        "log_decay": (log_decay, k.shape),
        "beta": (beta, k.shape[:-1]),
        "state_pool": (state_pool, (*state_pool.shape[:1], heads, key, v.shape[-1])),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; k's {k.shape} want {shape}")
    if state_pool.dtype != jnp.float32:
        raise ValueError(f"state_pool is {state_pool.dtype}; recurrent states are float32")
