"""Checks of the routed experts and the choice of their form."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.implementation import Implementation, chosen, device_platform
from pallas_kernels.moe.blocks_xla import experts_by_block
from pallas_kernels.moe.experts_gpu import experts_by_tile
from pallas_kernels.moe.gathered_xla import experts_by_gather
from pallas_kernels.moe.grouped_xla import experts_by_group
from pallas_kernels.moe.pairs_xla import experts_by_pair
from pallas_kernels.moe.reference import Activation, Weight
from pallas_kernels.moe.routing import sort_pairs

PAIRS_PER_EXPERT = {"float": 4, "int8": 4, "mxfp4": 2}
"""Up to so many pairs per expert, each pair reads its expert's weights for itself."""


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
    pure. Rows with valid False give zeros, may hold anything, even NaN, and cost no reads.

    Under differentiation (x, weights and float expert weights) the static form of `grouped_xla`
    runs. Otherwise the form depends on the device and the number of rows; a row's result does not
    depend on what other rows hold beyond float rounding, and at few rows not at all.
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
    x = jnp.where(valid[:, None], x, 0)
    return _experts(activation, x, indices, weights, gate_up, down, valid)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    activation: Activation,
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    valid: jax.Array,
) -> jax.Array:
    count = _logical(gate_up)[0]
    routing = sort_pairs(indices, weights, valid, count)
    runs = chosen("experts")
    if runs is not Implementation.XLA:
        assert isinstance(gate_up, tuple) and isinstance(down, tuple)
        tiled = functools.partial(experts_by_tile, interpret=runs.interpret)
        return tiled(x, routing, gate_up, down, activation, count)
    if device_platform() != "cpu":
        return experts_by_gather(x, routing, gate_up, down, activation, count)
    per_expert = indices.size / count
    if per_expert <= PAIRS_PER_EXPERT[_format(gate_up)]:
        return experts_by_pair(x, routing, gate_up, down, activation)
    block = 8 if per_expert <= 4 else 16 if per_expert <= 16 else 32
    return experts_by_block(x, routing, gate_up, down, activation, count, block)


def _forward(
    activation: Activation,
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    valid: jax.Array,
) -> tuple[jax.Array, Callable[..., tuple]]:
    def grouped(x: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
        count = _logical(gate_up)[0]
        routing = sort_pairs(indices, weights, valid, count)
        return experts_by_group(x, routing, gate_up, down, activation, count)

    if isinstance(gate_up, tuple) or isinstance(down, tuple):
        return jax.vjp(lambda x, weights: grouped(x, weights, gate_up, down), x, weights)
    return jax.vjp(grouped, x, weights, gate_up, down)


def _backward(activation: Activation, pull: Callable[..., tuple], cotangent: jax.Array) -> tuple:
    dx, dweights, *rest = pull(cotangent)
    dgate_up, ddown = rest or (None, None)
    return dx, None, dweights, dgate_up, ddown, None


_experts.defvjp(_forward, _backward)


def _format(weight: Weight) -> str:
    if not isinstance(weight, tuple):
        return "float"
    return "mxfp4" if weight[0].dtype == jnp.uint8 else "int8"


def _logical(weight: Weight) -> tuple[int, ...]:
    if not isinstance(weight, tuple):
        return weight.shape
    values = weight[0]
    packed = 2 if values.dtype == jnp.uint8 else 1
    return (*values.shape[:-1], values.shape[-1] * packed)
