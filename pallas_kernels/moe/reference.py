"""What routed experts mean: every expert on every row, weighted by the routing."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.linear import decode_int8, decode_mxfp4, linear

Activation = Callable[[jax.Array, jax.Array], jax.Array]
Weight = jax.Array | tuple[jax.Array, jax.Array]


def experts_dense(
    x: Float[Array, "row latent"],
    indices: Int[Array, "row choice"],
    weights: Float[Array, "row choice"],
    gate_up: Weight,
    down: Weight,
    activation: Activation,
    *,
    valid: Bool[Array, "row"] | None = None,
) -> Float[Array, "row latent"]:
    """`Σ_k w_k down_e(activation(gate_e x, up_e x))` in float32, e = indices[:, k].

    Costs every expert on every row, whatever the routing. Differentiable with respect to x,
    weights and float expert weights. Arguments as in `experts`.
    """
    if valid is not None:
        x = jnp.where(valid[:, None], x, 0)
        weights = jnp.where(valid[:, None], weights, 0)
    count = jax.tree.leaves(gate_up)[0].shape[0]

    def add_expert(
        total: jax.Array, expert: tuple[jax.Array, Weight, Weight]
    ) -> tuple[jax.Array, None]:
        number, gate_up_e, down_e = expert
        gate, up = jnp.split(linear(x, decode(gate_up_e)), 2, axis=-1)
        y = linear(activation(gate, up), decode(down_e)).astype(jnp.float32)
        share = jnp.where(indices == number, weights, 0).sum(-1)
        return total + share[:, None] * y, None

    total = jnp.zeros(x.shape, jnp.float32)
    total, _ = jax.lax.scan(add_expert, total, (jnp.arange(count), gate_up, down))
    return total


def decode(weight: Weight) -> jax.Array:
    """A float weight as it is, a (values, scales) pair decoded to float32."""
    if not isinstance(weight, tuple):
        return weight
    values, scales = weight
    if values.dtype == jnp.uint8:
        return decode_mxfp4(values, scales)
    return decode_int8(values, scales)
