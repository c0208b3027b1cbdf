"""Kernels one by one on this machine: right against their XLA forms, then timed beside them."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Device, Implementation
from scripts.gpu.cases import Case, Values
from scripts.gpu.floors import floor_us, speed_of

ROUND_SECONDS = 0.1
"""About what the calls of one round may take."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one case; times are None when not measured."""

    name: str
    error: float | None
    tolerance: float
    kernel_us: float | None = None
    xla_us: float | None = None
    floor_us: float | None = None
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the kernel ran and its error is within tolerance."""
        return self.failure is None and self.error is not None and self.error <= self.tolerance


class KernelCheck:
    """One case as a kernel and as XLA, each compiled once."""

    def __init__(self, case: Case, runs: Implementation, device: Device) -> None:
        speed = speed_of(device.kind)
        floor = None if speed is None else floor_us(case.least_bytes, case.operations, speed)
        self._case = case
        self._kernel, self._xla = case.jitted(runs), case.jitted(Implementation.XLA)
        self.result = Result(case.name, None, case.tolerance, floor_us=floor)
        """What is known so far."""

    def check(self) -> Result:
        """Run both on equal arguments."""
        try:
            want = self._xla(*self._case.arguments(Values(0)))
            got = self._kernel(*self._case.arguments(Values(0)))
            self.result = dataclasses.replace(self.result, error=relative_error(got, want))
        except Exception as failure:  # whatever a compiler or a device comes up with
            self._failed(failure)
        return self.result

    def time(self, rounds: int) -> Result:
        """Best microseconds per call of both, after `check`; a lone round is of one call."""
        try:
            kernel, xla = self._best_us(rounds)
            self.result = dataclasses.replace(self.result, kernel_us=kernel, xla_us=xla)
        except Exception as failure:  # as above
            self._failed(failure)
        return self.result

    def _failed(self, failure: Exception) -> None:
        message = f"{type(failure).__name__}: {str(failure)[:300]}"
        self.result = dataclasses.replace(self.result, failure=message)

    def _best_us(self, rounds: int) -> list[float]:
        callers = [_Caller(function, self._case) for function in (self._kernel, self._xla)]
        calls = [1, 1]
        if rounds > 1:
            calls = [max(1, min(20, int(ROUND_SECONDS / caller.seconds(1)))) for caller in callers]
        times = [
            [caller.seconds(count) for caller, count in zip(callers, calls, strict=True)]
            for _ in range(rounds)
        ]
        return [1e6 * min(column) for column in zip(*times, strict=True)]


class _Caller:
    """Calls a function over and over, its state fed back."""

    def __init__(self, function: Any, case: Case) -> None:
        self._function, self._donated = function, case.donated
        self._arguments = jax.block_until_ready(list(case.arguments(Values(0))))

    def seconds(self, calls: int) -> float:
        """Of one call, on average."""
        start = time.perf_counter()
        outputs = [self._call() for _ in range(calls)]
        jax.block_until_ready((outputs, [self._arguments[index] for index in self._donated]))
        return (time.perf_counter() - start) / calls

    def _call(self) -> Any:
        out, state = self._function(*self._arguments)
        for index in self._donated:
            self._arguments[index] = state
        return out


def relative_error(got: Any, want: Any) -> float:
    """Largest difference over all leaves, each relative to its largest value; NaN is infinite."""
    errors = []
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        error = jnp.max(jnp.abs(one - other)) / jnp.maximum(jnp.max(jnp.abs(other)), 1e-30)
        errors.append(float(jnp.where(jnp.isfinite(error), error, jnp.inf)))
    return max(errors)


HEADER = f"{'case':<44}{'error':>9}{'kernel µs':>11}{'XLA µs':>10}{'floor µs':>10}"


def describe(result: Result) -> str:
    """One row under `HEADER`, and below it what is wrong."""

    def cell(number: float | None, width: int, form: str) -> str:
        return f"{'-' if number is None else format(number, form):>{width}}"

    row = f"{result.name:<44}{cell(result.error, 9, '.1e')}{cell(result.kernel_us, 11, ',.1f')}"
    row += f"{cell(result.xla_us, 10, ',.1f')}{cell(result.floor_us, 10, ',.1f')}"
    if result.failure:
        return f"{row}\n  FAILED: {result.failure}"
    return row if result.ok else f"{row}\n  WRONG: error above {result.tolerance:.0e}"
