"""How much of a time limit is left, and what had to be left out for it."""

import time
from collections.abc import Callable


class Budget:
    """Minutes from now on."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock, self._start = clock, clock()
        self._seconds = 60 * minutes
        self.skipped: list[str] = []
        """What `allows` refused."""

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def allows(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left for it; if not, it is noted as skipped."""
        if self.used + seconds <= self._seconds:
            return True
        self.skipped.append(what)
        return False
