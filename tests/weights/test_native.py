"""Our own format gives back the very tree, in any dtype or quantisation."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.model.params import K3Params
from k3jax.quant import quantize
from k3jax.weights import load_hf, load_model, load_native, save_hf, save_native
from k3jax.weights.load import stored_dtype
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY, tiny_config
from tests.weights.trees import Unreadable, all_dequantized, equal, random_params

CONFIG = replace(tiny_config(), num_layers=3, kda_layers=(0, 1))


@pytest.fixture(scope="module")
def params() -> K3Params:
    return random_params(CONFIG, as_stored=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, params: K3Params) -> Path:
    path = tmp_path_factory.mktemp("native") / "model"
    save_native(params, CONFIG, path)
    return path


def test_packed_parameters_survive(saved: Path, params: K3Params):
    again, config = load_native(saved)

    assert config == CONFIG
    assert equal(again, params)


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        (K3_TINY, {"dtype": jnp.bfloat16}),
        (K3_TINY, {"dequantize_experts": True}),
        (KIMI_LINEAR_TINY, {}),
    ],
)
def test_released_models_survive(tmp_path: Path, folder: Path, options: dict[str, Any]):
    params, config = load_model(folder, **options)
    save_native(params, config, tmp_path / "model")
    again, config_again = load_model(tmp_path / "model")

    assert config_again == config == K3Config.from_hf(folder)
    assert equal(again, params)


def test_int8_and_odd_floats_survive(tmp_path: Path, params: K3Params):
    odd = np.asarray(params.embed).copy()
    bits = np.array([0x7FC00001, 0xFF800001, 0x80000000, 1, 0x807FFFFF], np.uint32)
    odd.reshape(-1)[:5] = bits.view(np.float32)  # NaNs with payloads, -0 and subnormals
    mixed = params.replace(
        embed=jnp.asarray(odd),
        lm_head=quantize(params.lm_head, "int8"),  # type: ignore[arg-type]
        final_norm=params.final_norm.astype(jnp.float16),
    )
    save_native(mixed, CONFIG, tmp_path / "model")

    assert equal(load_native(tmp_path / "model")[0], mixed)


def test_the_dtype_can_be_changed_on_loading(saved: Path, params: K3Params, tmp_path: Path):
    rounded, _ = load_native(saved, dtype=jnp.bfloat16)
    save_hf(params, CONFIG, tmp_path / "float32", dtype=jnp.float32)
    expected = load_hf(tmp_path / "float32", dtype=jnp.bfloat16)

    assert equal(rounded, expected)


def test_experts_can_be_dequantized_on_loading(saved: Path, params: K3Params):
    floats, _ = load_native(saved, dequantize_experts=True)

    assert equal(floats, all_dequantized(params))


def test_leaves_go_to_the_given_sharding(saved: Path, params: K3Params):
    place = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P())
    tree = jax.tree.map(lambda _: place, params)
    one, _ = load_native(saved, sharding=place)
    many, _ = load_native(saved, sharding=tree)

    assert {leaf.sharding for leaf in jax.tree.leaves((one, many))} == {place}
    assert equal(one, params) and equal(many, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_dtype_is_that_of_the_matrices(tmp_path: Path, dtype: str):
    params, config = load_model(KIMI_LINEAR_TINY, dtype=dtype)
    save_native(params, config, tmp_path / "native")
    save_hf(params, config, tmp_path / "released", dtype=dtype)

    assert stored_dtype(tmp_path / "native") == stored_dtype(tmp_path / "released") == dtype


def test_stored_dtype_of_a_mixture_is_float32(tmp_path: Path, params: K3Params):
    save_native(params.replace(embed=params.embed.astype(jnp.bfloat16)), CONFIG, tmp_path / "m")

    assert stored_dtype(tmp_path / "m") == "float32"


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((folder / "k3jax.json").read_text())
    change(manifest)
    (folder / "k3jax.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m["leaves"].pop("lm_head"), "k3jax.json lacks lm_head, unlike the config"),
        (lambda m: m["leaves"].update(extra="float32"), "k3jax.json has extra, unlike the config"),
        (lambda m: m["leaves"].update(embed="float31"), "embed cannot be 'float31'"),
        (lambda m: m["leaves"].update(embed=None), "embed cannot be None"),
        (lambda m: m["leaves"].update(embed={"format": "mxfp4"}), "embed cannot be {'format'"),
        (
            lambda m: m["leaves"].update(embed={"format": "int4", "dtype": "float32"}),
            "embed cannot be {'format': 'int4'",
        ),
        (
            lambda m: m["leaves"].update(embed={"format": "int8", "dtype": "float32"}),
            "the Orbax weights cannot be read: embed.values is nothing",
        ),
        (lambda m: m.update(version=2), "k3jax.json is not a manifest of version 1"),
        (lambda m: m.pop("leaves"), "k3jax.json is not a manifest of version 1"),
    ],
)
def test_broken_manifest_is_named(
    saved: Path, tmp_path: Path, change: Callable[[Any], object], expected: str
):
    folder = shutil.copytree(saved, tmp_path / "bad")
    edit(folder, change)

    with pytest.raises(ValueError) as caught:
        load_native(folder)
    assert expected in str(caught.value)
    assert str(folder) in str(caught.value)


def test_arrays_of_another_size_are_refused(saved: Path, tmp_path: Path):
    folder = shutil.copytree(saved, tmp_path / "bad")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"vocab_size": 97', '"vocab_size": 91'))

    with pytest.raises(ValueError, match=r"embed is \(97, 32\), the config implies \(91, 32\)"):
        load_native(folder)


def test_missing_or_damaged_arrays_are_one_clear_line(saved: Path, tmp_path: Path):
    missing = shutil.copytree(saved, tmp_path / "missing")
    shutil.rmtree(missing / "orbax")
    empty = shutil.copytree(missing, tmp_path / "empty")
    (empty / "orbax").mkdir()
    damaged = shutil.copytree(saved, tmp_path / "damaged")
    for file in (damaged / "orbax").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with pytest.raises(FileNotFoundError, match="orbax is missing"):
        load_native(missing)
    for folder in (empty, damaged):
        with pytest.raises(ValueError) as caught:
            load_native(folder)
        assert f"{folder / 'orbax'}: the Orbax weights cannot be read: " in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path, params: K3Params):
    with pytest.raises(ValueError, match="the parameters lack final_mix"):
        save_native(params.replace(final_mix=None), CONFIG, tmp_path / "model")
    unreadable = Unreadable(np.asarray(params.final_norm))
    with pytest.raises(OSError, match="disk full"):
        save_native(params.replace(final_norm=unreadable), CONFIG, tmp_path / "model")

    assert list(tmp_path.iterdir()) == []


def test_a_model_is_only_overwritten_when_asked_for(tmp_path: Path, params: K3Params):
    save_hf(params, CONFIG, tmp_path / "model")
    (tmp_path / "model" / "tiktoken.model").touch()
    with pytest.raises(ValueError, match="already holds a model"):
        save_native(params, CONFIG, tmp_path / "model")

    save_native(params, CONFIG, tmp_path / "model", overwrite=True)
    assert equal(load_model(tmp_path / "model")[0], params)
    save_native(params, CONFIG, tmp_path / "model", overwrite=True)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "k3jax.json",
        "orbax",
        "tiktoken.model",
    }


def test_load_model_explains_what_is_no_model(tmp_path: Path, saved: Path):
    both = shutil.copytree(saved, tmp_path / "both")
    shutil.copy(K3_TINY / "model.safetensors", both)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()

    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_model(tmp_path / "none")
    with pytest.raises(ValueError, match="is a file; expected a model folder"):
        load_model(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="no model in "):
        load_model(tmp_path / "empty")
    with pytest.raises(ValueError, match="holds both"):
        load_model(both)
