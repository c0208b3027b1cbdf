"""Checks of the routed experts and the choice of their form."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.moe.capacity_xla import experts_by_capacity
from pallas_kernels.moe.reference import Activation, Weight


def experts(
    x: Float[Array, "row latent"],
    indices: Int[Array, "row choice"],
    weights: Float[Array, "row choice"],
    gate_up: Weight,
    down: Weight,
    activation: Activation,
    *,
    valid: Bool[Array, "row"] | None = None,
) -> Float[Array, "row latent"]:
    """`Σ_k w_k down_e(activation(gate_e x, up_e x))` summed in float32, e = indices[:, k].

    gate_up is `[expert, 2·width, latent]`, gate rows first; down is `[expert, latent, width]`.
    Each is a float array or a (values, scales) pair: uint8 values in the released MXFP4 packing
    or int8 values with one float32 scale per output. activation(gate, up) is elementwise and
    pure. Rows with valid False contribute zeros and may hold anything, even NaN.
    """
    count, double, latent = _logical(gate_up)
    if _logical(down) != (count, latent, double // 2):
        raise ValueError(
            f"down {_logical(down)} does not fit gate_up {(count, double, latent)}: "
            f"want {(count, latent, double // 2)}"
        )
    if x.ndim != 2 or x.shape[1] != latent:
        raise ValueError(f"experts take rows of width {latent}, got {x.shape}")
    if indices.shape != weights.shape or indices.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"indices {indices.shape} and weights {weights.shape} must both be "
            f"[{x.shape[0]} rows, choices]"
        )
    if valid is None:
        valid = jnp.ones(x.shape[0], jnp.bool_)
    return experts_by_capacity(x, indices, weights, gate_up, down, activation, valid)


def _logical(weight: Weight) -> tuple[int, ...]:
    if not isinstance(weight, tuple):
        return weight.shape
    values = weight[0]
    packed = 2 if values.dtype == jax.numpy.uint8 else 1
    return (*values.shape[:-1], values.shape[-1] * packed)
