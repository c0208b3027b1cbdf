"""Tokenizers over the toy ranks: K3's marker names and Kimi-Linear's."""

import pytest

from k3jax.chat.tokenizer import Tokenizer
from k3jax.chat.vocabulary import read_ranks
from tests.chat.inputs import GOLDEN


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
