"""A folder that is not what its config says is refused in one line that names tensor and file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3jax.weights import load_hf
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY
from tests.weights.folders import INDEX, Tensors, folder_of, sharded, tensors_of

LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "block_sparse_moe.experts.3."


def by_half(name: str) -> str:
    """Text in one file, vision in the other."""
    return "b.safetensors" if name.startswith(("vision", "mm")) else "a.safetensors"


def message(folder: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_hf(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: np.ndarray) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def unpack(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith(("_packed", "_scale"))]:
        tensor = tensors.pop(name)
        if name.endswith("_packed"):
            shape = (tensor.shape[0], 2 * tensor.shape[1])
            tensors[name.removesuffix("_packed")] = np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop(LAYER + "self_attn.k_proj.weight"), LAYER + "self_attn.k_proj.weight is not in"),
        (drop(EXPERT + "w2.weight_scale"), EXPERT + "w2.weight_scale is not in"),
        (drop("mm_projector.proj.0.weight"), "tensor mm_projector.proj.0.weight is not in"),
        (
            put(LAYER + "self_attn.q_norm.weight", np.zeros(3, np.float32)),
            f"unexplained tensor {LAYER}self_attn.q_norm.weight",
        ),
        (
            put(LAYER + "self_attn.g_a_proj.weight", np.zeros((16, 128), np.float32)),
            f"unexplained tensor {LAYER}self_attn.g_a_proj.weight",
        ),
        (
            put(LAYER + "self_attn.k_proj.weight", np.zeros((64, 127), np.float32)),
            f"{LAYER}self_attn.k_proj.weight has shape (64, 127), the config implies (64, 128)",
        ),
        (
            put(LAYER + "self_attn.k_proj.weight", np.zeros((128, 64), np.float32)),
            f"{LAYER}self_attn.k_proj.weight has shape (128, 64), the config implies (64, 128)",
        ),
        (
            put(LAYER + "self_attn.q_conv1d.weight", np.zeros((64, 4), np.float32)),
            f"{LAYER}self_attn.q_conv1d.weight has shape (64, 4), the config implies (64, 1, 4)",
        ),
        (
            put(LAYER + "self_attn.A_log", np.zeros(3, np.float32)),
            f"{LAYER}self_attn.A_log has shape (3,), the config implies at least 4 values",
        ),
        (
            put(LAYER + "self_attn.A_log", np.zeros((2, 4), np.float32)),
            f"{LAYER}self_attn.A_log has shape (2, 4), the config implies at least 4 values",
        ),
        (
            put(LAYER + "input_layernorm.weight", np.zeros(128, np.int32)),
            f"{LAYER}input_layernorm.weight has dtype I32, expected BF16 or F16 or F32",
        ),
        (
            put(LAYER + "input_layernorm.weight", np.zeros(128, np.float64)),
            f"{LAYER}input_layernorm.weight has dtype F64, expected BF16 or F16 or F32",
        ),
        (
            put(EXPERT + "w1.weight_packed", np.zeros((96, 32), np.float32)),
            f"{EXPERT}w1.weight_packed has dtype F32, expected U8",
        ),
        (
            put("model.norm.weight", np.zeros(128, np.float32)),
            "model.norm.weight is also in",
        ),
        (unpack, "holds plain F32, but the config's quantization_config says that experts are"),
    ],
)
def test_wrong_tensors_are_named_with_their_file(
    tmp_path: Path, change: Callable[[Tensors], object], expected: str
):
    tensors = tensors_of(K3_TINY)
    change(tensors)
    text = message(folder_of(tmp_path / "bad", K3_TINY, tensors))

    assert expected in text
    assert str(tmp_path / "bad" / "model.safetensors") in text


def test_packed_experts_need_a_quantization_config(tmp_path: Path):
    folder = folder_of(tmp_path / "bad", K3_TINY)
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))

    text = message(folder)
    assert "w1.weight_packed is packed, but the config has no quantization_config" in text


def test_a_vision_tower_needs_a_vision_config(tmp_path: Path):
    folder = folder_of(tmp_path / "bad", K3_TINY)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))

    text = message(folder)
    assert "unexplained tensor" in text and text.endswith("the config has no vision_config")


def test_a_config_of_another_size_is_refused_before_data_is_read(tmp_path: Path):
    folder = folder_of(tmp_path / "bad", KIMI_LINEAR_TINY)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"vocab_size": 384', '"vocab_size": 385'))

    assert "tensor model.embed_tokens.weight has shape (384, 128)" in message(folder)


@pytest.mark.parametrize("file", ["a.safetensors", "b.safetensors"])
@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_file_is_named_with_the_tensor_it_cuts(tmp_path: Path, file: str, cut: int):
    folder = sharded(tmp_path / "bad", K3_TINY, by_half)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[:-cut])

    text = message(folder)
    assert text.startswith(f"{folder / file}: truncated: tensor ")


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            drop("mm_projector.proj.0.weight"),
            "b.safetensors: tensor mm_projector.proj.0.weight is not in " + INDEX,
        ),
        (
            lambda m: m.update({"lm_head.weight": "a.safetensors"}),
            f"a.safetensors: no tensor lm_head.weight, which {INDEX} lists",
        ),
        (
            lambda m: m.update({"mm_projector.proj.0.weight": "a.safetensors"}),
            "tensor mm_projector.proj.0.weight is here, but " + INDEX + " says a.safetensors",
        ),
        (
            lambda m: m.update({"lm_head.weight": "c.safetensors"}),
            f"c.safetensors is missing; {INDEX} names it for lm_head.weight",
        ),
        (
            lambda m: m.update({"lm_head.weight": "../c.safetensors"}),
            "tensor lm_head.weight is in '../c.safetensors', which is not a file name",
        ),
        (lambda m: m.update({"lm_head.weight": 5}), "lm_head.weight is in 5, which is not a file"),
        (dict.clear, f"{INDEX} has no weight_map"),
    ],
)
def test_index_that_disagrees_with_the_files_is_refused(
    tmp_path: Path, change: Callable[[dict], object], expected: str
):
    folder = sharded(tmp_path / "bad", K3_TINY, by_half)
    edit_index(folder, change)

    assert expected in message(folder)


def test_tensor_in_two_files_is_refused(tmp_path: Path):
    folder = sharded(tmp_path / "bad", K3_TINY, by_half)
    shutil.copy(folder / "b.safetensors", folder / "c.safetensors")
    edit_index(folder, lambda m: m.update({"lm_head.weight": "c.safetensors"}))

    text = message(folder)
    assert "c.safetensors: tensor " in text and "is also in" in text and "b.safetensors" in text


def test_missing_file_of_the_index_is_named(tmp_path: Path):
    folder = sharded(tmp_path / "bad", K3_TINY, by_half)
    (folder / "b.safetensors").unlink()

    text = message(folder)
    assert "b.safetensors is missing" in text and "names it for " in text


def test_file_outside_the_index_is_named(tmp_path: Path):
    folder = sharded(tmp_path / "bad", K3_TINY, by_half)
    shutil.copy(folder / "b.safetensors", folder / "model.safetensors")

    assert f"model.safetensors is not part of the model that {INDEX}" in message(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": []}', "\xff"])
def test_broken_index_is_named(tmp_path: Path, text: str):
    folder = sharded(tmp_path / "bad", K3_TINY, by_half)
    (folder / INDEX).write_text(text, encoding="latin-1")

    assert str(folder / INDEX) in message(folder)


def test_wrong_folders_are_explained(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    no_weights = folder_of(tmp_path / "no-weights", K3_TINY)
    (no_weights / "model.safetensors").unlink()
    no_index = sharded(tmp_path / "no-index", K3_TINY, by_half)
    (no_index / INDEX).unlink()
    no_config = folder_of(tmp_path / "no-config", K3_TINY)
    (no_config / "config.json").unlink()

    assert message(tmp_path / "none") == f"no such folder: {tmp_path / 'none'}"
    assert "no config.json" in message(no_config)
    assert message(file) == f"{file} is a file; expected a model folder"
    assert message(no_weights).startswith(f"no weights in {no_weights}")
    assert "holds a.safetensors but neither model.safetensors nor" in message(no_index)
