"""Written folders are the released ones, byte for byte, and complete or absent."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from k3jax.config import K3Config
from k3jax.model.params import K3Params, MoEParams
from k3jax.quant import QuantArray, dequantize, quantize
from k3jax.weights import load_hf, save_hf
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY, tiny_config
from tests.weights.folders import INDEX, tensors_of
from tests.weights.trees import Unreadable, equal, random_params

GOLDENS = [K3_TINY, KIMI_LINEAR_TINY]
PLAIN = K3Config.from_hf(KIMI_LINEAR_TINY)


@pytest.mark.parametrize("folder", GOLDENS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_and_saving_gives_the_same_file(tmp_path: Path, folder: Path, dtype: str):
    config = K3Config.from_hf(folder)
    save_hf(load_hf(folder, dtype=dtype), config, tmp_path / "again")

    original = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == original
    assert K3Config.from_hf(tmp_path / "again") == config


@pytest.mark.parametrize("folder", GOLDENS)
@pytest.mark.parametrize("limit", [1, 100_000, 1_000_003])
def test_several_files_hold_the_same_tensors(tmp_path: Path, folder: Path, limit: int):
    params, config = load_hf(folder), K3Config.from_hf(folder)
    save_hf(params, config, tmp_path / "split", max_shard_bytes=limit)
    expected = tensors_of(folder)
    index = json.loads((tmp_path / "split" / INDEX).read_text())
    found = {}
    for file in (tmp_path / "split").glob("*.safetensors"):
        with safe_open(file, "numpy") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        found |= tensors

    assert found.keys() == index["weight_map"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tobytes() == tensor.tobytes()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    assert equal(load_hf(tmp_path / "split"), params)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        replace(tiny_config(), kda_num_heads=5, kda_head_dim=4),  # more heads than A_log's padding
        replace(tiny_config(), num_layers=1, kda_layers=(), first_dense_layers=0),
        replace(tiny_config(), kda_full_rank_gate=False, expert_latent_norm=False),
        replace(tiny_config(), num_shared_experts=0, q_lora_rank=None, mla_output_gate=False),
        replace(tiny_config(), expert_latent_size=None, expert_latent_norm=False),
        replace(tiny_config(), first_dense_layers=2, attn_res_block_size=None, expert_format=None),
        replace(tiny_config(), num_experts=0, num_experts_per_token=1, moe_intermediate_size=1),
        replace(tiny_config(), num_experts=1, num_experts_per_token=1),
        replace(PLAIN, kda_num_heads=1, num_heads=7, kda_conv_size=3),
    ],
)
def test_what_is_representable_survives_bit_for_bit(tmp_path: Path, config: K3Config):
    params = random_params(config)
    save_hf(params, config, tmp_path / "model")

    assert K3Config.from_hf(tmp_path / "model") == config
    assert equal(load_hf(tmp_path / "model"), params)


@pytest.mark.parametrize("config", [tiny_config(), PLAIN])
def test_float32_survives_in_float32(tmp_path: Path, config: K3Config):
    params = random_params(config, as_stored=False)
    save_hf(params, config, tmp_path / "model", dtype=jnp.float32)

    assert equal(load_hf(tmp_path / "model"), params)


def test_what_the_maths_needs_in_float32_is_stored_in_float32(tmp_path: Path):
    save_hf(random_params(tiny_config()), tiny_config(), tmp_path / "model")
    kept = {
        n.split(".", 4)[-1] for n, t in tensors_of(tmp_path / "model").items() if t.dtype == "f4"
    }

    names = ["A_log", "dt_bias", "o_norm.weight"] + [f"{s}_conv1d.weight" for s in "qkv"]
    bias = "block_sparse_moe.gate.e_score_correction_bias"
    assert kept == {f"self_attn.{name}" for name in names} | {bias}


def test_a_log_is_padded_with_zeros(tmp_path: Path):
    params = random_params(tiny_config())
    save_hf(params, tiny_config(), tmp_path / "model")
    stored = tensors_of(tmp_path / "model")["language_model.model.layers.2.self_attn.A_log"]

    heads = np.asarray(params.layers[2].mixer.decay_log_scale)  # type: ignore[union-attr]
    assert stored.shape == (tiny_config().kda_head_dim,)
    np.testing.assert_array_equal(stored, np.pad(heads, (0, stored.size - heads.size)))


def test_float_experts_are_quantised_when_the_config_says_mxfp4(tmp_path: Path):
    config = tiny_config()
    floats = random_floats(config)
    save_hf(floats, config, tmp_path / "model")
    expected, actual = moe(floats), moe(load_hf(tmp_path / "model"))

    for name in ("gate_up", "down"):
        packed = getattr(actual, name)
        assert isinstance(packed, QuantArray)
        np.testing.assert_array_equal(
            dequantize(packed), dequantize(quantize(getattr(expected, name), "mxfp4"))
        )


def test_dequantised_experts_can_be_published_plain(tmp_path: Path):
    floats = load_hf(K3_TINY, dequantize_experts=True)
    plain = replace(K3Config.from_hf(K3_TINY), expert_format=None)
    save_hf(floats, plain, tmp_path / "model")

    assert equal(load_hf(tmp_path / "model"), floats)


def random_floats(config: K3Config) -> K3Params:
    return random_params(replace(config, expert_format=None), seed=5)


def moe(params: K3Params) -> MoEParams:
    ffn = params.layers[2].ffn
    assert isinstance(ffn, MoEParams)
    return ffn


def with_embed(leaf) -> K3Params:
    return random_params(tiny_config()).replace(embed=leaf)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (with_embed(jnp.zeros((96, 32))), "parameter embed has shape (96, 32), the config implies"),
        (with_embed(jnp.zeros((97, 32), jnp.int32)), "parameter embed has dtype int32"),
        (
            with_embed(quantize(jnp.zeros((97, 32)), "int8")),
            "parameter embed is quantised to int8, the config stores it as plain floats",
        ),
        (
            random_params(tiny_config()).replace(final_mix=None),
            "the parameters lack final_mix.norm, unlike the config",
        ),
        (
            random_params(replace(tiny_config(), num_layers=5)),
            "the parameters have layers.4",
        ),
    ],
)
def test_parameters_that_are_not_the_configs_are_refused(
    tmp_path: Path, params: K3Params, expected: str
):
    with pytest.raises(ValueError) as caught:
        save_hf(params, tiny_config(), tmp_path / "model")

    assert expected in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_int8_experts_are_refused_where_the_config_says_mxfp4(tmp_path: Path):
    params = random_floats(tiny_config())
    params = jax.tree.map(lambda a: quantize(a, "int8") if a.ndim == 3 else a, params)

    with pytest.raises(ValueError, match="is quantised to int8, the config stores it in mxfp4"):
        save_hf(params, tiny_config(), tmp_path / "model")


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_leaves_nothing_behind(tmp_path: Path, exists: bool):
    target = tmp_path / "model"
    if exists:
        target.mkdir()
        (target / "tiktoken.model").write_text("kept")
    params = random_params(tiny_config())
    broken = jax.tree.map(np.asarray, params)
    broken = broken.replace(final_norm=Unreadable(broken.final_norm))

    with pytest.raises(OSError, match="disk"):
        save_hf(broken, tiny_config(), target, max_shard_bytes=10_000)
    assert [path.name for path in tmp_path.rglob("*")] == (
        ["model", "tiktoken.model"] if exists else []
    )


def test_a_model_is_only_overwritten_when_asked_for(tmp_path: Path):
    target = shutil.copytree(K3_TINY, tmp_path / "model")
    first, second = random_params(tiny_config(), 1), random_params(tiny_config(), 2)
    with pytest.raises(ValueError, match="already holds a model"):
        save_hf(first, tiny_config(), target)
    assert K3Config.from_hf(target) == K3Config.from_hf(K3_TINY)

    save_hf(first, tiny_config(), target, overwrite=True, max_shard_bytes=10_000)
    assert equal(load_hf(target), first)
    save_hf(second, tiny_config(), target, overwrite=True)
    assert equal(load_hf(target), second)
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        "sensitivity.json",
        "text.npz",
        "vision.npz",
    ]


def test_a_file_in_the_way_is_refused(tmp_path: Path):
    (tmp_path / "model").touch()

    with pytest.raises(ValueError, match="is a file"):
        save_hf(random_params(tiny_config()), tiny_config(), tmp_path / "model")
