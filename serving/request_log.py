"""What became of every request: open ones and the last finished ones."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from k3jax.engine.request import RequestTiming
from serving.reply import Reply

log = logging.getLogger("k3jax.serving.requests")

KEPT = 1000


@dataclass
class RequestRecord:
    """One request; times are `time.monotonic()`."""

    id: str
    prompt_tokens: int
    n: int
    arrived: float = field(default_factory=time.monotonic)
    ended: float | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    timing: RequestTiming | None = None
    first_token: float | None = None
    error: str = ""
    traceparent: str = ""
    """The caller's trace context, well-formed or empty."""

    def update(self, reply: Reply) -> None:
        """Take over what has been generated."""
        self.cached_tokens = reply.cached_tokens
        self.completion_tokens = reply.completion_tokens
        self.finish_reasons = reply.finish_reasons
        self.timing = reply.timing
        if self.first_token is None and self.completion_tokens:
            self.first_token = time.monotonic()

    @property
    def trace_id(self) -> str:
        """By which its caller's trace is found, or nothing."""
        return self.traceparent[3:35]

    @property
    def state(self) -> str:
        """Where it stands: waiting, running or finished."""
        if self.ended is not None:
            return "finished"
        return "waiting" if self.first_token is None else "running"

    @property
    def queue_seconds(self) -> float | None:
        """From arrival until it was admitted to the batch."""
        return None if self.timing is None else max(0.0, self.timing.admitted - self.arrived)

    @property
    def first_token_seconds(self) -> float | None:
        """From arrival until its first token could be sent."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def total_seconds(self) -> float | None:
        """From arrival until its end."""
        return None if self.ended is None else self.ended - self.arrived

    def fields(self) -> dict[str, object]:
        """For a log line; times in milliseconds."""
        times = {
            "queue_ms": self.queue_seconds,
            "ttft_ms": self.first_token_seconds,
            "total_ms": self.total_seconds,
        }
        return {
            "request_id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish": ",".join(self.finish_reasons),
            **{name: round(value * 1e3, 2) for name, value in times.items() if value is not None},
            **({"error": self.error} if self.error else {}),
            **({"trace_id": self.trace_id} if self.trace_id else {}),
        }


class RequestLog:
    """Open requests and the last `kept` finished ones. `on_end` is called for each that ends."""

    def __init__(self, kept: int = KEPT) -> None:
        self._open: OrderedDict[str, RequestRecord] = OrderedDict()
        self._finished: OrderedDict[str, RequestRecord] = OrderedDict()
        self._kept = kept
        self.on_end: Callable[[RequestRecord], None] = lambda record: None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def open(self, record: RequestRecord) -> None:
        """Begin to track a request; one that runs under the same id stays the one to be found."""
        self._open.setdefault(record.id, record)

    def close(self, record: RequestRecord, error: str = "") -> None:
        """The request has ended: write its line."""
        record.error, record.ended = error, time.monotonic()
        if self._open.get(record.id) is record:
            del self._open[record.id]
        self._finished[record.id] = record
        self._finished.move_to_end(record.id)
        while len(self._finished) > self._kept:
            self._finished.popitem(last=False)
        level = logging.WARNING if error else logging.INFO
        log.log(level, "request %s", json.dumps(record.fields()), extra={"fields": record.fields()})
        self.on_end(record)

    def find(self, request_id: str) -> RequestRecord:
        """Raises KeyError, with a sentence, for an unknown id."""
        record = self._open.get(request_id) or self._finished.get(request_id)
        if record is None:
            raise KeyError(f"no request {request_id!r} among the open and last {self._kept} ones")
        return record

    def latest(self, limit: int) -> Iterator[RequestRecord]:
        """Open ones, oldest first, then finished ones, latest first."""
        yield from islice([*self._open.values(), *reversed(list(self._finished.values()))], limit)
