"""The short causal convolution as a sum of shifted products, which XLA fuses into one pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_conv(
    x: Float[Array, "B T C"],
    window: Float[Array, "B W-1 C"],
    weight: Float[Array, "C W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """See ``reference.short_conv`` for the equation."""
    tokens, taps = x.shape[1], weight.shape[1]
    raw = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for tap in range(taps):
        y += raw[:, tap : tap + tokens].astype(jnp.float32) * weight[:, tap].astype(jnp.float32)
    inside = jnp.arange(tokens)[None, :, None] < lengths[:, None, None]
    columns = lengths[:, None] + jnp.arange(taps - 1)[None, :]
    new_window = jnp.take_along_axis(raw, columns[:, :, None], axis=1)
    return jnp.where(inside, jax.nn.silu(y), 0.0).astype(x.dtype), new_window
