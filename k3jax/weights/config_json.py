"""Writes `K3Config` as the released `config.json`, the inverse of `K3Config.from_hf`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from k3jax.config import K3Config, VisionConfig
from k3jax.weights.names import layout

_LATENT_NORM_EPS = 1e-6  # what the released class uses without a field for it


def config_json(config: K3Config, dtype: str = "bfloat16") -> dict[str, Any]:
    """The contents of `config.json` in the layout of the release that `config` belongs to.

    K3's is a wrapper with `text_config` and, with a vision tower, `vision_config`; Kimi-Linear's
    is flat. Raises ValueError naming the field when the format cannot express `config`.
    """
    text = _text(config, dtype)
    data = text if layout(config) == "kimi-linear" else _wrapper(config, text, dtype)
    again = K3Config.from_hf(data)
    for field in fields(K3Config):
        value, read = getattr(config, field.name), getattr(again, field.name)
        if value != read:
            raise ValueError(
                f"config.json cannot express {field.name} = {value!r}: it would be read as {read!r}"
            )
    return data


def _wrapper(config: K3Config, text: dict[str, Any], dtype: str) -> dict[str, Any]:
    data = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        **_token_ids(config),
        "tie_word_embeddings": False,
        "text_config": text,
    }
    if config.vision is not None:
        data |= {
            "ignore_index": -100,
            "image_placeholder": "<|kimi_image_placeholder|>",
            "media_placeholder_token_id": config.vision.media_token_id,
            "vision_config": _vision(config.vision),
        }
    return data


def _token_ids(config: K3Config) -> dict[str, Any]:
    eos = config.eos_token_ids
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
        "pad_token_id": config.pad_token_id,
    }
    return {key: value for key, value in ids.items() if value is not None}


def _text(config: K3Config, dtype: str) -> dict[str, Any]:
    style = layout(config)
    kda = [layer + 1 for layer in config.kda_layers]
    attention: dict[str, Any] = {
        "kda_layers": kda,
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "num_heads": config.kda_num_heads,
        "head_dim": config.kda_head_dim,
        "short_conv_kernel_size": config.kda_conv_size,
    }
    if style == "k3":
        attention |= {
            "gate_lower_bound": config.kda_gate_lower_bound,
            "use_full_rank_gate": config.kda_full_rank_gate,
        }
    data: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        **_token_ids(config),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "linear_attn_config": attention,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_token,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": config.first_dense_layers,
        "moe_layer_freq": config.moe_layer_freq,
        "use_grouped_topk": True,
        "num_expert_group": config.num_expert_groups,
        "topk_group": config.top_expert_groups,
        "moe_router_activation_func": config.router_activation,
        "moe_renormalize": config.router_renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
    }
    if config.latent_norm_eps != _LATENT_NORM_EPS:
        data["latent_norm_eps"] = config.latent_norm_eps
    if style == "kimi-linear":
        return data | {"rope_scaling": None, "model_max_length": config.max_context}
    data |= {
        "max_position_embeddings": config.max_context,
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "mla_use_output_gate": config.mla_output_gate,
        "routed_expert_hidden_size": config.expert_latent_size,
        "latent_moe_use_norm": config.expert_latent_norm,
        "attn_res_block_size": config.attn_res_block_size,
    }
    if config.expert_format == "mxfp4":
        data["quantization_config"] = _mxfp4()
    return data


def _mxfp4() -> dict[str, Any]:
    """compressed-tensors' description of packed MXFP4 on the routed experts alone."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*routed_expert_(down|up)_proj.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
    }


def _vision(vision: VisionConfig) -> dict[str, Any]:
    data: dict[str, Any] = {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": vision.pos_emb_height,
        "init_pos_emb_time": vision.pos_emb_time,
        "init_pos_emb_width": vision.pos_emb_width,
        "linear_bias": False,
        "merge_kernel_size": [vision.merge_size, vision.merge_size],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": vision.hidden_size,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": vision.patch_size,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": vision.projector_ln_eps,
        "qkv_hidden_size": vision.qkv_hidden_size,
        "text_hidden_size": vision.text_hidden_size,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "vt_num_attention_heads": vision.num_heads,
        "vt_num_hidden_layers": vision.num_layers,
    }
    if vision.norm_eps != VisionConfig.norm_eps:
        data["norm_eps"] = vision.norm_eps
    return data
