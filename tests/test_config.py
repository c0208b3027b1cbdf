"""Released configs are read completely; what could change the maths unnoticed is refused."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from k3jax.config import K3Config, k3, kimi_linear_48b
from k3jax.model.params import abstract, count, nbytes
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY
from tests.released_configs import GROUP, RELEASED_K3, RELEASED_KIMI_LINEAR, RELEASED_TEXT


def k3_with(path: str, value: Any) -> dict[str, Any]:
    """The K3 file with one field set (`...` removes it); `path` is dotted, from the top."""
    data = copy.deepcopy(RELEASED_K3)
    *parents, key = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return data


def error_of(data: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        K3Config.from_hf(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("released", "preset"), [(RELEASED_K3, k3()), (RELEASED_KIMI_LINEAR, kimi_linear_48b())]
)
def test_preset_is_what_the_released_file_says(released: dict[str, Any], preset: K3Config):
    assert K3Config.from_hf(released) == preset
    assert hash(preset) == hash(K3Config.from_hf(released))


def test_presets_have_the_released_layer_pattern():
    assert k3().mla_layers == (*range(3, 92, 4), 92)
    assert kimi_linear_48b().mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert [layer for layer in range(93) if not k3().is_sparse(layer)] == [0]
    assert [layer for layer in range(93) if k3().starts_depth_block(layer)] == [*range(0, 93, 12)]


def test_k3_has_the_weights_and_bytes_of_the_release():
    params = abstract(k3(), jnp.bfloat16)
    padding = 69 * 32 * 4  # of A_log, in each KDA layer

    assert count(params) == 2_779_931_834_976
    assert nbytes(params) == 1_560_860_324_864 - padding


def test_kimi_linear_has_the_weights_and_bytes_of_the_release():
    params = abstract(kimi_linear_48b(), jnp.bfloat16)
    narrower = 20 * (3 * 4096 * 4 + 128) + 26 * 256  # conv, o_norm and score bias are bf16 there

    assert count(params) == 49_122_681_728
    assert nbytes(params) - 2 * narrower == 98_245_528_576


def test_golden_configs_are_read():
    tiny, linear = K3Config.from_hf(K3_TINY), K3Config.from_hf(str(KIMI_LINEAR_TINY))

    assert tiny.layer_kinds == ("kda", "kda", "kda", "mla", "kda", "kda", "mla", "mla")
    assert (tiny.expert_format, tiny.max_context, tiny.eos_token_ids) == ("mxfp4", 4096, (370,))
    assert tiny.vision is not None and tiny.vision.media_token_id == 373
    assert linear.layer_kinds == ("kda", "kda", "kda", "mla", "kda", "mla")
    assert (linear.expert_format, linear.vision, linear.q_lora_rank) == (None, None, None)


def test_folder_file_and_mapping_are_the_same(tmp_path: Path):
    data = json.loads((K3_TINY / "config.json").read_text())

    assert K3Config.from_hf(data) == K3Config.from_hf(K3_TINY)
    assert K3Config.from_hf(K3_TINY / "config.json") == K3Config.from_hf(K3_TINY)


@pytest.mark.parametrize("place", ["text_config.", ""])
def test_quantisation_may_be_described_in_either_place(place: str):
    data = k3_with("text_config.quantization_config", ...)
    assert K3Config.from_hf(data).expert_format is None

    where = data["text_config"] if place else data
    where["quantization_config"] = RELEASED_TEXT["quantization_config"]
    assert K3Config.from_hf(data) == k3()


@pytest.mark.parametrize("place", ["text_config.", ""])
def test_token_ids_may_be_in_either_place(place: str):
    data = k3_with("text_config.eos_token_id", ...)
    data = data | {"text_config": dict(data["text_config"])}
    (data["text_config"] if place else data)["eos_token_id"] = [163586, 5]

    assert K3Config.from_hf(data).eos_token_ids == (163586, 5)


@pytest.mark.parametrize(
    ("path", "value", "field", "read"),
    [
        ("text_config.activation_situ_beta", None, "situ_beta", 1.0),
        ("text_config.activation_situ_beta", 0, "situ_beta", 1.0),
        ("text_config.activation_situ_linear_beta", None, "situ_linear_beta", None),
        ("text_config.linear_attn_config.gate_lower_bound", ..., "kda_gate_lower_bound", None),
        ("text_config.linear_attn_config.use_full_rank_gate", ..., "kda_full_rank_gate", False),
        ("text_config.mla_use_output_gate", ..., "mla_output_gate", False),
        ("text_config.moe_renormalize", ..., "router_renormalize", True),
        ("text_config.routed_scaling_factor", 2, "routed_scaling_factor", 2.0),
        ("text_config.moe_router_activation_func", "softmax", "router_activation", "softmax"),
        ("text_config.model_max_length", 4096, "max_context", 4096),
        ("text_config.attn_res_block_size", None, "attn_res_block_size", None),
        ("text_config.eos_token_id", ..., "eos_token_ids", ()),
        ("text_config.latent_norm_eps", 1e-5, "latent_norm_eps", 1e-5),
        ("vision_config", ..., "vision", None),
    ],
)
def test_optional_field_is_read_or_defaulted(path: str, value: Any, field: str, read: Any):
    assert getattr(K3Config.from_hf(k3_with(path, value)), field) == read


TEXT_FIELDS = """
    vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads hidden_act
    rms_norm_eps kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_attn_config
    num_experts_per_token moe_intermediate_size max_position_embeddings
"""
ATTENTION_FIELDS = "num_heads head_dim short_conv_kernel_size kda_layers full_attn_layers"
VISION_FIELDS = """
    vt_hidden_size qkv_hidden_size vt_num_attention_heads vt_num_hidden_layers vt_intermediate_size
    patch_size init_pos_emb_height init_pos_emb_width init_pos_emb_time merge_kernel_size
    text_hidden_size
"""


@pytest.mark.parametrize(
    "path",
    [
        "media_placeholder_token_id",
        *(f"text_config.{name}" for name in TEXT_FIELDS.split()),
        *(f"text_config.linear_attn_config.{name}" for name in ATTENTION_FIELDS.split()),
        *(f"vision_config.{name}" for name in VISION_FIELDS.split()),
    ],
)
@pytest.mark.parametrize("absent", [..., None])
def test_missing_field_is_named(path: str, absent: Any):
    assert error_of(k3_with(path, absent)) == f"config: missing field {path}"


@pytest.mark.parametrize(
    "path",
    [
        "attention_bias",
        "text_config.partial_rotary_factor",
        "text_config.linear_attn_config.num_v_heads",
        "vision_config.vt_rope_theta",
    ],
)
def test_unknown_field_is_named(path: str):
    assert f"unknown field {path} = 3" in error_of(k3_with(path, 3))


WRONG: list[tuple[str, Any]] = [
    ("model_type", "kimi_k2"),
    ("tie_word_embeddings", True),
    ("media_placeholder_token_id", "163605"),
    ("text_config.model_type", "deepseek_v3"),
    ("text_config.vocab_size", 0),
    ("text_config.vocab_size", True),
    ("text_config.vocab_size", 163840.0),
    ("text_config.vocab_size", "163840"),
    ("text_config.hidden_size", -7168),
    ("text_config.hidden_act", "gelu"),
    ("text_config.hidden_act", ["situ"]),
    ("text_config.activation_situ_beta", "4"),
    ("text_config.activation_situ_beta", True),
    ("text_config.activation_situ_beta", -1.0),
    ("text_config.activation_situ_linear_beta", 0),
    ("text_config.activation_situ_linear_beta", [25]),
    ("text_config.rms_norm_eps", float("nan")),
    ("text_config.rms_norm_eps", 0),
    ("text_config.rms_norm_eps", "1e-5"),
    ("text_config.routed_scaling_factor", float("inf")),
    ("text_config.routed_scaling_factor", 10**400),
    ("text_config.num_key_value_heads", 8),
    ("text_config.q_lora_rank", 0),
    ("text_config.mla_use_nope", False),
    ("text_config.mla_use_output_gate", 1),
    ("text_config.rope_scaling", {"type": "yarn"}),
    ("text_config.num_nextn_predict_layers", 1),
    ("text_config.topk_method", "greedy"),
    ("text_config.moe_router_activation_func", "relu"),
    ("text_config.num_experts_per_token", 897),
    ("text_config.num_expert_group", 3),
    ("text_config.topk_group", 2),
    ("text_config.num_shared_experts", -1),
    ("text_config.moe_layer_freq", 0),
    ("text_config.routed_expert_hidden_size", "3584"),
    ("text_config.attn_res_block_size", 0),
    ("text_config.max_position_embeddings", 0),
    ("text_config.linear_attn_config", [1, 2]),
    ("text_config.linear_attn_config.head_dim", 0),
    ("text_config.linear_attn_config.short_conv_kernel_size", 1),
    ("text_config.linear_attn_config.gate_lower_bound", 5.0),
    ("text_config.linear_attn_config.gate_lower_bound", "-5"),
    ("text_config.linear_attn_config.use_full_rank_gate", "yes"),
    ("text_config.linear_attn_config.kda_layers", 5),
    ("text_config.linear_attn_config.kda_layers", [0, 1]),
    ("text_config.linear_attn_config.kda_layers", [1, 94]),
    ("text_config.linear_attn_config.kda_layers", [1, 1]),
    ("text_config.linear_attn_config.kda_layers", [True, 2]),
    ("text_config.linear_attn_config.kda_layers", [[1], 2]),
    ("text_config.linear_attn_config.full_attn_layers", "4"),
    ("vision_config", 3),
    ("vision_config.attn_bias", True),
    ("vision_config.merge_type", "mean"),
    ("vision_config.merge_kernel_size", 2),
    ("vision_config.merge_kernel_size", [2, 3]),
    ("vision_config.merge_kernel_size", [2.0, 2.0]),
    ("vision_config.merge_kernel_size", [0, 0]),
    ("vision_config.mm_hidden_size", 512),
    ("vision_config.qkv_hidden_size", 1530),
    ("vision_config.projector_ln_eps", -1e-5),
    ("vision_config.text_hidden_size", 4096),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_unsupported_value_is_named(path: str, value: Any):
    assert f"config: {path} = " in error_of(k3_with(path, value))


@pytest.mark.parametrize("value", [-1, 163840, True, "163586", 1.0, [163586, -1], [[1]]])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_impossible_token_id_is_named(key: str, value: Any):
    assert f"config: {key} = " in error_of(k3_with(f"text_config.{key}", value))


QUANTIZATION = "text_config.quantization_config"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (QUANTIZATION, "mxfp4", "quantization_config.format"),
        (f"{QUANTIZATION}.format", "nvfp4-pack-quantized", "quantization_config.format"),
        (f"{QUANTIZATION}.kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        (f"{QUANTIZATION}.config_groups", [GROUP], "quantization_config.config_groups"),
        (f"{QUANTIZATION}.config_groups.group_0", 4, "config_groups.group_0"),
        (f"{QUANTIZATION}.config_groups.group_0.weights", [4], "config_groups.group_0"),
        (f"{QUANTIZATION}.config_groups.group_0.weights.num_bits", 8, "weights.num_bits"),
        (f"{QUANTIZATION}.config_groups.group_0.weights.group_size", 16, "weights.group_size"),
        (f"{QUANTIZATION}.config_groups.group_0.weights.type", "int", "weights.type"),
        (f"{QUANTIZATION}.config_groups.group_0.input_activations", {}, "input_activations"),
    ],
)
def test_other_quantisation_is_named(path: str, value: Any, named: str):
    assert named in error_of(k3_with(path, value))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda d: d["text_config"]["linear_attn_config"]["kda_layers"].append(4),
            "layer 4 is in both text_config.linear_attn_config.kda_layers and",
        ),
        (
            lambda d: d["text_config"]["linear_attn_config"]["kda_layers"].remove(2),
            "layer 2 is in neither text_config.linear_attn_config.kda_layers nor",
        ),
        (lambda d: d.update(vocab_size=5), "vocab_size = 5 contradicts text_config.vocab_size"),
        (
            lambda d: d.update(eos_token_id=7),
            "eos_token_id = 7 contradicts text_config.eos_token_id = 163586",
        ),
        (
            lambda d: d.update(quantization_config={"format": "fp8"}),
            "quantization_config = {'format': 'fp8'} contradicts text_config.quantization_config",
        ),
        (
            lambda d: d["text_config"].update(routed_expert_hidden_size=None),
            "text_config.latent_moe_use_norm = True, needs routed_expert_hidden_size",
        ),
        (
            lambda d: d["text_config"].update(
                num_expert_group=112, topk_group=1, num_experts_per_token=16
            ),
            "text_config.topk_group = 1, leaves fewer experts than 16 per token",
        ),
    ],
)
def test_contradiction_is_named(change: Callable[[dict[str, Any]], object], expected: str):
    data = copy.deepcopy(RELEASED_K3)
    change(data)

    assert expected in error_of(data)


def test_flat_file_is_checked_like_the_wrapper():
    missing = {k: v for k, v in RELEASED_KIMI_LINEAR.items() if k != "kv_lora_rank"}

    assert error_of(missing) == "config: missing field kv_lora_rank"
    assert "unknown field mtp_layers = 1" in error_of(RELEASED_KIMI_LINEAR | {"mtp_layers": 1})
    assert "tie_word_embeddings = True" in error_of(
        RELEASED_KIMI_LINEAR | {"tie_word_embeddings": True}
    )
    assert "model_type = 'llama'" in error_of(RELEASED_KIMI_LINEAR | {"model_type": "llama"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
    ],
)
def test_file_that_is_no_object_is_named(tmp_path: Path, content: bytes, expected: str):
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ValueError, match=expected) as caught:
        K3Config.from_hf(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_folder_without_config_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=f"no config.json at {tmp_path}"):
        K3Config.from_hf(tmp_path)


def test_experts_that_cannot_be_packed_are_refused():
    odd = K3Config.from_hf(k3_with("text_config.moe_intermediate_size", 3071))

    with pytest.raises(ValueError, match="multiples of 32, got 3071"):
        abstract(odd)
