"""Conversations of a given shape: a long first message, short later ones, made of seeded words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_WORDS = (
    "table river music paper green seven house light under stone winter bread paint garden "
    "window letter silver engine market forest"
).split()


@dataclass(frozen=True)
class Shape:
    """`words` of the first message, `turns` of each conversation, `later_words` of the others."""

    words: int
    turns: int = 1
    later_words: int = 16
    shared_words: int = 0
    """Words that all conversations begin with, in a system message."""


def first_messages(shape: Shape, seed: int) -> Iterator[list[dict[str, Any]]]:
    """The beginnings of conversations, all different, without end."""
    rng = random.Random(seed)
    shared = _text(random.Random(0), shape.shared_words)
    system = [{"role": "system", "content": shared}] if shared else []
    number = 0
    while True:
        number += 1
        text = f"Number {seed}-{number}: {_text(rng, shape.words)}"
        yield [*system, {"role": "user", "content": text}]


def next_message(shape: Shape, seed: int, turn: int) -> dict[str, Any]:
    """What the user says next."""
    rng = random.Random(f"{seed}/{turn}")
    return {"role": "user", "content": f"And then: {_text(rng, shape.later_words)}"}


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))
