"""`k3jax convert` changes the format and nothing else, unless it is asked to."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from k3jax.cli import main
from k3jax.config import K3Config
from k3jax.quant import QuantArray
from k3jax.weights import load_model
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY
from tests.weights.trees import equal


def convert(source: Path, target: Path, *options: str) -> Path:
    assert main(["convert", str(source), str(target), *options]) == 0
    return target


@pytest.mark.parametrize("folder", [K3_TINY, KIMI_LINEAR_TINY])
def test_there_and_back_is_the_same_file(tmp_path: Path, folder: Path):
    native = convert(folder, tmp_path / "native")
    again = convert(native, tmp_path / "again", "--to", "hf")

    assert (native / "k3jax.json").is_file()
    original = (folder / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == original
    assert K3Config.from_hf(again) == K3Config.from_hf(native) == K3Config.from_hf(folder)


@pytest.mark.parametrize("to", ["native", "hf"])
def test_experts_can_be_dequantized(tmp_path: Path, to: str):
    plain = convert(K3_TINY, tmp_path / "plain", "--to", to, "--dequantize", "--dtype", "float32")
    params, config = load_model(plain)

    assert config.expert_format is None
    assert equal(params, load_model(K3_TINY, dequantize_experts=True)[0])


def test_dtype_is_that_of_the_matrices(tmp_path: Path):
    wide = convert(K3_TINY, tmp_path / "wide", "--dtype", "float32")
    params, _ = load_model(wide)

    assert params.embed.dtype == jnp.float32
    packed = params.layers[1].ffn.down
    assert isinstance(packed, QuantArray) and packed.dtype == jnp.float32
    assert equal(params, load_model(K3_TINY)[0])


def test_tokenizer_files_come_along(tmp_path: Path):
    source = convert(KIMI_LINEAR_TINY, tmp_path / "source", "--to", "hf")
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json", "notes.txt"):
        (source / name).write_text(name)
    target = convert(source, tmp_path / "target")

    assert (target / "tiktoken.model").read_text() == "tiktoken.model"
    assert (target / "tokenizer_config.json").is_file()
    assert (target / "generation_config.json").is_file()
    assert not (target / "notes.txt").exists()


def test_a_model_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = convert(KIMI_LINEAR_TINY, tmp_path / "target", "--to", "hf")
    before = (target / "model.safetensors").read_bytes()
    capsys.readouterr()

    assert main(["convert", str(K3_TINY), str(target), "--to", "hf"]) == 2
    assert "already holds a model" in capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == before


def test_wrong_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "target")]) == 2

    assert capsys.readouterr().err == f"k3jax: error: no such folder: {tmp_path / 'none'}\n"
    assert not (tmp_path / "target").exists()
