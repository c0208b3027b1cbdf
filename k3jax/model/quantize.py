"""A model's linear weights in eight bits: half to a quarter of the bytes that decoding reads."""

from __future__ import annotations

from typing import Any

from k3jax.model.params import K3Params, KDAParams, LayerParams, MLAParams, MLPParams, MoEParams
from k3jax.quant import QuantArray, quantize

_LINEAR: dict[type, tuple[str, ...]] = {
    KDAParams: ("qkv", "decay_down", "decay_up", "gate", "gate_down", "gate_up", "out"),
    MLAParams: ("q_down", "q", "kv_down", "gate", "out"),
    MLPParams: ("gate_up", "down"),
    MoEParams: ("gate_up", "down", "latent_down", "latent_up"),
}


def quantize_weights(params: K3Params) -> K3Params:
    """Every float linear weight and routed expert as int8 with one scale per output channel.

    What is small or steers the rest stays as it is: embedding, norms, convolutions, router, beta,
    `kv_up` (used on both sides of attention), the vision tower, and experts already packed.
    """

    def layer(p: LayerParams) -> LayerParams:
        ffn = _part(p.ffn)
        if isinstance(ffn, MoEParams) and ffn.shared is not None:
            ffn = ffn.replace(shared=_part(ffn.shared))
        return p.replace(mixer=_part(p.mixer), ffn=ffn)

    return params.replace(
        layers=tuple(layer(p) for p in params.layers), lm_head=_int8(params.lm_head)
    )


def _part(part: Any) -> Any:
    return part.replace(**{name: _int8(getattr(part, name)) for name in _LINEAR[type(part)]})


def _int8(weight: Any) -> Any:
    if weight is None or isinstance(weight, QuantArray):
        return weight
    return quantize(weight, "int8")
