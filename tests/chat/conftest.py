"""Tokenizers over the toy ranks: K3's marker names and Kimi-Linear's."""

import json
from pathlib import Path

import pytest

from k3jax.chat.tokenizer import Tokenizer, read_ranks

GOLDEN = Path(__file__).parent.parent / "golden"


def golden_json(name: str):
    return json.loads((GOLDEN / name).read_text())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(GOLDEN / "chat")


@pytest.fixture(scope="session")
def linear_tokenizer() -> Tokenizer:
    names = {2: "im_end", 3: "im_user", 4: "im_assistant", 10: "im_system", 17: "im_middle"}
    return Tokenizer(
        read_ranks(GOLDEN / "chat" / "tiktoken.model"),
        {590 + offset: f"<|{name}|>" for offset, name in names.items()},
        eos_token="<|im_end|>",
    )
