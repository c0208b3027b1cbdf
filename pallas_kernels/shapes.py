"""The shapes of a model as its kernels see them, and the named ones that everything is tried on."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Everything about a model that decides which kernels fit it."""

    hidden: int
    kda_heads: int
    kda_head: int
    """Key channels of a KDA head, and as many value channels."""
    conv_taps: int
    mla_heads: int
    latent: int
    """Width of the cached latent without the key part that all heads share."""
    shared_key: int
    head_key: int
    head_value: int
    experts: int
    """0 for a dense model."""
    choices: int
    """Experts per token."""
    expert_in: int
    expert_width: int
    expert_format: str | None
    """"mxfp4", "int8", or None for plain floats."""
    activation_dtype: str
    page_size: int
    """Positions of a latent page."""

    @classmethod
    def of(cls, config: Any, activation_dtype: str, page_size: int) -> "ModelShape":
        """The shapes of a model whose configuration has the fields of `k3jax.config.K3Config`."""
        return cls(
            hidden=config.hidden_size,
            kda_heads=config.kda_num_heads,
            kda_head=config.kda_head_dim,
            conv_taps=config.kda_conv_size,
            mla_heads=config.num_heads,
            latent=config.kv_lora_rank,
            shared_key=config.qk_rope_head_dim,
            head_key=config.qk_nope_head_dim,
            head_value=config.v_head_dim,
            experts=config.num_experts,
            choices=config.num_experts_per_token,
            expert_in=config.expert_width,
            expert_width=config.moe_intermediate_size,
            expert_format=config.expert_format,
            activation_dtype=activation_dtype,
            page_size=page_size,
        )

    def with_experts(self, expert_format: str | None) -> "ModelShape":
        """The same with experts stored otherwise: "mxfp4", "int8", or None for plain floats."""
        return dataclasses.replace(self, expert_format=expert_format)


K3 = ModelShape(
    hidden=7168,
    kda_heads=96,
    kda_head=128,
    conv_taps=4,
    mla_heads=96,
    latent=512,
    shared_key=64,
    head_key=128,
    head_value=128,
    experts=896,
    choices=16,
    expert_in=3584,
    expert_width=3072,
    expert_format="mxfp4",
    activation_dtype="bfloat16",
    page_size=64,
)

KIMI_LINEAR = dataclasses.replace(
    K3,
    hidden=2304,
    kda_heads=32,
    mla_heads=32,
    experts=256,
    choices=8,
    expert_in=2304,
    expert_width=1024,
    expert_format=None,
)

K3_NANO = dataclasses.replace(
    K3,
    hidden=192,
    kda_heads=3,
    kda_head=64,
    mla_heads=4,
    latent=64,
    shared_key=16,
    head_key=32,
    head_value=32,
    experts=8,
    choices=2,
    expert_in=96,
    expert_width=64,
)

# What the interpreter can run in seconds, with every feature that the kernels have.
SMALL = dataclasses.replace(
    K3,
    hidden=128,
    kda_heads=3,
    kda_head=64,
    mla_heads=5,
    latent=128,
    shared_key=64,
    head_key=32,
    head_value=32,
    experts=5,
    choices=2,
    expert_in=128,
    expert_width=128,
    page_size=16,
)

NAMED = {"k3": K3, "kimi-linear": KIMI_LINEAR, "k3-nano": K3_NANO, "small": SMALL}

DECODE_ROWS = (1, 16, 64)
"""Batch sizes that decode kernels are compiled, timed and floored at."""
