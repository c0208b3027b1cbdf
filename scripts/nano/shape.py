"""The size of k3-nano, as a `config.json` in the released wrapper form."""

from typing import Any

from k3jax.chat.vocabulary import NUM_SPECIAL

NUM_BASE = 1856
"""BPE ranks; with the markers the vocabulary is 33 · 64 wide."""

CONTEXT = 8192


def config_json() -> dict[str, Any]:
    """The whole file: every K3 feature, six layers, three depth blocks, experts in MXFP4."""
    special = {
        "bos_token_id": NUM_BASE,
        "eos_token_id": NUM_BASE + 2,
        "pad_token_id": NUM_BASE + NUM_SPECIAL - 1,
    }
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": NUM_BASE + NUM_SPECIAL,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 96,
        "latent_moe_use_norm": True,
        "routed_scaling_factor": 1.0,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "attn_res_block_size": 2,
        "max_position_embeddings": CONTEXT,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "full_attn_layers": [3, 5, 6],
            "kda_layers": [1, 2, 4],
            "gate_lower_bound": -5.0,
            "head_dim": 64,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        **special,
        "quantization_config": _quantization(),
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **special,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def _quantization() -> dict[str, Any]:
    """The released block: routed experts in groups of 32 four-bit floats, all else as it is."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
