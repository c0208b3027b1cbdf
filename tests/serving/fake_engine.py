"""An engine computed by hand: it answers from a script, and can crash, stall and refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from k3jax.engine.engine import CacheChange, QueueFull, StepFailed
from k3jax.engine.request import (
    FinishReason,
    Request,
    RequestTiming,
    TokenEvent,
    TokenLogprobs,
)
from k3jax.engine.stats import EngineStats

Script = Callable[[Request, int], Sequence[int]]


def count_up(request: Request, choice: int) -> list[int]:
    """Token ids that depend on the prompt's length and the choice, without end."""
    return [(len(request.prompt) + choice + i) % 251 for i in range(request.sampling.max_tokens)]


@dataclass
class _Running:
    request: Request
    scripts: list[Sequence[int]]
    submitted: float
    admitted: float = 0.0
    first: float = 0.0
    sent: int = 0
    cached: int = 0
    open_choices: set[int] = field(default_factory=set)


class FakeEngine:
    """Follows the engine's interface: one token per running choice and step.

    Attributes:
        step_seconds: how long a step takes; assign it at any time.
        crash_at: the step that raises something nobody expects.
        fail_at: the steps that fail as the engine says they can.
        break_at: the step that ends request `broken` because its constraint raised.
        remember: finished sequences become resumable prefixes, as with an ideal cache.
        hold: while set, nothing is admitted, as in a long prefill.
        threads: every thread that called it.
    """

    def __init__(
        self,
        script: Script = count_up,
        *,
        eos: Sequence[int] = (),
        max_rows: int = 16,
        max_waiting: int = 1024,
        step_seconds: float = 0.0,
        crash_at: int | None = None,
        fail_at: Collection[int] = (),
        break_at: int | None = None,
        remember: bool = False,
    ) -> None:
        self.script, self.eos = script, frozenset(eos)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.step_seconds, self.crash_at, self.fail_at = step_seconds, crash_at, fail_at
        self.break_at, self.remember = break_at, remember
        self.hold = threading.Event()
        self.steps = 0
        self.threads: set[int] = set()
        self.aborted: list[str] = []
        self._waiting: list[_Running] = []
        self._running: dict[str, _Running] = {}
        self._pending: list[TokenEvent] = []
        self._prefixes: set[tuple[int, ...]] = set()
        self._changes: list[CacheChange] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._pending)

    def submit(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if len(self._waiting) >= self.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests are waiting")
        scripts = [self.script(request, choice) for choice in range(request.n)]
        running = _Running(request, scripts, time.monotonic())
        running.open_choices = set(range(request.n))
        prompt = request.prompt
        running.cached = max((len(p) for p in self._prefixes if prompt[: len(p)] == p), default=0)
        self._waiting.append(running)

    def abort(self, request_id: str) -> bool:
        self.threads.add(threading.get_ident())
        found = self._running.pop(request_id, None)
        for waiting in self._waiting:
            if waiting.request.id == request_id:
                found = waiting
        if found is None:
            return False
        self._waiting = [entry for entry in self._waiting if entry is not found]
        self.aborted.append(request_id)
        for choice in sorted(found.open_choices):
            self._pending.append(self._event(found, choice, None, FinishReason.ABORT))
        return True

    def step(self) -> list[TokenEvent]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps in self.fail_at:
            self._running.clear()
            self._waiting.clear()
            raise StepFailed("out of memory")
        if self.steps == self.crash_at:
            raise RuntimeError("device lost")
        if self.steps == self.break_at:
            entry = self._running.pop("broken")
            event = self._event(entry, 0, None, FinishReason.ERROR)
            self._pending.append(event._replace(error="its constraint raised"))
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while not self.hold.is_set() and self._waiting and len(self._running) < self.max_rows:
            entry = self._waiting.pop(0)
            entry.admitted = time.monotonic()
            self._running[entry.request.id] = entry
        if self.hold.is_set() and not self._running:
            time.sleep(0.002)
        events, self._pending = self._pending, []
        for entry in list(self._running.values()):
            events.extend(self._advance(entry))
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(len(entry.request.prompt) for entry in self._waiting),
            pages_total=100,
            pages_free=0,
            pages_running=len(self._running),
            slots_total=20,
            slots_free=20 - len(self._running),
            checkpoints=0,
            queries=0,
            hits=0,
            query_tokens=0,
            hit_tokens=0,
            misses={"no_prefix": 0},
            evictions={},
            preemptions=0,
            steps=self.steps,
            state_bytes=4096,
        )

    def flush_cache(self) -> None:
        self._changes.clear()

    def drain_cache_changes(self) -> list[CacheChange]:
        events, self._changes = self._changes, []
        return events

    def store(self, tokens: Sequence[int]) -> None:
        """Make a prefix resumable, which is told with the next round."""
        self._prefixes.add(tuple(tokens))
        self._changes.append(CacheChange(tuple(tokens), stored=True))

    def _advance(self, entry: _Running) -> list[TokenEvent]:
        events = []
        entry.first = entry.first or time.monotonic()
        limit = entry.request.sampling.max_tokens
        for choice in sorted(entry.open_choices):
            script = entry.scripts[choice]
            token = script[entry.sent] if entry.sent < min(len(script), limit) else None
            last = entry.sent + 1 >= min(len(script), limit)
            reason = FinishReason.LENGTH if last else None
            stops = {*entry.request.sampling.stop_ids}
            if not entry.request.sampling.ignore_eos:
                stops |= self.eos
            if token in stops:
                reason = FinishReason.STOP
            events.append(self._event(entry, choice, token, reason))
            if reason is not None:
                entry.open_choices.discard(choice)
        entry.sent += 1
        if not entry.open_choices:
            del self._running[entry.request.id]
            if self.remember:
                self.store((*entry.request.prompt, *entry.scripts[0][: entry.sent]))
        return events

    def _event(
        self, entry: _Running, choice: int, token: int | None, reason: FinishReason | None
    ) -> TokenEvent:
        now = time.monotonic()
        logprobs = None
        if token is not None and entry.request.sampling.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(entry.request.sampling.logprobs))
            logprobs = TokenLogprobs(-0.5, top)
        timing = RequestTiming(entry.submitted, entry.admitted, entry.first, now)
        return TokenEvent(
            request_id=entry.request.id,
            choice=choice,
            token=token,
            logprobs=logprobs,
            finish_reason=reason,
            prompt_tokens=len(entry.request.prompt),
            cached_tokens=entry.cached,
            timing=timing if reason is not None else None,
        )
