"""Tells compiling apart from running, so that a rate says what a warm program does."""

from __future__ import annotations

import time

import jax

_PHASES = ("/jax/core/compile/", "/jax/compilation_cache/cache_retrieval")


class CompileClock:
    """Seconds that this process has spent tracing, lowering and compiling since `start`.

    JAX reports durations, some of them inside others; overlapping ones count once. Use as a
    context manager, which stops listening at the end.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def seconds(self) -> float:
        """Total so far."""
        return sum(end - start for start, end in self._spans)

    def running(self) -> float:
        """A clock that stands still while programs compile."""
        return time.perf_counter() - self.seconds

    def _listen(self, event: str, duration_secs: float, **kwargs: object) -> None:
        if not event.startswith(_PHASES):
            return
        end = time.perf_counter()
        start = end - duration_secs
        while self._spans and self._spans[-1][1] > start:
            start = min(start, self._spans.pop()[0])
        self._spans.append((start, end))
