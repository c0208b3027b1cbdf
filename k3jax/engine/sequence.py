"""One choice of a request on its way through the engine, and the steps it takes part in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from k3jax.cache.prefix import PrefixEntry
from k3jax.engine.request import FinishReason, Request, SamplingParams, TokenConstraint

NO_SLOT = -1
"""Read slot of a sequence that starts from nothing."""


class Phase(Enum):
    """Where a sequence stands. A prompt's last one-token span is still prefill."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice. `tokens` are prompt and known output; counts below are in tokens."""

    request: Request
    choice: int
    sampling: SamplingParams
    """The request's, with this choice's seed."""
    arrival: int
    budget: int
    """Tokens it may generate."""
    stop_ids: frozenset[int]
    tokens: list[int]
    keys: list[int]
    """What the prefix cache knows the tokens by: images differ where media tokens do not."""
    constraint: TokenConstraint | None
    leader: Sequence | None = None
    """The first choice, whose prompt this one waits for and shares."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens that dispatched steps have put into the state."""
    pending: int = 0
    """Sampled tokens that the host has not seen yet."""
    pages: list[int] = field(default_factory=list)
    lane: int = -1
    slot: int = NO_SLOT
    """Receives the state; held by the sequence."""
    source: int = NO_SLOT
    """Holds the state to go on from: `slot`, a checkpoint (held once more), or NO_SLOT."""
    copy: tuple[int, int] | None = None
    """A partly filled page to go on from (held) and the page of ours to copy it to."""
    checkpoints: list[int] = field(default_factory=list)
    """Token counts, rising, at which prefill stops to leave a checkpoint."""
    cached_tokens: int | None = None
    prompt_done: bool = False
    """The first token after the prompt has been seen."""
    last_plan: StepPlan | None = None
    preemptions: int = 0
    submitted: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    num_prompt: int = field(init=False)
    """Length of the prompt."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, seen or not."""
        return len(self.tokens) - self.num_prompt + self.pending

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first, larger is preempted first."""
        return self.request.priority, self.arrival

    @property
    def may_decode(self) -> bool:
        """Whether the next token can be asked for now.

        A constraint has to see the last token before it can say what may follow.
        """
        if self.phase is not Phase.DECODE or self.num_generated >= self.budget:
            return False
        return self.constraint is None or self.pending == 0

    @property
    def next_stop(self) -> int:
        """Where the current prefill span has to end at the latest."""
        return next((at for at in self.checkpoints if at > self.computed), len(self.tokens))


@dataclass(eq=False, slots=True)
class Row:
    """One sequence's part in a step, as it was when the step was planned."""

    sequence: Sequence
    start: int
    length: int
    read_slot: int
    write_slot: int
    emits: bool
    decodes: bool
    """The only token of the span is the one that this lane sampled last; it is on the device."""
    copy: tuple[int, int] | None = None
    generated: int = 0
    """Tokens generated before the one that this row samples."""


@dataclass(frozen=True)
class Publication:
    """A prefix to put into the tree when its step has run; holds its pages and its slot."""

    entry: PrefixEntry


@dataclass(eq=False, slots=True)
class StepPlan:
    """One step: its rows, padded to a bucket of `num_rows` × `width` tokens."""

    rows: list[Row]
    num_rows: int
    width: int
    released_pages: list[int] = field(default_factory=list)
    """Held until the step has been dispatched."""
    released_slots: list[int] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    broken: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences whose constraint raised when it was asked what may come."""
    absorbed: bool = False

    @property
    def context(self) -> int:
        """Tokens of the longest sequence after the step."""
        return max(row.start + row.length for row in self.rows)


class Emission(NamedTuple):
    """A token that a step sampled for a sequence, and whether it ended it."""

    sequence: Sequence
    row: int
    """Index in the step's plan."""
    token: int
    finish_reason: FinishReason | None
