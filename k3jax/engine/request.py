"""What a caller asks for and what it gets back, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from k3jax.engine.generate import PromptImages

MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """A stop id was produced."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    ABORT = "abort"
    """The caller gave up."""
    ERROR = "error"
    """The request's own constraint raised; the event says what."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are greedy and without limits but `max_tokens`.

    Penalties follow the usual definitions: repetition divides positive and multiplies negative
    logits of tokens in prompt or output; presence and frequency subtract once, or once per
    occurrence, for tokens in the output. Filters apply after temperature, in the order min-p,
    top-k, top-p. Raises ValueError naming the field and its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    """Ids that end the sequence besides the model's own."""
    ignore_eos: bool = False
    """Do not stop at the model's own end-of-sequence ids."""
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many of the likeliest alternatives."""

    def __post_init__(self) -> None:
        for name in _WHOLE:
            _check_number(name, getattr(self, name), Integral, "a whole number")
        for name in _REAL:
            _check_number(name, getattr(self, name), Real, "a number")
        if not isinstance(self.stop_ids, tuple):
            raise ValueError(f"stop_ids = {self.stop_ids!r}, expected a tuple of token ids")
        for token in self.stop_ids:
            _check_number("stop_ids", token, Integral, "token ids")
        if self.logprobs is not None:
            _check_number("logprobs", self.logprobs, Integral, "None or a whole number")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos = {self.ignore_eos!r}, expected True or False")
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature <= 1e6, "in [0, 1e6]"),
            ("top_k", 0 <= self.top_k < 2**31, "in [0, 2^31) (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "in [1e-6, 1e6]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("seed", 0 <= self.seed <= MAX_SEED, f"in [0, {MAX_SEED}]"),
            ("stop_ids", all(i >= 0 for i in self.stop_ids), "token ids of at least 0"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "None or 0 to 20"),
        )
        for name, good, rule in checks:
            if not good:
                raise ValueError(f"{name} = {getattr(self, name)!r}, expected {rule}")

    @property
    def penalized(self) -> bool:
        """Whether choosing a token needs the sequence's token counts."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


_WHOLE = ("max_tokens", "top_k", "seed")
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _check_number(name: str, value: object, kind: type, rule: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}, expected {rule}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one generated token under the model's unmodified distribution."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), likeliest first."""


@dataclass(frozen=True)
class Completion:
    """One finished sequence."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    """Generated ids; with `finish_reason` STOP the last one is the stop id."""
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None)


class TokenConstraint(Protocol):
    """Which tokens may come next in one sequence (structured output); lives on the host."""

    def fork(self) -> TokenConstraint:
        """A copy at its start: one for every choice."""
        ...

    def mask(self) -> bytes:
        """Bit i % 32 of little-endian uint32 word i // 32 is set where token i may come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        ...


@dataclass(frozen=True)
class Request:
    """One prompt to complete, `n` times.

    Choice k draws with seed `sampling.seed + k`. Requests of smaller `priority` go first.
    `images` replace the prompt's media tokens in order.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    priority: int = 0
    images: PromptImages | None = None
    constraint: TokenConstraint | None = None


@dataclass(frozen=True)
class RequestTiming:
    """When a choice passed each stage, in seconds of `time.monotonic`."""

    submitted: float
    admitted: float
    first_token: float
    finished: float


class TokenEvent(NamedTuple):
    """One token of one choice, or the end of a choice without a token."""

    request_id: str
    choice: int
    token: int | None
    """None when a choice ends without a token: aborted, or `max_tokens` is 0."""
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    """Set on the choice's last event; with STOP, `token` is the stop id."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose state came from the prefix cache."""
    timing: RequestTiming | None
    """With the last event of a choice that ran."""
    error: str = ""
    """With ERROR."""


def check_prompt(prompt: Sequence[int], *, vocab_size: int, max_context: int, name: str) -> None:
    """Refuse an empty prompt, one that leaves no room to generate, or ids outside the vocabulary.

    Raises ValueError that begins with `name`.
    """
    if not prompt:
        raise ValueError(f"{name} is empty; it needs at least one token")
    if len(prompt) >= max_context:
        raise ValueError(
            f"{name} has {len(prompt)} tokens, but the model's context is {max_context} "
            "including at least one generated token"
        )
    for position, token in enumerate(prompt):
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ValueError(f"{name}: {token!r} at position {position} is no token id")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}: token id {token} at position {position} is outside the vocabulary "
                f"0..{vocab_size - 1}"
            )


def check_stop_ids(sampling: SamplingParams, *, vocab_size: int, name: str) -> None:
    """Refuse stop ids that can never come. Raises ValueError that begins with `name`."""
    for token in sampling.stop_ids:
        if token >= vocab_size:
            raise ValueError(
                f"{name}: stop id {token} is outside the vocabulary 0..{vocab_size - 1}"
            )
