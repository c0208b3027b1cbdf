"""Chooses kernels by the time of whole steps: the best one more, until none makes them faster."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pallas_kernels.measured import Measured, worthwhile
from pallas_kernels.shapes import ModelShape

Ops = tuple[str, ...]
StepTimes = Callable[[str, Sequence[Ops]], Sequence[float | None]]
"""Microseconds of a kind of step with each of several choices of kernels, timed side by side; None
for one that failed."""


class Subject(NamedTuple):
    """What every measurement of a selection is about."""

    shape: ModelShape
    batch: int
    context: int
    about: str


class Selection(NamedTuple):
    """The kernels that make steps faster, in the order they were chosen, and why."""

    ops: Ops
    measured: tuple[Measured, ...]
    """Of every op and kind of step that has it: for a chosen one from when it was chosen, for any
    other beside all that were chosen."""


def select(
    subject: Subject,
    step_ops: Mapping[str, Ops],
    times_us: StepTimes,
) -> Selection:
    """Greedy forward selection over the ops of each kind of step.

    An op that fails in one kind of step is not chosen, and has no measurements. Raises ValueError
    where a step fails without any kernel.
    """
    best: Ops = ()
    rows: dict[str, tuple[Measured, ...]] = {}
    left = list(dict.fromkeys(op for ops in step_ops.values() for op in ops))
    while left:
        tried = _trials(subject, step_ops, times_us, best, left)
        left = [op for op in left if tried[op]]
        rows |= tried
        faster = [op for op in left if worthwhile(rows[op])]
        if not faster:
            break
        winner = min(faster, key=lambda op: _ratio(rows[op]))
        best += (winner,)
        left.remove(winner)
    return Selection(best, tuple(row for op in rows for row in rows[op]))


def _trials(
    subject: Subject,
    step_ops: Mapping[str, Ops],
    times_us: StepTimes,
    best: Ops,
    left: Sequence[str],
) -> dict[str, tuple[Measured, ...]]:
    """Every op that is left, beside the best so far, in every kind of step that has it."""
    trials: dict[str, tuple[Measured, ...]] = dict.fromkeys(left, ())
    failed: set[str] = set()
    for kind, ops in step_ops.items():
        tried = [op for op in left if op in ops and op not in failed]
        if not tried:
            continue
        shared = tuple(op for op in best if op in ops)
        without, *times = times_us(kind, [shared, *((*shared, op) for op in tried)])
        if without is None:
            raise ValueError(f"the {kind} step fails with {' + '.join(shared) or 'XLA alone'}")
        for op, taken in zip(tried, times, strict=True):
            if taken is None:
                failed.add(op)
                continue
            shape, batch, context, about = subject
            row = Measured(op, kind, shape, batch, context, without, taken, about)
            trials[op] = (*trials[op], row)
    return {op: () if op in failed else steps for op, steps in trials.items()}


def _ratio(steps: Sequence[Measured]) -> float:
    """Of times with the kernel and without, over all kinds of step."""
    return math.prod(step.gpu_us / step.xla_us for step in steps)
