"""The short causal convolution as a sum of shifted products, which XLA fuses into one pass."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def causal_conv(
    x: Float[Array, "B T C"],
    window: Float[Array, "B W-1 C"],
    weight: Float[Array, "C W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """See ``reference.short_conv`` for the equation.

    The first ``W − 1`` outputs, which meet the window, are computed apart: on CPU, joining the
    window to all of ``x`` costs a copy or a loop that is not vectorised (1.6 times the time), and
    ``lax.conv`` forty times the time.
    """
    tokens, taps = x.shape[1], weight.shape[1]
    if tokens == 1:
        return _one_token(x, window, weight, lengths)
    # Tap by tap in memory; as columns of [C, W] they would be gathered one by one.
    by_tap = lax.optimization_barrier(weight.T.astype(jnp.float32))
    wide = x.astype(jnp.float32)
    near = min(taps - 1, tokens)
    head = jnp.concatenate([window.astype(jnp.float32), wide[:, :near]], axis=1)
    y = _shifted_sum(head, by_tap, near)
    if tokens > near:
        y = jnp.concatenate([y, _shifted_sum(wide, by_tap, tokens - near)], axis=1)
    inside = jnp.arange(tokens)[None, :, None] < lengths[:, None, None]
    y = jnp.where(inside, jax.nn.silu(y), 0.0).astype(x.dtype)
    return y, last_inputs(x, window, lengths)


def _one_token(
    x: Float[Array, "B 1 C"],
    window: Float[Array, "B W-1 C"],
    weight: Float[Array, "C W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B 1 C"], Float[Array, "B W-1 C"]]:
    """`causal_conv` of a decode step: sum, activation and window once each, in whole rows.

    Without the barriers XLA computes the sum again in each of the six fusions that read a part of
    it, and `last_inputs` would gather the window element by element.
    """
    by_tap = lax.optimization_barrier(weight.T.astype(jnp.float32))
    history = [*window.astype(jnp.float32).swapaxes(0, 1), x[:, 0].astype(jnp.float32)]
    y = lax.optimization_barrier(sum(a * b for a, b in zip(history, by_tap, strict=True)))
    real = lengths[:, None] > 0
    y = lax.optimization_barrier(jnp.where(real, jax.nn.silu(y), 0.0).astype(x.dtype))
    shifted = jnp.concatenate([window[:, 1:], x.astype(window.dtype)], axis=1)
    return y[:, None], jnp.where(real[:, :, None], shifted, window)


def last_inputs(
    x: Float[Array, "B T C"], window: Float[Array, "B W-1 C"], lengths: Int[Array, "B"]
) -> Float[Array, "B W-1 C"]:
    """The ``W − 1`` raw inputs before token ``lengths[b]``, without joining window and ``x``."""
    size = window.shape[1]
    place = lengths[:, None] + jnp.arange(size)[None, :]
    kept = jnp.take_along_axis(window, jnp.minimum(place, size - 1)[:, :, None], axis=1)
    taken = jnp.take_along_axis(x, jnp.maximum(place - size, 0)[:, :, None], axis=1)
    return jnp.where((place < size)[:, :, None], kept, taken.astype(window.dtype))


def _shifted_sum(
    x: Float[Array, "B T C"], by_tap: Float[Array, "W C"], tokens: int
) -> Float[Array, "B T2 C"]:
    """``Σ_j by_tap[j] · x[t + j]`` for the first ``tokens`` places."""
    y = x[:, :tokens] * by_tap[0]
    for tap in range(1, by_tap.shape[0]):
        y += x[:, tap : tap + tokens] * by_tap[tap]
    return y
