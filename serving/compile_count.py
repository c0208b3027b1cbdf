"""Counts compilations, to prove that none happens once requests are taken."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCount:
    """Programs that this process has compiled since this object was made, cached ones included."""

    def __init__(self) -> None:
        self.total = 0
        self._before_ready: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def note_ready(self) -> None:
        """The start-up is over."""
        self._before_ready = self.total

    @property
    def after_ready(self) -> int:
        """Since then; 0 before."""
        return 0 if self._before_ready is None else self.total - self._before_ready

    def _listen(self, event: str, duration_secs: float, **kwargs: object) -> None:
        self.total += event == _EVENT
