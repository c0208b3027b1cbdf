"""Conversations for training: exercises joined into chats, encoded, the model's tokens marked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int32

from k3jax.chat.options import ChatOptions
from k3jax.chat.tokenizer import Tokenizer
from k3jax.chat.xtml import build_segments
from scripts.nano import tasks
from scripts.nano.tasks import Draw, Exercise, Message
from scripts.nano.toolbox import Rng
from scripts.nano.words import all_words


@dataclass(frozen=True)
class Mode:
    """How a conversation is encoded: `effort` counts only with `thinking`."""

    thinking: bool
    effort: Any = None

    def options(self, exercise: Exercise | None = None) -> ChatOptions:
        """The options of a chat request, with what `exercise` needs declared."""
        return ChatOptions(
            thinking=self.thinking,
            effort=self.effort,
            tools=list(exercise.tools) if exercise and exercise.tools else None,
            response_format=exercise.response_format if exercise else None,
        )


@dataclass(frozen=True)
class Row:
    """One encoded conversation. `task` is -1 where the model only reads; where it must produce the
    token, it is the number of the exercise in `TASK_NAMES`."""

    tokens: Int32[np.ndarray, "token"]
    task: Int32[np.ndarray, "token"]


@dataclass(frozen=True)
class Batch:
    """Rows of one shape, padded on the right."""

    tokens: Int32[np.ndarray, "row token"]
    lengths: Int32[np.ndarray, "row"]
    task: Int32[np.ndarray, "row token"]


TASK_NAMES = (*tasks.TASKS, "sums")


class Encoder:
    """Encodes messages with `k3jax.chat`, remembering every text it has seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._text = lru_cache(maxsize=20_000)(self._encode)

    def _encode(self, text: str, control: bool) -> tuple[int, ...]:
        ids = self.tokenizer.encode_control(text) if control else self.tokenizer.encode(text)
        return tuple(ids)

    def ids(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Exactly `encode_chat`, by segments."""
        return [
            token
            for text, control in build_segments(messages, options)
            for token in self._text(text, control)
        ]

    def prompt(self, exercise: Exercise, mode: Mode) -> list[int]:
        """What the model sees before the judged reply."""
        return self.ids(exercise.messages[:-1], mode.options(exercise))

    def reply(self, message: Message, mode: Mode) -> list[int]:
        """What the model must produce: from after the generation prompt to `<|end_of_msg|>`."""
        bare = replace(mode.options(), effort=None)
        opened = self.ids((), bare)
        whole = self.ids((message,), replace(bare, add_generation_prompt=False))
        assert whole[: len(opened)] == opened
        return whole[len(opened) :]


class _RowBuilder:
    """Appends exercises to one conversation while they fit `limit` tokens."""

    def __init__(self, encoder: Encoder, mode: Mode, limit: int) -> None:
        self._encoder, self._mode, self._limit = encoder, mode, limit
        self._tokens: list[int] = []
        self._task: list[int] = []
        self._opened = encoder.ids((), replace(mode.options(), effort=None))
        self._bare = replace(mode.options(), effort=None, add_generation_prompt=False)

    def start(self, declared: Sequence[Message]) -> None:
        """Begin with the tool declarations and the effort."""
        options = self._mode.options()
        options = replace(options, tools=list(declared) or None, add_generation_prompt=False)
        self._append(self._encoder.ids((), options), -1)

    def add(self, exercise: Exercise) -> bool:
        """Append the exercise as far as whole turns fit.

        Only recall consists of independent turns; anything else fits whole or not at all. False
        and nothing appended if not even one turn fits.
        """
        kept = before = len(self._tokens)
        for message in exercise.messages:
            if message["role"] == "assistant":
                self._reply(exercise, message)
                fits = len(self._tokens) <= self._limit
                is_end = exercise.task == "recall" or message is exercise.messages[-1]
                kept = len(self._tokens) if fits and is_end else kept
            else:
                self._append(self._encoder.ids((message,), self._bare), -1)
        del self._tokens[kept:], self._task[kept:]
        return kept > before

    def row(self) -> Row:
        """What has been appended."""
        task = np.asarray(self._task, np.int32)
        return Row(np.asarray(self._tokens, np.int32), task)

    def _reply(self, exercise: Exercise, message: Message) -> None:
        if exercise.response_format is not None:
            constraint = replace(self._bare, response_format=exercise.response_format)
            self._append(self._encoder.ids((), constraint), -1)
        self._append(self._opened, -1)
        name = "call" if message.get("tool_calls") else exercise.task
        self._append(self._encoder.reply(message, self._mode), TASK_NAMES.index(name))

    def _append(self, ids: Sequence[int], number: int) -> None:
        self._tokens.extend(ids)
        self._task.extend([number] * len(ids))


PLAIN: dict[Callable[[Draw], Exercise], float] = {
    tasks.add: 3.0,
    tasks.add_many: 1.5,
    tasks.reverse: 1.5,
    tasks.sort: 4.0,
    tasks.talk: 0.6,
}
"""Weights of the exercises that need nothing declared."""

TOOL_TURNS: dict[Callable[[Draw], Exercise], float] = {
    tasks.tool_answer: 6.0,
    tasks.no_tool: 0.25,
    tasks.talk: 0.2,
    tasks.add: 0.4,
}
"""Weights where tools are declared; a few turns need none of them."""

SHORT_KINDS = {"plain": 0.32, "recall": 0.15, "tools": 0.35, "json": 0.18}
"""Shares of the kinds of conversation among short rows."""


def choose(rng: Rng, weights: Mapping[Any, float]) -> Any:
    """A key, in proportion to its weight."""
    total = rng.random() * sum(weights.values())
    for key, weight in weights.items():
        total -= weight
        if total < 0:
            return key
    return next(iter(weights))


def draw_mode(rng: Rng) -> Mode:
    """Thinking on or off, with every effort; max, the default, most often."""
    effort = choose(rng, {"off": 0.45, None: 0.17, "max": 0.22, "high": 0.08, "low": 0.08})
    return Mode(False) if effort == "off" else Mode(True, effort)


def conversation(
    encoder: Encoder, rng: Rng, limit: int, *, recall_size: float, kinds: Mapping[str, float]
) -> Row:
    """One training chat of at most `limit` tokens, nearly filled with exercises.

    Its kind is drawn from `kinds`: plain tasks, notes to recall, tools, or replies in JSON,
    each behind its own schema. `recall_size` is the share of full-size notes that recall may use.
    """
    while True:
        row = _draw_conversation(encoder, rng, limit, recall_size, choose(rng, kinds))
        if (row.task >= 0).any():  # else the declarations left no room for anything
            return row


def _draw_conversation(
    encoder: Encoder, rng: Rng, limit: int, recall_size: float, kind: str
) -> Row:
    tools = tasks.declare(rng) if kind == "tools" else ()
    mode = draw_mode(rng)
    source = Draw(rng, size=recall_size, tools=tools, thinking=mode.thinking)
    builder = _RowBuilder(encoder, mode, limit)
    builder.start([tool.declaration() for tool in tools])
    weights = TOOL_TURNS if kind == "tools" else PLAIN
    if kind == "recall":
        builder.add(tasks.recall(source, turns=12))
    elif kind == "json":
        while builder.add(tasks.fill_schema(source)):
            pass
    misses = 0
    while misses < 4:
        misses += not builder.add(choose(rng, weights)(source))
    return builder.row()


SHORT, LONG = (8, 384), (4, 800)
"""The two shapes of a training batch: rows and tokens. LONG rows hold full-size notes."""

RAMP = 0.2
"""Share of training in which notes grow to what fits a short row; LONG batches start half-way."""


def make_batch(encoder: Encoder, seed: int, step: int, progress: float) -> Batch:
    """The batch of one step: a pure function of its arguments. `progress` is in 0..1."""
    rng = np.random.default_rng([seed, step])
    is_long = progress > RAMP / 2 and rng.random() < 0.4
    rows, width = LONG if is_long else SHORT
    size = 1.0 if is_long else 0.08 + 0.2 * min(1.0, progress / RAMP)
    kinds = {"recall": 1.0} if is_long else SHORT_KINDS
    made = [conversation(encoder, rng, width, recall_size=size, kinds=kinds) for _ in range(rows)]
    return pad(made, width)


def pad(rows: Sequence[Row], width: int) -> Batch:
    """Stack rows, filling with token 0 and task -1."""
    tokens = np.zeros((len(rows), width), np.int32)
    task = np.full((len(rows), width), -1, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row.tokens)] = row.tokens
        task[number, : len(row.task)] = row.task
    return Batch(tokens, np.asarray([len(row.tokens) for row in rows], np.int32), task)


def held_out_row(encoder: Encoder, exercise: Exercise, mode: Mode) -> Row:
    """One held-out exercise on its own, only its last reply marked."""
    prompt, reply = encoder.prompt(exercise, mode), encoder.reply(exercise.messages[-1], mode)
    number = TASK_NAMES.index(exercise.task)
    task = [-1] * len(prompt) + [number] * len(reply)
    return Row(np.asarray(prompt + reply, np.int32), np.asarray(task, np.int32))


def held_out(rng: Rng, name: str, *, thinking: bool = True) -> Exercise:
    """A fresh exercise of a task from the side that training never sees."""
    source = Draw(rng, held_out=True, tools=tasks.declare(rng), thinking=thinking)
    return tasks.TASKS[name](source)


def sample_texts(count: int = 400) -> list[str]:
    """Texts to learn the vocabulary from: every task, mode and listed word several times."""
    rng = np.random.default_rng(0)
    texts: list[str] = []
    makers = (*tasks.TASKS.values(), tasks.add_many)
    for _ in range(count):
        for make in makers:
            exercise = make(Draw(rng, size=0.3, tools=tasks.declare(rng)))
            mode = draw_mode(rng)
            segments = build_segments(exercise.messages[:-1], mode.options(exercise))
            segments += build_segments(exercise.messages[-1:], mode.options())
            texts += [text for text, control in segments if not control]
    for word in all_words():
        texts += [word, f" {word}"] * 3
    return texts


def statistics(encoder: Encoder, samples: int = 100) -> str:
    """Lengths in tokens of held-out exercises, and what training batches consist of."""
    rng = np.random.default_rng(1)
    mode = Mode(True, "max")
    lines = ["task         prompt min/mean/max   reply min/mean/max   (thinking, effort max)"]
    for name in tasks.TASKS:
        made = [held_out(rng, name) for _ in range(samples)]
        prompts = np.asarray([len(encoder.prompt(one, mode)) for one in made])
        replies = np.asarray([len(encoder.reply(one.messages[-1], mode)) for one in made])
        shown = (f"{a.min():5d} {a.mean():6.1f} {a.max():5d}" for a in (prompts, replies))
        lines.append(f"{name:12s} {'   '.join(shown)}")
    batches = [make_batch(encoder, 1, step, 0.5) for step in range(samples)]
    task = np.concatenate([batch.task.ravel() for batch in batches])
    filled = sum(int(batch.lengths.sum()) for batch in batches) / task.size
    learnt = task[task >= 0]
    lines.append(f"batches: {filled:.1%} filled, {learnt.size / task.size:.1%} learnt, of which")
    shares = np.bincount(learnt, minlength=len(TASK_NAMES)) / learnt.size
    lines += [f"  {name:12s} {share:.1%}" for name, share in zip(TASK_NAMES, shares, strict=True)]
    return "\n".join(lines)
