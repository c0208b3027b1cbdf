"""The small parts every layer uses: RMSNorm, gated activations, the gated MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.model.params import MLPParams
from k3jax.quant import matmul
from pallas_kernels.residual import rms_norm

__all__ = ["Activation", "activation", "mlp", "rms_norm"]

Activation = Callable[[Array, Array], Array]


@functools.cache
def activation(config: K3Config) -> Activation:
    """The model's gated activation of (gate, up): SiTU-GLU for K3, SiLU-GLU for Kimi-Linear.

    SiTU: `β tanh(g/β) σ(g) · λ tanh(u/λ)`, λ None leaving u alone; float32 inside, one rounding.
    """
    beta, linear_beta = config.situ_beta, config.situ_linear_beta

    def situ(gate: Array, up: Array) -> Array:
        g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
        if linear_beta is not None:
            u = linear_beta * jnp.tanh(u / linear_beta)
        return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)

    def silu(gate: Array, up: Array) -> Array:
        return jax.nn.silu(gate) * up

    return situ if config.activation == "situ" else silu


def mlp(
    params: MLPParams, config: K3Config, x: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch hidden"]:
    """`W_down act(W_gate x, W_up x)`."""
    gate, up = jnp.split(matmul(x, params.gate_up), 2, axis=-1)
    return matmul(activation(config)(gate, up), params.down)
