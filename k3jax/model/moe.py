"""The mixture of experts: router, latent projections, routed experts and the shared MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.config import K3Config
from k3jax.model.layers import activation, mlp, rms_norm
from k3jax.model.params import MoEParams, Weight
from k3jax.quant import QuantArray, matmul
from pallas_kernels.moe import experts


def route(
    logits: Float32[Array, "token expert"], score_bias: Float32[Array, "expert"], config: K3Config
) -> tuple[Int32[Array, "token choice"], Float32[Array, "token choice"]]:
    """Chosen experts and their weights. The bias only selects; weights are the unbiased scores.

    Expert groups, where active, are ranked by the sum of their two best biased scores and all but
    the best are excluded with minus infinity (released `KimiMoEGate`).
    """
    if config.router_activation == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jax.nn.softmax(logits, axis=-1)
    biased = scores + score_bias
    groups, kept = config.num_expert_groups, config.top_expert_groups
    if groups > kept:
        grouped = biased.reshape(*biased.shape[:-1], groups, -1)
        best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        chosen = jax.lax.top_k(best_two, kept)[1]
        allowed = jax.nn.one_hot(chosen, groups, dtype=jnp.bool_).any(-2)
        biased = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)
    indices = jax.lax.top_k(biased, config.num_experts_per_token)[1]
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if config.num_experts_per_token > 1 and config.router_renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return indices, weights * config.routed_scaling_factor


def moe(
    params: MoEParams,
    config: K3Config,
    x: Float[Array, "row token hidden"],
    real: Bool[Array, "row token"],
) -> Float[Array, "row token hidden"]:
    """One mixture-of-experts sublayer over normed inputs; padding tokens reach no expert.

    Router and combination are float32. The router and the shared MLP read the full width, the
    routed experts the latent (released `KimiSparseMoeBlock`).
    """
    flat = x.reshape(-1, x.shape[-1])
    logits = matmul(flat.astype(jnp.float32), params.router.astype(jnp.float32))
    indices, weights = route(logits, params.score_bias, config)
    latent = flat if params.latent_down is None else matmul(flat, params.latent_down)
    y = experts(
        latent,
        indices,
        weights,
        _pair(params.gate_up),
        _pair(params.down),
        activation(config),
        valid=real.reshape(-1),
    ).astype(x.dtype)
    if params.latent_norm is not None:
        y = rms_norm(y, params.latent_norm, config.rms_norm_eps)
    if params.latent_up is not None:
        y = matmul(y, params.latent_up)
    if params.shared is not None:
        y = y + mlp(params.shared, config, flat)
    return y.reshape(x.shape)


def _pair(weight: Weight) -> Array | tuple[Array, Array]:
    return weight.pair if isinstance(weight, QuantArray) else weight
