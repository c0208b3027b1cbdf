"""Attention Residuals: each sublayer reads a learned mixture of earlier sums over depth."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from k3jax.config import K3Config
from k3jax.model.params import ResidualMix
from pallas_kernels.residual import residual_mix


def next_input(
    params: ResidualMix | None,
    config: K3Config,
    norm: Float[Array, "hidden"],
    bank: Sequence[Float[Array, "*batch hidden"]],
    x: Float[Array, "*batch hidden"],
    y: Float[Array, "*batch hidden"] | None,
) -> tuple[Float[Array, "*batch hidden"], Float[Array, "*batch hidden"]]:
    """The running sum with the last sublayer's output y (None: none), and the next one's input.

    That is the RMSNorm, weighted by `norm`, of the mixture of the bank's sums and this one (K3
    report, eq. 8-10), or of this one alone in a model without Attention Residuals.
    """
    mix = None if params is None else (params.norm, params.proj)
    return residual_mix(bank, x, y, mix, norm, config.rms_norm_eps)
