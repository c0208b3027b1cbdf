"""Whether the service takes requests, why not, and what its start-up did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serving.rich_status import Unavailable


@dataclass
class Phase:
    """One part of the start-up; `bytes` is what it read or reserved, 0 where it did neither."""

    name: str
    seconds: float = 0.0
    bytes: int = 0
    note: str = ""


class ServiceState:
    """Starts not ready. Whoever is interested in changes sets `on_change`."""

    def __init__(self, *, on_phase: Callable[[Phase], None] = lambda phase: None) -> None:
        self.started = time.time()
        self.phases: list[Phase] = []
        self.ready = False
        self.reason = "starting"
        self.on_change: Callable[[bool], None] = lambda ready: None
        self._on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a part of the start-up; it counts, and is reported, once it has ended well."""
        phase = Phase(name)
        start = time.perf_counter()
        self.reason = f"starting: {name}"
        yield phase
        phase.seconds = time.perf_counter() - start
        self.phases.append(phase)
        self._on_phase(phase)

    def set_ready(self) -> None:
        """Take requests."""
        self._set(True, "")

    def set_not_ready(self, reason: str) -> None:
        """Refuse new requests, telling why."""
        self._set(False, reason)

    def check(self) -> None:
        """Raise Unavailable unless requests are taken."""
        if not self.ready:
            raise Unavailable(f"the service takes no requests: {self.reason}")

    def _set(self, ready: bool, reason: str) -> None:
        changed = ready != self.ready
        self.ready, self.reason = ready, reason
        if changed:
            self.on_change(ready)
