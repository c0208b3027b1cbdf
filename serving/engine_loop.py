"""The one thread that owns the device, and the asyncio side that talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from k3jax.engine.engine import CacheChange, QueueFull, StepFailed
from k3jax.engine.request import FinishReason, Request, TokenEvent
from k3jax.engine.stats import EngineStats

log = logging.getLogger("k3jax.serving.engine")

MAX_FAILURES = 3
"""Failed steps in a row after which the engine is given up."""

MAX_UNREAD = 4096
"""Events that a request's reader may lag behind before the request is aborted."""


class EngineLike(Protocol):
    """What the loop asks of an engine; see `k3jax.engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...  # noqa: D102
    def submit(self, request: Request) -> None: ...  # noqa: D102
    def abort(self, request_id: str) -> bool: ...  # noqa: D102
    def step(self) -> list[TokenEvent]: ...  # noqa: D102
    def stats(self) -> EngineStats: ...  # noqa: D102
    def flush_cache(self) -> None: ...  # noqa: D102
    def drain_cache_changes(self) -> list[CacheChange]: ...  # noqa: D102


class EngineFailed(RuntimeError):
    """A step of the engine failed, and with it every request that was in it."""


class RequestFailed(RuntimeError):
    """The engine ended this request, and no other, because its constraint raised."""


class SlowReader(RuntimeError):
    """Whoever reads a request's events does not keep up."""


class EventStream:
    """The events of one request; read it on the event loop, and close it in any case."""

    def __init__(self, request: Request, close: Callable[[EventStream], None]) -> None:
        self.request = request
        self.arrived = time.monotonic()
        self._close = close
        self._unread: deque[TokenEvent] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._open_choices = request.n
        self.started = False
        """Something has been generated."""
        self._failures_before: int | None = None
        """Failed steps before the engine took the request over; None until then."""

    @property
    def ended(self) -> bool:
        """The engine is done with the request."""
        return self._error is not None or self._open_choices == 0

    async def next(self) -> list[TokenEvent]:
        """All events that have not been read, at least one, waiting for it if need be.

        Raises ValueError or QueueFull of `Engine.submit`, EngineFailed, RequestFailed, or
        SlowReader.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        events = list(self._unread)
        self._unread.clear()
        return events

    def close(self) -> None:
        """Abort the request unless it has ended, and forget it."""
        self._close(self)

    def _push(self, event: TokenEvent) -> None:
        self._unread.append(event)
        self.started = True
        self._open_choices -= event.finish_reason is not None
        self._news.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._news.set()

    @property
    def _unread_events(self) -> int:
        return len(self._unread)


class EngineLoop:
    """Runs an engine on a thread of its own.

    Everything but `start` belongs to the event loop that called `start`. Requests, aborts and other
    commands go through one inbox, so they reach the engine in the order they were given, all
    between two steps. When a step fails, every request that the engine had fails with EngineFailed.
    After several failures in a row, or one that the engine does not know how to survive, `failure`
    is set, nothing more is accepted, and `on_failure` is called once.
    """

    def __init__(self, engine: EngineLike, *, max_unread: int = MAX_UNREAD) -> None:
        self._engine, self._max_unread = engine, max_unread
        self._thread = threading.Thread(target=self._run, name="k3jax-engine", daemon=True)
        self._inbox: list[Callable[[], object]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._streams: dict[str, EventStream] = {}
        self._stopped = asyncio.Event()
        self._failures = 0
        self._failures_in_a_row = 0
        self.failure: EngineFailed | None = None
        self.stats: EngineStats = engine.stats()
        """As of the last step or `call`."""
        self.last_output = time.monotonic()
        """When the engine last finished a step."""
        self.on_failure: Callable[[EngineFailed], None] = lambda failure: None
        self.on_step: Callable[[Sequence[TokenEvent], float], None] = lambda events, seconds: None
        """Called with a step's events and its wall seconds."""
        self.on_cache_changes: Callable[[Sequence[CacheChange]], None] = lambda changes: None

    def start(self) -> None:
        """Begin to run, reporting to the current event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout: float = 10.0) -> None:
        """End the thread after what it is doing; open requests fail.

        After `timeout` seconds it is left alone, to die with the process: compiling takes minutes.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), timeout)

    @property
    def open_requests(self) -> int:
        """Requests whose stream has not been closed."""
        return len(self._streams)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of requests that have produced nothing yet."""
        return sum(
            len(stream.request.prompt)
            for stream in self._streams.values()
            if not (stream.started or stream.ended)
        )

    def submit(self, request: Request) -> EventStream:
        """Hand a request to the engine; what it refuses comes out of the stream.

        Raises EngineFailed, and ValueError for an id that is in use.
        """
        if self.failure is not None:
            raise self.failure
        if request.id in self._streams:
            raise ValueError(f"request id {request.id!r} is in use")
        stream = EventStream(request, self._closed)
        self._streams[request.id] = stream
        self._post(lambda: self._submit(stream))
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request with reason `abort`; False if no such request is open."""
        stream = self._streams.get(request_id)
        if stream is None or stream.ended:
            return False
        self._post(lambda: self._engine.abort(request_id))
        return True

    async def call(self, function: Callable[[EngineLike], Any]) -> Any:
        """Run a function on the engine's thread between two steps, and return what it returns.

        `stats` then shows what it did. What it raises is raised here and does not stop the engine.
        Raises EngineFailed.
        """
        if self.failure is not None:
            raise self.failure
        result: Future[Any] = Future()

        def command() -> None:
            try:
                value = function(self._engine)
                self._report(self._refresh, self._engine.stats())
                result.set_result(value)
            except Exception as error:
                result.set_exception(error)

        self._post(command)
        waiting = asyncio.wrap_future(result)
        while not waiting.done():
            await asyncio.wait((waiting,), timeout=1.0)
            if self.failure is not None and not waiting.done():
                raise self.failure
        return waiting.result()

    def _closed(self, stream: EventStream) -> None:
        if self._streams.get(stream.request.id) is stream:
            del self._streams[stream.request.id]
            if not stream.ended:
                self._post(lambda: self._engine.abort(stream.request.id))

    def _post(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._one_round():
                pass
            failure = EngineFailed("the engine was stopped")
        except Exception as error:
            log.exception("the engine failed")
            failure = EngineFailed(f"the engine failed: {error or type(error).__name__}")
        self._report(self._ended, failure)

    def _one_round(self) -> bool:
        with self._wake:
            while not (self._inbox or self._stopping or self._engine.has_work):
                self._wake.wait()
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        events: list[TokenEvent] = []
        start = time.perf_counter()
        if self._engine.has_work:
            events = self._step()
        seconds = time.perf_counter() - start
        changes = self._engine.drain_cache_changes()
        self._report(self._distribute, events, changes, self._engine.stats(), seconds)
        return True

    def _step(self) -> list[TokenEvent]:
        try:
            events = self._engine.step()
        except StepFailed as error:
            log.exception("a step failed")
            self._failures += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES:
                raise
            self._report(self._step_failed, self._failures, error)
            return []
        self._failures_in_a_row = 0
        return events

    def _submit(self, stream: EventStream) -> None:
        try:
            self._engine.submit(stream.request)
            stream._failures_before = self._failures
        except (ValueError, QueueFull) as error:
            self._report(stream._fail, error)

    def _report(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the event loop, which may be gone at interpreter exit."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _step_failed(self, failures: int, error: StepFailed) -> None:
        for stream in self._streams.values():
            before = stream._failures_before
            if before is not None and before < failures:
                stream._fail(EngineFailed(f"the engine failed: {error}"))

    def _refresh(self, stats: EngineStats) -> None:
        self.stats = stats

    def _distribute(
        self,
        events: list[TokenEvent],
        changes: list[CacheChange],
        stats: EngineStats,
        seconds: float,
    ) -> None:
        self.stats = stats
        self.last_output = time.monotonic()
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.finish_reason is FinishReason.ERROR:
                stream._fail(RequestFailed(event.error))
                continue
            stream._push(event)
            if stream._unread_events > self._max_unread and not stream.ended:
                stream._fail(SlowReader(f"{self._max_unread} tokens of the request were not read"))
                self._post(lambda request_id=event.request_id: self._engine.abort(request_id))
        self.on_step(events, seconds)
        if changes:
            self.on_cache_changes(changes)

    def _ended(self, failure: EngineFailed) -> None:
        self.failure = failure
        for stream in self._streams.values():
            stream._fail(failure)
        self._stopped.set()
        if not self._stopping:
            self.on_failure(failure)
