"""Whole steps of a model under many plans: whether they agree with XLA's, then what they take."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pallas_kernels.implementation import kernel_supports
from pallas_kernels.shapes import ModelShape
from scripts.gpu.budget import Budget
from scripts.gpu.selection import Ops, Subject, select
from scripts.gpu.timed_steps import STEP_OPS, Model, Step, StepTrials, Timing

TIMING_SECONDS = 3.0
"""What timing one choice takes at most, on a GPU."""


class StepRow(NamedTuple):
    """One kind of step under one plan; numbers are None when not found."""

    step: str
    kernels: Ops
    us: float | None
    xla_us: float | None
    """Of the step without kernels, timed side by side."""
    disagreement: float | None
    failure: str | None

    def __str__(self) -> str:
        name = f"{self.step}, {' + '.join(self.kernels) or 'all XLA'}"
        if self.failure:
            return f"{name}\n  {self.failure}"
        if self.us is None or self.xla_us is None:
            return f"{name:<76}{'not timed':>11}"
        return f"{name:<76}{self.us:>11,.0f}{self.us / self.xla_us - 1:>+8.1%}"


class StepChecks:
    """Decode steps of several numbers of rows, and the other kinds of step beside the first."""

    def __init__(
        self,
        model: Model,
        shape: ModelShape,
        budget: Budget,
        say: Callable[[str], None],
        *,
        ops: Collection[str],
        rows: Sequence[int],
        context: int,
        span: int,
        timing: Timing,
    ) -> None:
        """`shape` is the model's, `ops` are the kernels to try where they fit.

        Each row has `context` tokens, `span` of them in its prefill.
        """
        self._shape, self._budget, self._context = shape, budget, context
        supports = kernel_supports()
        fitting = [op for op in ops if supports[op](shape).ok]
        self._ops = {k: tuple(op for op in ops if op in fitting) for k, ops in STEP_OPS.items()}
        self._trials: dict[int, StepTrials] = {}
        self._steps: dict[int, dict[str, Step]] = {}
        for count in rows:
            kinds = STEP_OPS if count == rows[0] else ("decode",)
            steps = {kind: Step(kind, model, count, context, span) for kind in kinds}
            self._steps[count] = steps
            self._trials[count] = StepTrials(steps, timing, say)

    @property
    def failures(self) -> list[str]:
        """What was wrong, so far."""
        return [why for trials in self._trials.values() for why in trials.failures.values()]

    def check(self) -> None:
        """Whether the steps beside one another agree with all their kernels and with none."""
        rows, trials = next(iter(self._trials.items()))
        for kind in self._steps[rows]:
            for ops in ((), self._ops[kind]):
                trials.right(kind, ops)

    def time(self) -> list[StepRow]:
        """Each number of rows with no kernel, one, all, and those that `select` chooses."""
        return [row for rows in self._trials for row in self._timed(rows)]

    def _timed(self, rows: int) -> list[StepRow]:
        ops = {kind: self._ops[kind] for kind in self._steps[rows]}
        times, found = {}, []
        for kind, fitting in ops.items():
            choices = list(dict.fromkeys([(), fitting, *((op,) for op in fitting)]))
            times[kind] = self._side_by_side(rows, kind, choices)
            found += [self._row(rows, kind, choice, times[kind]) for choice in choices]
        if any(by_choice[()] is None for by_choice in times.values()):
            return found

        def times_us(kind: str, wanted: Sequence[Ops]) -> Sequence[float | None]:
            known = times[kind]
            if not all(choice in known for choice in wanted):
                known = self._side_by_side(rows, kind, wanted)
            return [known[choice] for choice in wanted]

        best = select(Subject(self._shape, rows, self._context, ""), ops, times_us).ops
        for kind, fitting in ops.items():
            chosen = tuple(op for op in best if op in fitting)
            if chosen not in times[kind]:
                beside = self._side_by_side(rows, kind, [(), chosen])
                found.append(self._row(rows, kind, chosen, beside))
        return found

    def _side_by_side(
        self, rows: int, kind: str, choices: Sequence[Ops]
    ) -> dict[Ops, float | None]:
        """Microseconds of each choice, or None if it failed or there is no time left for it."""
        trials, name = self._trials[rows], self._steps[rows][kind].name
        allowed = [
            ops
            for ops in choices
            if self._budget.allows(
                f"{name}, {' + '.join(ops) or 'all XLA'}",
                TIMING_SECONDS if trials.seen(kind, ops) else trials.slowest + TIMING_SECONDS,
            )
        ]
        times = dict(zip(allowed, trials.times_us(kind, allowed), strict=True))
        return {ops: times.get(ops) for ops in choices}

    def _row(self, rows: int, kind: str, ops: Ops, times: dict[Ops, float | None]) -> StepRow:
        trials = self._trials[rows]
        return StepRow(
            self._steps[rows][kind].name,
            ops,
            times[ops],
            times[()],
            trials.errors.get((kind, ops)),
            trials.failures.get((kind, ops)),
        )
