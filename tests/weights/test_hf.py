"""Loading released folders: every leaf holds the right tensors, in little memory."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.model.params import KDAParams, MLAParams, MLPParams, MoEParams, abstract, nbytes
from k3jax.quant import QuantArray
from k3jax.weights import load_hf, save_hf
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY, tiny_config
from tests.weights.folders import folder_of, sharded, tensors_of
from tests.weights.trees import all_dequantized, equal

GOLDENS = [K3_TINY, KIMI_LINEAR_TINY]
HEADS, KEY = 4, 16  # of both golden models


class Stored:
    """The tensors of one module by suffix, as float32 (packed bytes as they are)."""

    def __init__(self, folder: Path, prefix: str = ""):
        tensors = tensors_of(folder)
        self.tensors = {name.removeprefix("language_model."): t for name, t in tensors.items()}
        self.prefix = prefix

    def __call__(self, *names: str) -> np.ndarray:
        found = [self.tensors[self.prefix + name] for name in names]
        joined = np.concatenate(found)
        return joined if joined.dtype == np.uint8 else joined.astype(np.float32)

    def within(self, prefix: str) -> "Stored":
        inner = object.__new__(Stored)
        inner.tensors, inner.prefix = self.tensors, self.prefix + prefix
        return inner


def same(actual, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(actual), expected)


@pytest.mark.parametrize("folder", GOLDENS)
def test_kda_leaves_hold_the_stacked_tensors(folder: Path):
    params = load_hf(folder).layers[1].mixer
    w = Stored(folder, "model.layers.1.self_attn.")
    assert isinstance(params, KDAParams)

    same(params.qkv, w("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    same(params.conv, w("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")[:, 0])
    same(params.decay_down, w("f_a_proj.weight"))
    same(params.decay_up, w("f_b_proj.weight"))
    same(params.decay_bias, w("dt_bias").reshape(HEADS, KEY))
    same(params.decay_log_scale, w("A_log").reshape(-1)[:HEADS])
    same(params.beta, w("b_proj.weight"))
    same(params.out_norm, w("o_norm.weight"))
    same(params.out, w("o_proj.weight"))
    if folder == K3_TINY:
        same(params.gate, w("g_proj.weight"))
        assert params.gate_down is params.gate_up is None
    else:
        same(params.gate_down, w("g_a_proj.weight"))
        same(params.gate_up, w("g_b_proj.weight"))
        assert params.gate is None


@pytest.mark.parametrize("folder", GOLDENS)
def test_mla_leaves_hold_their_tensors(folder: Path):
    params = load_hf(folder).layers[3].mixer
    w = Stored(folder, "model.layers.3.self_attn.")
    assert isinstance(params, MLAParams)

    same(params.kv_down, w("kv_a_proj_with_mqa.weight"))
    same(params.kv_norm, w("kv_a_layernorm.weight"))
    same(params.kv_up, w("kv_b_proj.weight"))
    same(params.out, w("o_proj.weight"))
    if folder == K3_TINY:
        same(params.q_down, w("q_a_proj.weight"))
        same(params.q_norm, w("q_a_layernorm.weight"))
        same(params.q, w("q_b_proj.weight"))
        same(params.gate, w("g_proj.weight"))
    else:
        same(params.q, w("q_proj.weight"))
        assert params.q_down is params.q_norm is params.gate is None


@pytest.mark.parametrize("folder", GOLDENS)
def test_ffn_leaves_hold_the_stacked_tensors(folder: Path):
    params = load_hf(folder)
    dense, sparse = params.layers[0].ffn, params.layers[2].ffn
    w = Stored(folder, "model.layers.")
    assert isinstance(dense, MLPParams) and isinstance(sparse, MoEParams)
    assert sparse.shared is not None

    same(dense.gate_up, w("0.mlp.gate_proj.weight", "0.mlp.up_proj.weight"))
    same(dense.down, w("0.mlp.down_proj.weight"))
    w = w.within("2.block_sparse_moe.")
    same(sparse.router, w("gate.weight"))
    same(sparse.score_bias, w("gate.e_score_correction_bias"))
    same(
        sparse.shared.gate_up,
        w("shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"),
    )
    same(sparse.shared.down, w("shared_experts.down_proj.weight"))
    if folder == K3_TINY:
        same(sparse.latent_down, w("routed_expert_down_proj.weight"))
        same(sparse.latent_norm, w("routed_expert_norm.weight"))
        same(sparse.latent_up, w("routed_expert_up_proj.weight"))
    for expert in range(8):
        e = w.within(f"experts.{expert}.")
        if folder == K3_TINY:
            assert isinstance(sparse.gate_up, QuantArray) and isinstance(sparse.down, QuantArray)
            same(sparse.gate_up.values[expert], e("w1.weight_packed", "w3.weight_packed"))
            same(sparse.gate_up.scales[expert], e("w1.weight_scale", "w3.weight_scale"))
            same(sparse.down.values[expert], e("w2.weight_packed"))
            same(sparse.down.scales[expert], e("w2.weight_scale"))
        else:
            assert isinstance(sparse.gate_up, jax.Array) and isinstance(sparse.down, jax.Array)
            same(sparse.gate_up[expert], e("w1.weight", "w3.weight"))
            same(sparse.down[expert], e("w2.weight"))


def test_leaves_around_the_layers_hold_their_tensors():
    params, w = load_hf(K3_TINY), Stored(K3_TINY)
    layer, final = params.layers[5], params.final_mix
    assert layer.mixer_mix and layer.ffn_mix and final

    same(params.embed, w("model.embed_tokens.weight"))
    same(params.lm_head, w("lm_head.weight"))
    same(params.final_norm, w("model.norm.weight"))
    same(final.norm, w("model.output_attn_res_norm.weight"))
    same(final.proj, w("model.output_attn_res_proj.weight")[0])
    w = w.within("model.layers.5.")
    same(layer.mixer_norm, w("input_layernorm.weight"))
    same(layer.ffn_norm, w("post_attention_layernorm.weight"))
    same(layer.mixer_mix.norm, w("self_attention_res_norm.weight"))
    same(layer.mixer_mix.proj, w("self_attention_res_proj.weight")[0])
    same(layer.ffn_mix.norm, w("mlp_res_norm.weight"))
    same(layer.ffn_mix.proj, w("mlp_res_proj.weight")[0])


def test_vision_leaves_hold_their_tensors():
    params, w = load_hf(K3_TINY).vision, Stored(K3_TINY, "vision_tower.")
    assert params is not None
    block, b = params.blocks[1], w.within("encoder.blocks.1.")

    same(params.patch, w("patch_embed.proj.weight").reshape(32, 588))
    same(params.pos_emb, w("patch_embed.pos_emb.weight"))
    same(params.norm, w("encoder.final_layernorm.weight"))
    same(block.norm0, b("norm0.weight"))
    same(block.qkv, b("wqkv.weight"))
    same(block.out, b("wo.weight"))
    same(block.norm1, b("norm1.weight"))
    same(block.up, b("mlp.fc0.weight"))
    same(block.down, b("mlp.fc1.weight"))
    projector = Stored(K3_TINY, "mm_projector.")
    same(params.project_in, projector("proj.0.weight"))
    same(params.project_out, projector("proj.2.weight"))
    same(params.project_norm, projector("post_norm.weight"))


@pytest.mark.parametrize("folder", GOLDENS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_dtypes_are_those_of_abstract(folder: Path, dtype: str):
    params = load_hf(folder, dtype=dtype)
    expected = abstract(K3Config.from_hf(folder), jnp.dtype(dtype))

    assert jax.tree.structure(params) == jax.tree.structure(expected)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(params)] == [
        (a.shape, a.dtype) for a in jax.tree.leaves(expected)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantized_experts_are_the_packed_ones(dtype: str):
    packed = load_hf(K3_TINY, dtype=dtype)
    floats = load_hf(K3_TINY, dtype=dtype, dequantize_experts=True)

    assert equal(floats, all_dequantized(packed))


@pytest.mark.parametrize("folder", GOLDENS)
def test_layers_may_span_files_in_any_order(folder: Path, tmp_path: Path):
    rng = np.random.default_rng(7)
    split = sharded(tmp_path / "split", folder, lambda _: f"part-{rng.integers(5)}.safetensors")

    assert equal(load_hf(split), load_hf(folder))
    assert equal(load_hf(split, dequantize_experts=True), load_hf(folder, dequantize_experts=True))


@pytest.mark.parametrize("folder", GOLDENS)
def test_names_may_have_the_wrappers_prefix_or_not(folder: Path, tmp_path: Path):
    prefix = "language_model."
    swapped = {
        name.removeprefix(prefix)
        if name.startswith(prefix)
        else name
        if name.startswith(("vision_tower.", "mm_projector."))
        else prefix + name: tensor
        for name, tensor in tensors_of(folder).items()
    }
    other = folder_of(tmp_path / "other", folder, swapped)

    assert equal(load_hf(other), load_hf(folder))


@pytest.mark.parametrize("shape", [(HEADS,), (16,), (1, 1, HEADS, 1), (1, 1, 7, 1), (97,)])
def test_whatever_follows_the_heads_in_a_log_is_ignored(tmp_path: Path, shape: tuple[int, ...]):
    tensors = tensors_of(K3_TINY)
    name = "language_model.model.layers.1.self_attn.A_log"
    poisoned = np.full(max(shape), np.nan, np.float32)
    poisoned[:HEADS] = heads = tensors[name][:HEADS]
    tensors[name] = poisoned.reshape(shape)
    params = load_hf(folder_of(tmp_path / "poisoned", K3_TINY, tensors))

    mixer = params.layers[1].mixer
    assert isinstance(mixer, KDAParams)
    same(mixer.decay_log_scale, heads)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_any_float_dtype_is_read_exactly_into_float32(tmp_path: Path, stored: str):
    tensors = {
        name: tensor if tensor.dtype == np.uint8 else tensor.astype(stored)
        for name, tensor in tensors_of(K3_TINY).items()
    }
    params = load_hf(folder_of(tmp_path / "other", K3_TINY, tensors))

    same(params.embed, tensors["language_model.model.embed_tokens.weight"].astype(np.float32))
    same(
        params.layers[2].mixer_norm,
        tensors["language_model.model.layers.2.input_layernorm.weight"].astype(np.float32),
    )


def test_every_bfloat16_becomes_the_float32_it_stands_for(tmp_path: Path):
    tensors = tensors_of(K3_TINY)
    name = "language_model.model.embed_tokens.weight"
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), 384 * 128)
    bits[-256:] = np.arange(0x7F80, 0x8080)  # infinities, NaNs, zeros and subnormals
    tensors[name] = bits.view(jnp.bfloat16).reshape(384, 128)
    params = load_hf(folder_of(tmp_path / "other", K3_TINY, tensors))

    np.testing.assert_array_equal(
        np.asarray(params.embed).view(np.uint32).reshape(-1), bits.astype(np.uint32) << 16
    )


def test_leaves_go_to_the_given_sharding():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[-1], memory_kind="unpinned_host")
    if jax.default_backend() != "cpu":
        place = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    params = load_hf(K3_TINY, sharding=place)
    tree = jax.tree.map(lambda _: place, abstract(K3Config.from_hf(K3_TINY)))

    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {place}
    assert equal(load_hf(K3_TINY, sharding=tree), params)


def test_a_dtype_that_is_no_float_is_refused():
    with pytest.raises(ValueError, match="dtype = int8, expected bfloat16, float16 or float32"):
        load_hf(K3_TINY, dtype=jnp.int8)


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    load_hf(KIMI_LINEAR_TINY, progress=True)

    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("dequantize_experts", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_above_the_result_is_less_than_one_file(
    tmp_path: Path, dtype: str, dequantize_experts: bool
):
    config = replace(tiny_config(), vocab_size=1024, hidden_size=512, num_layers=13)
    config = replace(config, kda_layers=tuple(range(11)), kda_head_dim=128)
    config = replace(config, moe_intermediate_size=256, expert_latent_size=256)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract(config))
    shard_bytes = 3 << 20
    save_hf(params, config, tmp_path / "m", max_shard_bytes=shard_bytes)
    files = len(list((tmp_path / "m").glob("*.safetensors")))
    options: dict[str, Any] = {"dtype": dtype, "dequantize_experts": dequantize_experts}
    load_hf(tmp_path / "m", **options)  # imports and caches are not the loader's memory
    tracemalloc.start()
    try:
        params = load_hf(tmp_path / "m", **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert files >= 6
    assert nbytes(params) <= peak <= nbytes(params) + shard_bytes
