"""Accuracy of a model on held-out exercises, by greedy generation."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from k3jax.chat.encoder import encode_chat
from k3jax.chat.parser import parse_output
from k3jax.chat.tokenizer import Tokenizer
from scripts.nano import tasks
from scripts.nano.corpus import Mode, held_out
from scripts.nano.tasks import Exercise

Generate = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]
"""Prompts to the ids of their replies."""

MODES = {"off": Mode(False), "on": Mode(True, "max")}


@dataclass(frozen=True)
class Result:
    """One row of the table. `low` and `high` are Wilson's 95 % interval."""

    task: str
    thinking: str
    right: int
    count: int
    accuracy: float
    low: float
    high: float


def evaluate(
    generate: Generate,
    tokenizer: Tokenizer,
    *,
    count: int,
    names: Iterable[str] = tuple(tasks.TASKS),
    seed: int = 1_000_000,
    batch: int = 16,
) -> list[Result]:
    """Measure every task with thinking off and on (effort max); `count` exercises for each row.

    The same seed gives the same exercises whatever the model. Small talk is learnt by heart, so
    its exercises are those of training.
    """
    results = []
    for name in names:
        for thinking, mode in MODES.items():
            rng = np.random.default_rng([seed, sum(name.encode())])
            exercises = [held_out(rng, name, thinking=mode.thinking) for _ in range(count)]
            right = 0
            for start in range(0, count, batch):
                part = exercises[start : start + batch]
                right += sum(_answer(generate, tokenizer, part, mode))
            low, high = wilson(right, count)
            results.append(Result(name, thinking, right, count, right / count, low, high))
    return results


def _answer(
    generate: Generate, tokenizer: Tokenizer, exercises: Sequence[Exercise], mode: Mode
) -> list[bool]:
    prompts = [
        encode_chat(tokenizer, list(one.messages[:-1]), mode.options(one)) for one in exercises
    ]
    replies = [
        parse_output(tokenizer, ids, thinking=mode.thinking).message() for ids in generate(prompts)
    ]
    return [tasks.accepts(one, reply) for one, reply in zip(exercises, replies, strict=True)]


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / count / 2) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def table(results: Sequence[Result]) -> str:
    """The rows for a terminal and for a README."""
    lines = ["| task | thinking | right | accuracy | 95 % interval |", "|---|---|---|---|---|"]
    for one in results:
        lines.append(
            f"| {one.task} | {one.thinking} | {one.right}/{one.count} | {one.accuracy:.1%} "
            f"| {one.low:.1%} – {one.high:.1%} |"
        )
    return "\n".join(lines)


def as_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """The rows as plain data."""
    return [asdict(one) for one in results]
