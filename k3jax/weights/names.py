"""The one table that maps tensor names of the released files to leaves of `K3Params`.

Loader and writer both read it through `pieces`. Names, shapes and dtypes are those of the released
K3 and Kimi-Linear indices. A K3 file puts `language_model.` before everything but the vision part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from k3jax.config import K3Config
from k3jax.model import params as p
from k3jax.quant import QuantArray

Layout = Literal["k3", "kimi-linear"]
Part = Literal["", "values", "scales"]
Shape = tuple[int, ...]

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class Piece(NamedTuple):
    """One stored tensor and the run of one leaf that it fills.

    Every stored tensor is a contiguous run of its leaf in C order, whatever the two shapes are.
    """

    name: str
    """Name in a file of the Kimi-Linear layout, without `language_model.`."""
    leaf: str
    """Path in `K3Params`, such as `layers.3.ffn.gate_up`."""
    part: Part
    """Which array of a QuantArray; empty for a plain leaf."""
    start: int
    """First element of the run."""
    size: int
    """Elements of the run."""
    shape: Shape
    """Shape in the released file."""
    float32: bool
    """Whether the released file stores it in float32 rather than the model's dtype."""
    padded: bool = False
    """Whether a file may hold more than `size` elements (A_log)."""

    def fits(self, shape: Shape) -> bool:
        """Whether a stored shape holds this piece."""
        if not self.padded:
            return shape == self.shape
        # Released as [head_dim] and [1, 1, heads, 1]: one long axis, the heads first.
        return math.prod(shape) == max(shape, default=0) >= self.size


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one leaf is stored: under which names, in which shape, in which dtype."""

    names: tuple[str, ...]
    """Tensors stacked along the leaf's output axis, in order; `{}` is the expert."""
    shape: Callable[[Shape], Shape] = lambda shape: shape
    float32: tuple[Layout, ...] = ()
    padded: bool = False


def _same(*names: str) -> _Rule:
    return _Rule(tuple(f"{name}.weight" for name in names))


_BOTH: tuple[Layout, ...] = ("k3", "kimi-linear")

# Per struct and field: a rule for a leaf, a name prefix for a struct or a tuple of structs
# (`{}` is the position), or such a prefix per type of struct.
_TABLE: dict[type, dict[str, _Rule | str | dict[type, str]]] = {
    p.K3Params: {
        "embed": _same("model.embed_tokens"),
        "layers": "model.layers.{}.",
        "final_mix": "model.output_attn_res_",
        "final_norm": _same("model.norm"),
        "lm_head": _same("lm_head"),
        "vision": "",
    },
    p.LayerParams: {
        "mixer_mix": "self_attention_res_",
        "mixer_norm": _same("input_layernorm"),
        "mixer": "self_attn.",
        "ffn_mix": "mlp_res_",
        "ffn_norm": _same("post_attention_layernorm"),
        "ffn": {p.MLPParams: "mlp.", p.MoEParams: "block_sparse_moe."},
    },
    p.ResidualMix: {
        "norm": _same("norm"),
        "proj": _Rule(("proj.weight",), shape=lambda shape: (1, *shape)),
    },
    p.KDAParams: {
        "qkv": _same("q_proj", "k_proj", "v_proj"),
        "conv": _Rule(
            ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
            shape=lambda shape: (shape[0], 1, shape[1]),
            float32=("k3",),
        ),
        "decay_down": _same("f_a_proj"),
        "decay_up": _same("f_b_proj"),
        "decay_bias": _Rule(("dt_bias",), shape=lambda shape: (math.prod(shape),), float32=_BOTH),
        "decay_log_scale": _Rule(("A_log",), float32=_BOTH, padded=True),
        "beta": _same("b_proj"),
        "gate": _same("g_proj"),
        "gate_down": _same("g_a_proj"),
        "gate_up": _same("g_b_proj"),
        "out_norm": _Rule(("o_norm.weight",), float32=("k3",)),
        "out": _same("o_proj"),
    },
    p.MLAParams: {
        "q_down": _same("q_a_proj"),
        "q_norm": _same("q_a_layernorm"),
        "q": _same("q_b_proj"),
        "kv_down": _same("kv_a_proj_with_mqa"),
        "kv_norm": _same("kv_a_layernorm"),
        "kv_up": _same("kv_b_proj"),
        "gate": _same("g_proj"),
        "out": _same("o_proj"),
    },
    p.MLPParams: {"gate_up": _same("gate_proj", "up_proj"), "down": _same("down_proj")},
    p.MoEParams: {
        "router": _same("gate"),
        "score_bias": _Rule(("gate.e_score_correction_bias",), float32=("k3",)),
        "gate_up": _same("experts.{}.w1", "experts.{}.w3"),
        "down": _same("experts.{}.w2"),
        "latent_down": _same("routed_expert_down_proj"),
        "latent_norm": _same("routed_expert_norm"),
        "latent_up": _same("routed_expert_up_proj"),
        "shared": "shared_experts.",
    },
    p.VisionParams: {
        "patch": _Rule(
            ("vision_tower.patch_embed.proj.weight",),
            shape=lambda shape: (shape[0], 3, math.isqrt(shape[1] // 3), math.isqrt(shape[1] // 3)),
        ),
        "pos_emb": _same("vision_tower.patch_embed.pos_emb"),
        "blocks": "vision_tower.encoder.blocks.{}.",
        "norm": _same("vision_tower.encoder.final_layernorm"),
        "project_in": _same("mm_projector.proj.0"),
        "project_out": _same("mm_projector.proj.2"),
        "project_norm": _same("mm_projector.post_norm"),
    },
    p.VisionBlockParams: {
        "norm0": _same("norm0"),
        "qkv": _same("wqkv"),
        "out": _same("wo"),
        "norm1": _same("norm1"),
        "up": _same("mlp.fc0"),
        "down": _same("mlp.fc1"),
    },
}

# A query projection without a low-rank path has another name.
_DIRECT_QUERY = _same("q_proj")


def layout(config: K3Config) -> Layout:
    """Which released layout a model is written in: K3's as soon as it has one of K3's features."""
    k3_only = (
        config.vision,
        config.attn_res_block_size,
        config.expert_format,
        config.expert_latent_size,
        config.kda_gate_lower_bound,
        config.q_lora_rank,
        config.kda_full_rank_gate,
        config.mla_output_gate,
        config.activation == "situ",
    )
    return "k3" if any(k3_only) else "kimi-linear"


def plain_name(name: str) -> str:
    """A stored name without the `language_model.` that K3's wrapper adds."""
    return name.removeprefix(TEXT_PREFIX)


def stored_name(name: str, layout: Layout) -> str:
    """The inverse of `plain_name` for a file of this layout."""
    return (
        name if layout == "kimi-linear" or name.startswith(VISION_PREFIXES) else TEXT_PREFIX + name
    )


def pieces(config: K3Config) -> Iterator[Piece]:
    """Every tensor of a checkpoint of this model, in the order of the leaves of `K3Params`."""
    yield from _struct(p.abstract(config), "", "", config)


def _struct(node: Any, path: str, prefix: str, config: K3Config) -> Iterator[Piece]:
    table = _TABLE[type(node)]
    for field in fields(node):
        child, entry = getattr(node, field.name), table[field.name]
        where = f"{path}{field.name}"
        if child is None:
            continue
        if isinstance(entry, _Rule):
            if isinstance(node, p.MLAParams) and field.name == "q" and node.q_down is None:
                entry = _DIRECT_QUERY
            yield from _leaf(child, where, prefix, entry, config)
            continue
        if isinstance(entry, dict):
            entry = entry[type(child)]
        if isinstance(child, tuple):
            for position, item in enumerate(child):
                inner = f"{where}.{position}."
                yield from _struct(item, inner, prefix + entry.format(position), config)
        else:
            yield from _struct(child, f"{where}.", prefix + entry, config)


def _leaf(leaf: Any, path: str, prefix: str, rule: _Rule, config: K3Config) -> Iterator[Piece]:
    arrays: list[tuple[Part, str, Any]] = [("", "", leaf)]
    if isinstance(leaf, QuantArray):
        arrays = [("values", "_packed", leaf.values), ("scales", "_scale", leaf.scales)]
    style = layout(config)
    start = {part: 0 for part, _, _ in arrays}
    stacked = "{}" in rule.names[0]
    for expert in range(leaf.shape[0]) if stacked else (0,):
        for name in rule.names:
            for part, suffix, array in arrays:
                shape = array.shape[1:] if stacked else array.shape
                shape = rule.shape((shape[0] // len(rule.names), *shape[1:]))
                size = math.prod(shape)
                yield Piece(
                    name=prefix + name.format(expert) + suffix,
                    leaf=path,
                    part=part,
                    start=start[part],
                    size=size,
                    shape=_padded(shape, style, config) if rule.padded else shape,
                    float32=style in rule.float32,
                    padded=rule.padded,
                )
                start[part] += size


def _padded(shape: Shape, style: Layout, config: K3Config) -> Shape:
    """A_log as released: K3 pads the heads to `head_dim`, Kimi-Linear keeps broadcast axes."""
    (heads,) = shape
    return (max(heads, config.kda_head_dim),) if style == "k3" else (1, 1, heads, 1)
