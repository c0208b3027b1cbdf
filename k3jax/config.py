"""Model configuration, read from the released `config.json` and checked first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["kda", "mla"]


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-3d tower and patch-merger projector (released `vision_config`)."""

    hidden_size: int
    qkv_hidden_size: int
    num_heads: int
    num_layers: int
    intermediate_size: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    merge_size: int
    projector_ln_eps: float
    text_hidden_size: int
    media_token_id: int
    norm_eps: float = 1.1920929e-7

    @property
    def head_dim(self) -> int:
        """Width of one attention head of the tower."""
        return self.qkv_hidden_size // self.num_heads


@dataclass(frozen=True)
class K3Config:
    """Everything that decides the maths and the parameter shapes of a Kimi K3 or Kimi-Linear model.

    Layer indices are 0-based here; the released files list `kda_layers` 1-based.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    rms_norm_eps: float
    activation: Literal["situ", "silu"]
    situ_beta: float
    """Cap of the gate branch of SiTU."""
    situ_linear_beta: float | None
    """Cap of the up branch of SiTU; None leaves it alone."""

    kda_layers: tuple[int, ...]
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_size: int
    kda_gate_lower_bound: float | None
    """Lower bound of the log decay (K3); None selects the softplus gate (Kimi-Linear)."""
    kda_full_rank_gate: bool

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool

    num_experts: int
    """0 means every layer is dense."""
    num_experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    """Width multiplier of the one shared MLP; 0 means there is none."""
    expert_latent_size: int | None
    """Width the routed experts work at; None means `hidden_size` without latent projections."""
    expert_latent_norm: bool
    first_dense_layers: int
    moe_layer_freq: int
    num_expert_groups: int
    top_expert_groups: int
    router_activation: Literal["sigmoid", "softmax"]
    router_renormalize: bool
    routed_scaling_factor: float
    expert_format: Literal["mxfp4"] | None
    """How the checkpoint stores routed experts; None means plain floats."""

    attn_res_block_size: int | None
    """Layers per depth block; None means ordinary residuals."""

    max_context: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    latent_norm_eps: float = 1e-6
    """Epsilon of `q_a_layernorm` and `kv_a_layernorm`: the class default of the released code."""
    vision: VisionConfig | None = None

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The token mixer of each layer."""
        kda = set(self.kda_layers)
        return tuple("kda" if layer in kda else "mla" for layer in range(self.num_layers))

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers."""
        kda = set(self.kda_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in kda)

    @property
    def latent_width(self) -> int:
        """Values cached per token by one MLA layer: the latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """Input and output width of the routed experts."""
        return self.expert_latent_size or self.hidden_size

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has routed experts instead of a dense MLP."""
        return (
            self.num_experts > 0
            and layer >= self.first_dense_layers
            and layer % self.moe_layer_freq == 0
        )

    def starts_depth_block(self, layer: int) -> bool:
        """Whether Attention Residuals snapshot the running sum at this layer."""
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> K3Config:
        """Read a released config: a folder, a `config.json` path, or its parsed contents.

        Accepts the K3 wrapper (`model_type: kimi_k3`) and the flat Kimi-Linear file.
        Raises FileNotFoundError without a config, and ValueError naming the field that is missing,
        contradictory, unsupported, or unknown (an unknown field could change the maths).
        """
        from k3jax.hf_config import parse_config

        return parse_config(load_config_json(source))


def load_config_json(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The parsed `config.json` of a folder, a path to the file, or a mapping as it is."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json at {path}; expected a released Kimi model folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def k3() -> K3Config:
    """The released 2.8-trillion-parameter Kimi K3."""
    mla = {*range(3, 92, 4), 92}
    return K3Config(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        intermediate_size=33792,
        rms_norm_eps=1e-5,
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        kda_layers=tuple(layer for layer in range(93) if layer not in mla),
        kda_num_heads=96,
        kda_head_dim=128,
        kda_conv_size=4,
        kda_gate_lower_bound=-5.0,
        kda_full_rank_gate=True,
        num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_output_gate=True,
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        num_shared_experts=2,
        expert_latent_size=3584,
        expert_latent_norm=True,
        first_dense_layers=1,
        moe_layer_freq=1,
        num_expert_groups=1,
        top_expert_groups=1,
        router_activation="sigmoid",
        router_renormalize=True,
        routed_scaling_factor=1.0,
        expert_format="mxfp4",
        attn_res_block_size=12,
        max_context=1048576,
        bos_token_id=163584,
        eos_token_ids=(163586,),
        pad_token_id=163839,
        vision=VisionConfig(
            hidden_size=1024,
            qkv_hidden_size=1536,
            num_heads=12,
            num_layers=27,
            intermediate_size=4096,
            patch_size=14,
            pos_emb_height=64,
            pos_emb_width=64,
            pos_emb_time=4,
            merge_size=2,
            projector_ln_eps=1e-5,
            text_hidden_size=7168,
            media_token_id=163605,
        ),
    )


def kimi_linear_48b() -> K3Config:
    """The released Kimi-Linear-48B-A3B."""
    mla = {3, 7, 11, 15, 19, 23, 26}
    return K3Config(
        vocab_size=163840,
        hidden_size=2304,
        num_layers=27,
        intermediate_size=9216,
        rms_norm_eps=1e-5,
        activation="silu",
        situ_beta=1.0,
        situ_linear_beta=None,
        kda_layers=tuple(layer for layer in range(27) if layer not in mla),
        kda_num_heads=32,
        kda_head_dim=128,
        kda_conv_size=4,
        kda_gate_lower_bound=None,
        kda_full_rank_gate=False,
        num_heads=32,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_output_gate=False,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
        num_shared_experts=1,
        expert_latent_size=None,
        expert_latent_norm=False,
        first_dense_layers=1,
        moe_layer_freq=1,
        num_expert_groups=1,
        top_expert_groups=1,
        router_activation="sigmoid",
        router_renormalize=True,
        routed_scaling_factor=2.446,
        expert_format=None,
        attn_res_block_size=None,
        max_context=1048576,
        bos_token_id=163584,
        eos_token_ids=(163586,),
        pad_token_id=163839,
    )
