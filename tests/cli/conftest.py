"""A model folder that subcommands can run, and an environment that leaves no traces."""

from pathlib import Path

import pytest

from k3jax.text_model import TextModel
from tests.random_weights import write_text_model


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch):
    """Tests in this process must not turn on a cache in the user's home."""
    monkeypatch.setenv("K3JAX_COMPILATION_CACHE", "0")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with vision, and the toy tokenizer."""
    return write_text_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def text_model(text_folder: Path) -> TextModel:
    return TextModel.open(text_folder)
