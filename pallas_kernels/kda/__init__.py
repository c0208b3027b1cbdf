"""Kimi Delta Attention: the checked entry points over the reference and the fast paths.

``reference`` states the equations. The functions here check shapes and dtypes at trace time, so a
mistake is a ``ValueError`` that names the argument, and then call the XLA implementation.

Axes: ``B`` rows, ``T`` tokens, ``H`` heads, ``K`` key channels, ``V`` value channels, ``C``
convolution channels, ``W`` convolution taps, ``slots`` places in a state pool. Everything is
computed in float32; states are float32 and key-first (``[..., K, V]``; Hugging Face caches are
value-first).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import device_platform
from pallas_kernels.kda import chunk_xla, conv_xla, step_xla
from pallas_kernels.kda.reference import gated_rms_norm, kda_recurrent, l2_norm, log_decay_gate

__all__ = [
    "causal_conv",
    "conv_window",
    "gated_rms_norm",
    "kda_chunk",
    "kda_decode",
    "kda_recurrent",
    "kda_step",
    "l2_norm",
    "log_decay_gate",
]


class Tuning(NamedTuple):
    """How ``kda_chunk`` cuts its work on a kind of device; see ``chunk_xla.kda_chunk``."""

    chunk_size: int
    block_elements: int


CPU_TUNING = Tuning(chunk_size=16, block_elements=2**18)
DEVICE_TUNING = Tuning(chunk_size=64, block_elements=2**25)


def kda_chunk(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"] | None = None,
    *,
    chunk_size: int | None = None,
    log_decay_bound: float | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Run whole sequences through the gated delta rule; outputs and final state in float32.

    Same result as ``kda_recurrent``, for any ``T`` and any ``log_decay`` ≤ 0. ``q`` and ``k`` come
    normalised (``l2_norm``) and ``q`` scaled by ``K ** -0.5``; ``initial_state`` None means zeros.
    Differentiable.

    ``log_decay_bound`` is the caller's promise that no ``log_decay`` is below it (K3's
    ``gate_lower_bound``, −5), which saves a quarter of the time; breaking it gives infinities. None
    promises nothing. ``chunk_size`` is a power of two; None takes the one measured fastest on CPU,
    and a larger one for other devices.

    Padding is the caller's to mask, on either side or in between: a token with ``log_decay = 0``,
    ``beta = 0`` and ``k = 0`` leaves the state exactly as it was. Its ``q`` and ``v`` must be
    finite (zero them too): a NaN times zero is still a NaN. Its output means nothing.
    """
    _check_tokens(("B", "T", "H"), q, k, v, log_decay, beta)
    tuning = CPU_TUNING if device_platform() == "cpu" else DEVICE_TUNING
    chunk_size = tuning.chunk_size if chunk_size is None else chunk_size
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}; it must be a power of two")
    if log_decay_bound is not None and not -math.inf < log_decay_bound <= 0.0:
        raise ValueError(
            f"log_decay_bound is {log_decay_bound}; it must be finite and not positive"
        )
    rows, _, heads, key_dim = k.shape
    state_shape = (rows, heads, key_dim, v.shape[-1])
    if initial_state is None:
        initial_state = jnp.zeros(state_shape, jnp.float32)
    _check_state("initial_state", initial_state, state_shape)
    return chunk_xla.kda_chunk(
        *_as_float32(q, k, v, log_decay, beta),
        initial_state,
        chunk_size=chunk_size,
        log_decay_bound=log_decay_bound,
        block_elements=tuning.block_elements,
    )


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Advance every row by one token; returns its output and its new state, float32.

    The inputs are prepared and masked as for ``kda_chunk``.
    """
    _check_tokens(("B", "H"), q, k, v, log_decay, beta)
    _check_state("state", state, (*k.shape, v.shape[-1]))
    return step_xla.kda_step(*_as_float32(q, k, v, log_decay, beta), state)


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
    """Advance every row by one token, its state living in a pool.

    Row ``b`` starts from ``state_pool[read_slots[b]]``, or from zeros where ``read_slots[b]`` is
    negative, and its new state goes to ``write_slots[b]``, or nowhere where that is negative or
    past the pool (a padding row). Reading one slot and writing another leaves the first untouched,
    which is how a row continues from a checkpoint. ``read_slots`` must be below ``slots``. No slot
    may be written twice in one call, nor written by one row and read by another; neither is
    checked.

    The pool is updated in place when the caller's ``jit`` donates it: nothing of its size is
    copied.
    """
    _check_tokens(("B", "H"), q, k, v, log_decay, beta)
    _check_state("state_pool", state_pool, (*state_pool.shape[:1], *k.shape[1:], v.shape[-1]))
    for name, slots in (("read_slots", read_slots), ("write_slots", write_slots)):
        _check_integers(name, slots, k.shape[0])
    inputs = _as_float32(q, k, v, log_decay, beta)
    addresses = (jnp.asarray(slots, jnp.int32) for slots in (read_slots, write_slots))
    return step_xla.kda_decode(*inputs, state_pool, *addresses)


def causal_conv(
    x: Float[Array, "B T C"],
    window: Float[Array, "B W-1 C"],
    weight: Float[Array, "C W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """Depthwise causal convolution and SiLU; returns outputs in ``x``'s dtype and the new window.

    ``window`` holds each row's last ``W − 1`` raw inputs, oldest first, zeros for a fresh row; the
    new window holds those before token ``lengths[b]``, in the window's dtype. Rows are
    right-padded: outputs from ``lengths[b]`` on are zero whatever the padding holds, and a length
    of 0 keeps the window. The sum is float32. ``weight`` is the checkpoint's ``[C, 1, W]`` without
    its middle axis, last tap on the current token.
    """
    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}; it must be [B, T, C]")
    channels = x.shape[2]
    if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 2:
        raise ValueError(f"weight has shape {weight.shape}; it must be [C, W] with C = {channels}")
    _check_window(x, window, weight.shape[1])
    _check_integers("lengths", lengths, x.shape[0])
    return conv_xla.causal_conv(x, window, weight, lengths)


def conv_window(
    x: Float[Array, "B T C"], window: Float[Array, "B W-1 C"], counts: Int[Array, "B"]
) -> Float[Array, "B W-1 C"]:
    """The window that ``causal_conv`` returns for lengths of ``counts``, without its outputs."""
    if x.ndim != 3 or window.ndim != 3:
        raise ValueError(f"x has shape {x.shape} and window {window.shape}; both have three axes")
    _check_window(x, window, window.shape[1] + 1)
    _check_integers("counts", counts, x.shape[0])
    return conv_xla.last_inputs(x, window, counts)


def _check_window(x: Array, window: Array, taps: int) -> None:
    expected = (x.shape[0], taps - 1, x.shape[2])
    if window.shape != expected:
        raise ValueError(f"window has shape {window.shape}; it must be [B, W-1, C] = {expected}")


def _as_float32(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array
) -> tuple[Array, Array, Array, Array, Array]:
    def wide(x: Array) -> Array:
        return x.astype(jnp.float32)

    return wide(q), wide(k), wide(v), wide(log_decay), wide(beta)


def _check_tokens(
    lead: tuple[str, ...], q: Array, k: Array, v: Array, log_decay: Array, beta: Array
) -> None:
    rank = len(lead) + 1
    if k.ndim != rank:
        raise ValueError(f"k has shape {k.shape}; it must be [{', '.join(lead)}, K]")
    for name, x in (("q", q), ("log_decay", log_decay)):
        if x.shape != k.shape:
            raise ValueError(f"{name} has shape {x.shape}; it must be k's, {k.shape}")
    if v.ndim != rank or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {v.shape}; it must be {k.shape[:-1]} and a value axis")
    if beta.shape != k.shape[:-1]:
        raise ValueError(f"beta has shape {beta.shape}; it must be {k.shape[:-1]}")


def _check_state(name: str, state: Array, shape: tuple[int, ...]) -> None:
    if state.shape != shape:
        raise ValueError(f"{name} has shape {state.shape}; it must be key-first, {shape}")
    if state.dtype != jnp.float32:
        raise ValueError(f"{name} is {state.dtype}; recurrent states are float32")


def _check_integers(name: str, x: Array, rows: int) -> None:
    if x.shape != (rows,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} is {x.dtype}{x.shape}; it must be one integer per row, ({rows},)")
