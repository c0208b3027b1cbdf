"""`config.json` as we write it is read back as the same config."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.config import K3Config, VisionConfig, k3, kimi_linear_48b
from k3jax.weights.config_json import config_json
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY, tiny_config

SMALL = st.integers(1, 7)
EPS = st.sampled_from([1e-6, 1e-5, 0.125])
IDS = st.integers(0, 96)


@st.composite
def configs(draw: st.DrawFn) -> K3Config:
    """Any config that the model code could run."""
    layers = draw(SMALL)
    experts, latent = draw(st.integers(0, 4)), draw(st.none() | SMALL)
    k3_only: dict[str, Any] = {}
    if draw(st.booleans()):
        k3_only = {
            "activation": "situ",
            "situ_beta": draw(st.sampled_from([1.0, 4.0, 0.3])),
            "situ_linear_beta": draw(st.none() | st.sampled_from([1.0, 25.0])),
            "expert_latent_norm": latent is not None and draw(st.booleans()),
            "expert_format": draw(st.sampled_from([None, "mxfp4"])),
            "vision": draw(st.sampled_from([None, vision()])),
        }
    return K3Config(
        vocab_size=97,
        hidden_size=32,
        num_layers=layers,
        intermediate_size=draw(SMALL),
        rms_norm_eps=draw(EPS),
        kda_layers=tuple(sorted(draw(st.sets(st.integers(0, layers - 1))))),
        kda_num_heads=draw(SMALL),
        kda_head_dim=draw(SMALL),
        kda_conv_size=draw(st.integers(2, 5)),
        kda_gate_lower_bound=draw(st.none() | st.sampled_from([-5.0, -0.25])),
        kda_full_rank_gate=draw(st.booleans()),
        num_heads=draw(SMALL),
        q_lora_rank=draw(st.none() | SMALL),
        kv_lora_rank=draw(SMALL),
        qk_nope_head_dim=draw(SMALL),
        qk_rope_head_dim=draw(SMALL),
        v_head_dim=draw(SMALL),
        mla_output_gate=draw(st.booleans()),
        num_experts=2 * experts,
        num_experts_per_token=draw(st.integers(1, experts)) if experts else 1,
        moe_intermediate_size=draw(SMALL) if experts else 1,
        num_shared_experts=draw(st.integers(0, 3)),
        expert_latent_size=latent,
        first_dense_layers=draw(st.integers(0, 3)),
        moe_layer_freq=draw(st.integers(1, 3)),
        num_expert_groups=2 if experts else 1,
        top_expert_groups=1,
        router_activation=draw(st.sampled_from(["sigmoid", "softmax"])),
        router_renormalize=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.446])),
        attn_res_block_size=draw(st.none() | SMALL),
        max_context=draw(SMALL),
        bos_token_id=draw(st.none() | IDS),
        eos_token_ids=tuple(draw(st.lists(IDS, max_size=3))),
        pad_token_id=draw(st.none() | IDS),
        latent_norm_eps=draw(EPS),
        **{
            "activation": "silu",
            "situ_beta": 1.0,
            "situ_linear_beta": None,
            "expert_latent_norm": False,
            "expert_format": None,
            **k3_only,
        },
    )


def vision() -> VisionConfig:
    released = k3().vision
    assert released is not None
    return replace(released, text_hidden_size=32, norm_eps=0.25, merge_size=3, media_token_id=5)


@given(configs())
def test_any_config_survives(config: K3Config):
    written = json.loads(json.dumps(config_json(config)))

    assert K3Config.from_hf(written) == config


@pytest.mark.parametrize("config", [k3(), kimi_linear_48b()])
def test_presets_survive(config: K3Config):
    assert K3Config.from_hf(config_json(config)) == config


@pytest.mark.parametrize("folder", [K3_TINY, KIMI_LINEAR_TINY])
def test_released_fields_are_written_as_released(folder):
    released = json.loads((folder / "config.json").read_text())
    written = config_json(K3Config.from_hf(folder))

    differing = {
        key
        for key in written.keys() & released.keys()
        if written[key] != released[key] and not isinstance(written[key], dict)
    }
    assert differing == set()
    assert written[
        "linear_attn_config" if folder == KIMI_LINEAR_TINY else "vision_config"
    ].items() <= (
        released["linear_attn_config" if folder == KIMI_LINEAR_TINY else "vision_config"].items()
    )


def test_what_the_format_cannot_express_is_named():
    silent = replace(kimi_linear_48b(), situ_beta=3.0)
    with pytest.raises(ValueError, match=r"cannot express situ_beta = 3.0: .* read as 1.0"):
        config_json(silent)
    dense = replace(tiny_config(), num_experts=0, num_experts_per_token=2)
    with pytest.raises(ValueError, match="cannot express num_experts_per_token = 2"):
        config_json(dense)
