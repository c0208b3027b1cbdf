"""The summary counts what is there, in either format, without reading it."""

from pathlib import Path

import pytest

from k3jax.config import K3Config
from k3jax.model.params import abstract, count
from k3jax.weights import load_model, save_native
from k3jax.weights.summary import summarize
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY
from tests.weights.folders import folder_of, sharded, tensors_of

PARTS = {
    "embedding": "embed_tokens",
    "output head": "lm_head",
    "router": ".gate.",
    "routed experts": ".experts.",
    "expert latent projections": "routed_expert_",
    "shared experts": "shared_experts",
    "dense MLP": ".layers.0.mlp.",
    "attention residuals": "_res_",
    "vision": "vision_tower mm_projector",
}


@pytest.mark.parametrize("folder", [K3_TINY, KIMI_LINEAR_TINY])
def test_parts_have_the_bytes_of_their_tensors(folder: Path):
    report, stored = summarize(folder), tensors_of(folder)

    for part, marks in PARTS.items():
        names = [name for name in stored if any(mark in name for mark in marks.split())]
        found = report["parts"].get(part, {"bytes": 0})
        assert found["bytes"] == sum(stored[name].nbytes for name in names), part
    assert report["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert report["bytes"] == sum(part["bytes"] for part in report["parts"].values())


@pytest.mark.parametrize("folder", [K3_TINY, KIMI_LINEAR_TINY])
def test_weights_are_those_of_the_parameter_tree(folder: Path):
    config, report = K3Config.from_hf(folder), summarize(folder)
    idle = report["parts"]["routed experts"]["weights"] * 6 // 8
    vision = report["parts"].get("vision", {"weights": 0})["weights"]

    assert report["weights"] == count(abstract(config))
    assert report["weights_per_token"] == report["weights"] - idle - vision


def test_storage_is_described(tmp_path: Path):
    one = summarize(K3_TINY)
    several = summarize(sharded(tmp_path / "m", KIMI_LINEAR_TINY, lambda n: f"{n[-9]}.safetensors"))
    params, config = load_model(K3_TINY, dequantize_experts=True)
    save_native(params, config, tmp_path / "native")
    native = summarize(tmp_path / "native")

    assert (one["format"], one["layout"], one["files"]) == ("released", "k3", 1)
    assert (one["dtype"], one["expert_format"]) == ("bfloat16", "mxfp4")
    assert (several["layout"], several["expert_format"]) == ("kimi-linear", "bfloat16")
    assert several["files"] == len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert (native["format"], native["dtype"], native["expert_format"]) == (
        "k3jax",
        "float32",
        "float32",
    )
    assert native["weights"] == one["weights"]
    assert native["bytes"] == 4 * native["weights"]


def test_missing_tokenizer_files_are_listed(tmp_path: Path):
    folder = folder_of(tmp_path / "m", K3_TINY)
    (folder / "tiktoken.model").touch()

    assert summarize(folder)["missing_tokenizer_files"] == ["tokenizer_config.json"]


def test_a_folder_that_does_not_fit_its_config_is_refused(tmp_path: Path):
    tensors = tensors_of(K3_TINY)
    del tensors["mm_projector.post_norm.weight"]

    with pytest.raises(ValueError, match="post_norm"):
        summarize(folder_of(tmp_path / "m", K3_TINY, tensors))
