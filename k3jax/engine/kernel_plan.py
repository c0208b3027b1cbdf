"""The kernel plan of a model with its weights: what each op runs as in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.model.params import K3Params, MoEParams
from k3jax.quant import QuantArray
from pallas_kernels.implementation import Device, KernelPlan, plan_kernels
from pallas_kernels.shapes import ModelShape

TYPICAL_CONTEXT = 4096
"""Cached tokens per row at which the plan is made, if the model's context allows."""


def kernel_plan(
    params: K3Params,
    config: K3Config,
    kernels: Mapping[str, str] | None = None,
    *,
    page_size: int,
    batch: int,
    context: int | None = None,
    dtype: Any = None,
    device: Device | None = None,
) -> KernelPlan:
    """`plan_kernels` for weights as they are: their dtype, and experts packed or not.

    `kernels` maps ops to the variants asked for. `context` is the most that a row can reach
    (default: the model's), `dtype` that of activations (default: the embedding's). `params` may be
    shapes (`params.abstract`). Raises ValueError for an op or variant that cannot be.
    """
    return plan_kernels(
        model_shape(params, config, page_size=page_size, dtype=dtype),
        device,
        kernels,
        batch=batch,
        context=min(TYPICAL_CONTEXT, context or config.max_context),
    )


def model_shape(
    params: K3Params, config: K3Config, *, page_size: int, dtype: Any = None
) -> ModelShape:
    """What kernels see of weights as they are; the arguments are those of `kernel_plan`."""
    name = str(jnp.dtype(params.embed.dtype if dtype is None else dtype))
    shape = ModelShape.of(config, name, page_size)
    return shape.with_experts(_expert_format(params))


def _expert_format(params: K3Params) -> str | None:
    for layer in params.layers:
        if isinstance(layer.ffn, MoEParams) and isinstance(layer.ffn.gate_up, QuantArray):
            return layer.ffn.gate_up.format
    return None
