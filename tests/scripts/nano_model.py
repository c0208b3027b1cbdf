"""The bundled tokenizer, and a model of k3-nano's kind that compiles in seconds."""

import copy
from pathlib import Path

from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from scripts.nano import shape
from scripts.nano.objective import trainable

MODEL = Path(__file__).parents[2] / "k3jax" / "models" / "k3-nano"


def nano_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(MODEL)


def small_config() -> K3Config:
    data = copy.deepcopy(shape.config_json())
    data["text_config"] |= {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    data["text_config"]["linear_attn_config"] |= {"num_heads": 2, "head_dim": 16}
    return trainable(K3Config.from_hf(data))
