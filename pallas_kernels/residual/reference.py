"""What the step between two sublayers means, in float32 throughout."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def residual_mix_reference(
    bank: Sequence[Float[Array, "row hidden"]],
    x: Float[Array, "row hidden"],
    y: Float[Array, "row hidden"] | None,
    norm: Float[Array, "hidden"] | None,
    proj: Float[Array, "hidden"] | None,
    weight: Float[Array, "hidden"],
    eps: float,
) -> tuple[Float[Array, "row hidden"], Float[Array, "row hidden"]]:
    """The new sum `s = x + y`, and `RMSNorm(Σ_i a_i v_i) · weight` over v = (*bank, s).

    `a = softmax_i(⟨RMSNorm(v_i), norm · proj⟩)` (K3 report, eq. 8-10). `y` None adds nothing;
    without `norm` and `proj`, or with an empty bank, the mixture is s itself.
    """
    x, *bank = (v.astype(jnp.float32) for v in (x, *bank))
    total = x if y is None else x + y.astype(jnp.float32)

    def normed(v: Array) -> Array:
        return v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)

    values = jnp.stack([*bank, total])
    if norm is None or proj is None:
        mixed = total
    else:
        direction = norm.astype(jnp.float32) * proj.astype(jnp.float32)
        shares = jax.nn.softmax(normed(values) @ direction, axis=0)
        mixed = jnp.sum(shares[..., None] * values, axis=0)
    return total, normed(mixed) * weight.astype(jnp.float32)
