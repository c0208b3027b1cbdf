"""One decoding token of a KDA mixer between its projections: convolution to gated output norm.

The checked entry point, and the same thing as a sequence of this package's XLA operators.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation, chosen
from pallas_kernels.kda import conv_xla, mixer_step_gpu, step_xla
from pallas_kernels.kda.reference import gated_rms_norm, l2_norm, log_decay_gate


class StepInputs(NamedTuple):
    """A token's projections, one row each."""

    projected: Float[Array, "B C"]
    """Queries, keys and values before the convolution, each all heads of K channels: C = 3 H K."""
    decay: Float[Array, "B H K"]
    """Output of the low-rank decay projection."""
    beta: Float[Array, "B H"]
    """Logits of the write strength."""
    gate: Float[Array, "B H K"]
    """Logits of the output gate."""


class StepWeights(NamedTuple):
    """A mixer's weights that are no projection; `taps` are `causal_conv`'s."""

    taps: Float[Array, "C W"]
    a_log: Float[Array, "H"]
    decay_bias: Float[Array, "H K"]
    out_norm: Float[Array, "K"]


class StepPools(NamedTuple):
    """State matrices (float32) and convolution windows, by slot; both are updated in place."""

    states: Float[Array, "slots H K K"]
    windows: Float[Array, "slots W-1 C"]


def kda_mixer_step(
    inputs: StepInputs,
    weights: StepWeights,
    pools: StepPools,
    read_slots: Int[Array, "B"],
    write_slots: Int[Array, "B"],
    *,
    lower_bound: float | None,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B H K"], StepPools]:
    """Advance every row by one token; returns what the output projection takes, and the pools.

    `reference.kda_mixer_step` states the equations. Slots are used as in `kda_decode`: a negative
    read slot is a fresh row; a negative write slot, or one past the pools, drops the row's new
    state, and its output means nothing. `lower_bound` is `log_decay_gate`'s and `eps` the output
    norm's. `implementation` None asks the plan in use for "kda_decode".
    """
    _check(inputs, weights, pools, read_slots, write_slots)
    runs = chosen("kda_decode") if implementation is None else implementation
    if runs is Implementation.XLA:
        return _xla(inputs, weights, pools, read_slots, write_slots, lower_bound, eps)
    out, states, windows = mixer_step_gpu.kda_mixer_step(
        *inputs,
        *weights,
        *pools,
        read_slots,
        write_slots,
        lower_bound=lower_bound,
        eps=eps,
        interpret=runs.interpret,
    )
    return out, StepPools(states, windows)


def _xla(
    inputs: StepInputs,
    weights: StepWeights,
    pools: StepPools,
    read_slots: Array,
    write_slots: Array,
    lower_bound: float | None,
    eps: float,
) -> tuple[Array, StepPools]:
    rows, heads, key = inputs.decay.shape
    slots = pools.windows.shape[0]
    window = jnp.take(pools.windows, read_slots, axis=0, mode="clip")
    window = jnp.where((read_slots < 0)[:, None, None], 0, window)
    lengths = jnp.ones((rows,), jnp.int32)
    mixed, window = conv_xla.causal_conv(inputs.projected[:, None], window, weights.taps, lengths)
    q, k, v = jnp.moveaxis(mixed.reshape(rows, 3, heads, key), 1, 0)
    out, states = step_xla.kda_decode(
        l2_norm(q) * key**-0.5,
        l2_norm(k),
        v.astype(jnp.float32),
        log_decay_gate(inputs.decay, weights.a_log, weights.decay_bias, lower_bound),
        1.0 / (1.0 + jnp.exp(-inputs.beta.astype(jnp.float32))),
        pools.states,
        read_slots,
        write_slots,
    )
    target = jnp.where(write_slots < 0, slots, write_slots)
    windows = pools.windows.at[target].set(window, mode="drop", unique_indices=True)
    out = gated_rms_norm(out, inputs.gate, weights.out_norm, eps).astype(inputs.projected.dtype)
    return out, StepPools(states, windows)


def _check(
    inputs: StepInputs, weights: StepWeights, pools: StepPools, read: Array, write: Array
) -> None:
    if inputs.decay.ndim != 3:
        raise ValueError(f"decay has shape {inputs.decay.shape}; it must be [B, H, K]")
    rows, heads, key = inputs.decay.shape
    channels = 3 * heads * key
    if weights.taps.ndim != 2 or weights.taps.shape[1] < 2:
        raise ValueError(f"taps have shape {weights.taps.shape}; they must be [C, W], W at least 2")
    taps, slots = weights.taps.shape[1], pools.states.shape[0]
    expected = {
        "projected": (inputs.projected, (rows, channels)),
        "beta": (inputs.beta, (rows, heads)),
        "gate": (inputs.gate, (rows, heads, key)),
        "taps": (weights.taps, (channels, taps)),
        "a_log": (weights.a_log, (heads,)),
        "decay_bias": (weights.decay_bias, (heads, key)),
        "out_norm": (weights.out_norm, (key,)),
        "states": (pools.states, (slots, heads, key, key)),
        "windows": (pools.windows, (slots, taps - 1, channels)),
        "read_slots": (read, (rows,)),
        "write_slots": (write, (rows,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}; decay's {rows, heads, key} want {shape}"
            )
    if pools.states.dtype != jnp.float32:
        raise ValueError(f"states are {pools.states.dtype}; recurrent states are float32")
    for name, slot in (("read_slots", read), ("write_slots", write)):
        if not jnp.issubdtype(slot.dtype, jnp.integer):
            raise ValueError(f"{name} are {slot.dtype}; slots are integers")
