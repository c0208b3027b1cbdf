"""Small things that many tests need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from k3jax.config import K3Config

GOLDEN = Path(__file__).parent / "golden"
K3_TINY = GOLDEN / "k3-tiny"
KIMI_LINEAR_TINY = GOLDEN / "kimi-linear-tiny"


def tiny_config() -> K3Config:
    """Four layers with every kind of sublayer, small enough to compile in seconds."""
    return replace(
        K3Config.from_hf(K3_TINY),
        vocab_size=97,
        hidden_size=32,
        num_layers=4,
        kda_layers=(0, 2),
        kda_num_heads=3,
        num_heads=3,
        intermediate_size=48,
        attn_res_block_size=2,
        num_experts=4,
        moe_intermediate_size=32,
        expert_latent_size=32,
        eos_token_ids=(90,),
        bos_token_id=None,
        pad_token_id=None,
        max_context=256,
        vision=None,
    )


def wider_config(**changes: Any) -> K3Config:
    """`tiny_config` with matrices large enough to be told from activations in a program."""
    sizes = {
        "hidden_size": 256,
        "kda_num_heads": 2,
        "kda_head_dim": 64,
        "expert_latent_size": 256,
        "moe_intermediate_size": 256,
    }
    return replace(tiny_config(), **{**sizes, **changes})
