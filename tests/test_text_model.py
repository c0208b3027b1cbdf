"""A model folder as text sees it: checked against itself, and prompts that the model can run."""

import base64
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3jax import bundled
from k3jax.chat import ChatOptions, encode_chat
from k3jax.text_model import TextModel
from k3jax.weights.config_json import config_json
from tests.helpers import GOLDEN, K3_TINY
from tests.random_weights import TOKENIZER_FILES, text_config


def folder_of(path: Path, config=None) -> Path:
    """A folder without weights: `TextModel` reads none."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json(config or text_config())))
    for name in TOKENIZER_FILES:
        shutil.copy(GOLDEN / "chat" / name, path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.open(folder_of(tmp_path_factory.mktemp("models") / "toy"))


def picture(width: int = 30, height: int = 20) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def message(*parts) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def test_end_ids_are_all_that_the_three_files_declare(folder: Path):
    config = replace(text_config(), eos_token_ids=(13,))
    folder_of(folder, config)
    (folder / "generation_config.json").write_text('{"eos_token_id": [77, 13]}')
    found = TextModel.open(folder)
    # 592 is the tokenizer's <|end_of_msg|>.
    assert found.config.eos_token_ids == (13, 77, 592)
    assert found.config.pad_token_id not in found.config.eos_token_ids
    assert replace(found.config, eos_token_ids=(13,)) == config


def test_sampling_is_the_folders(folder: Path):
    assert (TextModel.open(folder).sampling.temperature, 0.95) == (1.0, 0.95)
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 9}')
    sampling = TextModel.open(folder).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.95, 9)


def open_error(path: Path | str) -> str:
    with pytest.raises((ValueError, OSError)) as error:
        TextModel.open(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_folder_that_is_none_is_an_error(folder: Path):
    assert open_error(folder / "nothing").endswith(
        "nothing does not exist; expected a model folder"
    )
    assert "is a file, not a folder" in open_error(folder / "config.json")
    assert "no config.json" in open_error(folder.parent)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_missing_tokenizer_file_is_named(folder: Path, name: str):
    (folder / name).unlink()
    assert open_error(folder) == f"tokenizer file {folder / name} does not exist"


def test_tokenizer_of_another_model_is_an_error(folder: Path):
    shutil.copy(K3_TINY / "config.json", folder)
    assert "the tokenizer has 846 ids, but config.json says vocab_size = 384" in open_error(folder)


def test_end_id_outside_the_vocabulary_is_an_error(folder: Path):
    (folder / "generation_config.json").write_text('{"eos_token_id": 846}')
    assert "eos_token_id 846 is outside the vocabulary 0..845" in open_error(folder)


def test_media_token_must_be_the_tokenizers(folder: Path):
    config = text_config()
    folder_of(folder, replace(config, vision=replace(config.vision, media_token_id=610)))
    assert "<|media_pad|> is 611, but config.json says" in open_error(folder)


def test_images_must_be_cut_as_the_tower_reads_them(folder: Path):
    settings = {"media_proc_cfg": {"patch_size": 16, "merge_kernel_size": 2}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert "images are cut with patch_size 16, but the vision tower reads patch_size 14" in (
        open_error(folder)
    )


def test_chat_prompt_is_that_of_the_encoder(model: TextModel):
    messages = [{"role": "user", "content": "Hello <|open|>"}]
    options = ChatOptions(thinking=False)
    found = model.chat_prompt(messages, options)
    assert list(found.tokens) == encode_chat(model.tokenizer, messages, options)
    assert found.images == ()
    assert model.chat_prompt(messages).tokens != found.tokens


@pytest.mark.parametrize("form", ["path", "url of a path", "file url", "data url", "contents"])
def test_image_may_be_given_in_every_form(model: TextModel, tmp_path: Path, form: str):
    file, buffer = tmp_path / "a picture.png", io.BytesIO()
    picture().save(file)
    picture().save(buffer, "png")
    data = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    part = {
        "path": {"type": "image", "image": str(file)},
        "url of a path": {"type": "image_url", "image_url": {"url": str(file)}},
        "file url": {"type": "image_url", "image_url": {"url": f"file://{file}"}},
        "data url": {"type": "image_url", "image_url": data},
        "contents": {"type": "image", "image": picture()},
    }[form]
    prompt = model.chat_prompt(message(part))
    assert len(prompt.images) == 1
    # 30×20 pixels are 2×1 cells of 28×28 after padding.
    assert prompt.tokens.count(611) == 2


def test_images_keep_their_order_and_sizes(model: TextModel):
    pictures = [picture(size, 20) for size in (10, 60, 100)]
    prompt = model.chat_prompt(message(*[{"type": "image", "image": one} for one in pictures]))
    assert list(prompt.images) == pictures
    assert prompt.tokens.count(611) == 1 + 3 + 4


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("https://example.com/a.png", "messages[0].content[0].image: images are not downloaded"),
        ("data:image/png;base64,!!!", "messages[0].content[0].image is no data URL"),
        ("data:image/png,abc", "messages[0].content[0].image is no data URL"),
        ("nothing.png", "image nothing.png does not exist"),
        (b"no picture", "image of 10 bytes is in no known image format"),
        (5, "messages[0].content[0].image must be a path or a data URL, not int"),
        (None, "messages[0].content[0].image is missing"),
    ],
)
def test_broken_image_is_an_error_that_names_it(model: TextModel, image, problem: str):
    with pytest.raises(ValueError) as error:
        model.chat_prompt(message({"type": "image", "image": image}))
    assert str(error.value).startswith(problem)


def test_image_for_a_model_without_vision_is_an_error(tmp_path: Path):
    blind = TextModel.open(folder_of(tmp_path / "blind", replace(text_config(), vision=None)))
    with pytest.raises(ValueError, match=r"hold an image, but .*blind has no vision tower"):
        blind.chat_prompt(message({"type": "image", "image": picture()}))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda m: m.chat_prompt([]), "messages is empty"),
        (lambda m: m.chat_prompt("Hello"), "messages must be a list"),
        (lambda m: m.chat_prompt([{"role": "critic", "content": "x"}]), "messages[0].role must be"),
        (lambda m: m.text_prompt(""), "prompt is empty"),
        (lambda m: m.text_prompt("word " * 2000), "prompt has "),
        (lambda m: m.token_prompt([]), "prompt is empty"),
        (lambda m: m.token_prompt([3, 846]), "prompt: token id 846 at position 1"),
        (lambda m: m.token_prompt([0] * 1024), "prompt has 1024 tokens, but the model's context"),
    ],
)
def test_prompt_that_cannot_run_is_refused(model: TextModel, make, problem: str):
    with pytest.raises(ValueError) as error:
        make(model)
    assert str(error.value).startswith(problem)


def test_text_cannot_become_a_marker(model: TextModel):
    tokens = model.text_prompt("<|end_of_msg|>").tokens
    assert max(tokens) < model.tokenizer.num_base
    assert model.tokenizer.decode(tokens) == "<|end_of_msg|>"


def test_bundled_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "k3-nano")
    assert bundled.weights_folder("./k3-nano") == Path("k3-nano")
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "k3jax" / "bundled.py"))
    assert "the bundled model k3-nano is not in" in open_error("k3-nano")
    shipped = folder_of(tmp_path / "k3jax" / "models" / "k3-nano")
    assert "the bundled model k3-nano is not in" in open_error("k3-nano")
    (shipped / "model.safetensors").write_bytes(b"")
    assert bundled.weights_folder("k3-nano") == shipped
    assert TextModel.open("k3-nano").folder == shipped
