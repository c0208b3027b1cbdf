"""What happens between loading and readiness: compile, see that memory suffices, try requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from k3jax.engine.engine import Engine
from serving.memory import MemoryPlan, program_bytes, size
from serving.readiness import Limits, Probes
from serving.worker import Worker

Say = Callable[[str], None]

STEP = "largest step"
TOWER = "vision tower"


class WarmUp:
    """Warms one worker up; `say` gets a line for each program and each representative request."""

    def __init__(self, worker: Worker, engine: Engine, plan: MemoryPlan, say: Say) -> None:
        self._worker, self._engine, self._say = worker, engine, say
        self._plan = plan
        self._current = ("", "")
        self._since = 0.0
        self._bytes: int | None = None

    async def run(self) -> MemoryPlan:
        """The plan with what the programs want.

        Raises NotEnoughMemory before a program runs for which there is no room, ProbeFailed for a
        request that does not do what it should.
        """
        settings = self._engine.settings
        with self._worker.state.phase("compile") as phase:
            count = await self._worker.loop.call(lambda _: self._compile())
            phase.note = f"{count} programs"
        with self._worker.state.phase("probes") as phase:
            limits = Limits(
                max_context=settings.max_context,
                max_rows=settings.max_rows,
                page_size=settings.page_size,
                prefix_cache=settings.prefix_cache,
                vocab_size=self._engine.config.vocab_size,
            )
            probes = Probes(
                self._worker.loop, self._worker.constraints, limits, self._worker.images
            )
            names = await probes.run(lambda name, seconds: self._line("", name, seconds))
            phase.note = f"{len(names)} kinds of request"
        return self._plan

    def _compile(self) -> int:
        """On the engine's thread; returns how many programs there are."""
        images = self._worker.images
        grids = [] if images is None else images.grids(self._engine.settings.max_context)
        count = len(grids)

        def progress(name: str, number: int, total: int) -> None:
            nonlocal count
            count = len(grids) + total
            self._next(name, f"{number + 1}/{count}")

        self._engine.warm_up(
            progress, compiled=lambda name, analysis: self._compiled(STEP, analysis)
        )
        for number, grid in enumerate(grids, count - len(grids) + 1):
            assert images is not None
            self._next(f"images of {grid[1] * grid[2]} patches", f"{number}/{count}")
            self._compiled(TOWER, images.memory(grid))
            images.run(grid)
        self._next("", "")
        return count

    def _compiled(self, kind: str, analysis: Any) -> None:
        """Count a program's memory before it runs."""
        self._bytes = program_bytes(analysis)
        self._plan = self._plan.with_program(kind, self._bytes)
        self._plan.check()

    def _next(self, name: str, number: str) -> None:
        """The program before has run; now comes another one."""
        now = time.perf_counter()
        if self._current[0]:
            self._line(self._current[1], self._current[0], now - self._since, self._bytes)
        self._current, self._since, self._bytes = (name, number), now, None

    def _line(self, number: str, name: str, seconds: float, amount: int | None = None) -> None:
        text = "" if amount is None else size(amount)
        self._say(f"  {number:>10} {seconds:>7.1f} s {text:>9}  {name}".rstrip())
