"""Runs every kernel on this machine's GPU: right against XLA first, then timed against it.

Examples:
    python scripts/check_gpu.py                          # K3's shapes, batch 1, 16 and 64
    python scripts/check_gpu.py --rows 1 --only kda_decode --out results
    python scripts/check_gpu.py --interpret              # tiny shapes, interpreted, on a CPU

A row per kernel and workload: largest error against the XLA form relative to the largest value, and
the times of kernel and XLA beside the least the device could take. After them, whole decode steps
of a slice of K3, all XLA and with one kernel more at a time. Exit code 1 when a kernel is wrong or
fails, 2 without a GPU. --out writes check_gpu.json to a folder.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Interpreted kernels wait for one another on threads of XLA's pool, which has one per core.
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Device, Implementation, kernel_supports, plan_kernels
from pallas_kernels.shapes import DECODE_ROWS, NAMED, SMALL, ModelShape
from scripts.gpu.cases import MAKERS, Case, Values, cases
from scripts.gpu.floors import floor_us, speed_of
from scripts.gpu.model_slice import (
    StepProgram,
    new_state,
    random_weights,
    slice_config,
    step_inputs,
)


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
        return self.error is not None and self.error <= self.tolerance


def main(argv: list[str] | None = None) -> int:
    """Check and time what the arguments name; the exit code says whether all is right."""
    options = _parser().parse_args(argv)
    device = Device.current()
    if not options.interpret and device.platform != "gpu":
        print(f"no GPU: JAX runs on {device.kind}; --interpret checks on a CPU", file=sys.stderr)
        return 2
    shape = SMALL if options.interpret else _shape(options)
    runs = Implementation.INTERPRET if options.interpret else Implementation.GPU
    rows = (2,) if options.interpret else tuple(options.rows)
    context = 40 if options.interpret else options.context
    print(f"{device.kind}, jax {jax.__version__}")
    print(f"{'case':<44}{'error':>9}{'kernel µs':>11}{'XLA µs':>10}{'floor µs':>10}")
    results = []
    for count in rows:
        for case in cases(shape, count, context):
            if options.only and case.op not in options.only:
                continue
            result = check(case, runs, device, timed=not options.interpret)
            print(describe(result), flush=True)
            results.append(result)
    steps = [] if options.interpret or options.no_steps else list(_steps(options, device))
    if options.out:
        _write(Path(options.out), device, results, steps)
    wrong = sum(not result.ok for result in results)
    print(f"{len(results) - wrong} of {len(results)} right")
    return 1 if wrong or not results else 0


def check(case: Case, runs: Implementation, device: Device, *, timed: bool) -> Result:
    """Run one case as XLA and as a kernel on equal arguments."""
    speed = speed_of(device.kind)
    floor = None if speed is None else floor_us(case.least_bytes, case.operations, speed)
    try:
        want = case.jitted(Implementation.XLA)(*case.arguments(Values(0)))
        got = case.jitted(runs)(*case.arguments(Values(0)))
        error = relative_error(got, want)
        del got, want
        if not timed:
            return Result(case.name, error, case.tolerance, floor_us=floor)
        times = [best_us(case, which) for which in (runs, Implementation.XLA)]
        return Result(case.name, error, case.tolerance, times[0], times[1], floor)
    except Exception as failure:
        message = f"{type(failure).__name__}: {str(failure)[:300]}"
        return Result(case.name, None, case.tolerance, floor_us=floor, failure=message)


def relative_error(got: Any, want: Any) -> float:
    """Largest difference over all leaves, each relative to its largest value; NaN is infinite."""
    errors = []
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        error = jnp.max(jnp.abs(one - other)) / jnp.maximum(jnp.max(jnp.abs(other)), 1e-30)
        errors.append(float(jnp.where(jnp.isfinite(error), error, jnp.inf)))
    return max(errors)


def best_us(case: Case, runs: Implementation, rounds: int = 5, calls: int = 10) -> float:
    """Microseconds per call, the best of several rounds of calls that feed the state back."""
    arguments = list(case.arguments(Values(0)))
    function = case.jitted(runs)

    def call() -> Any:
        out, state = function(*arguments)
        for index in case.donated:
            arguments[index] = state
        return out

    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        best = min(best, (time.perf_counter() - start) / calls)
    return 1e6 * best


def describe(result: Result) -> str:
    """One row of the table, and below it why a case failed."""

    def cell(number: float | None, width: int, form: str) -> str:
        return f"{'-' if number is None else format(number, form):>{width}}"

    row = f"{result.name:<44}{cell(result.error, 9, '.1e')}{cell(result.kernel_us, 11, ',.1f')}"
    row += f"{cell(result.xla_us, 10, ',.1f')}{cell(result.floor_us, 10, ',.1f')}"
    if result.failure:
        return f"{row}\n  FAILED: {result.failure}"
    return row if result.ok else f"{row}\n  WRONG: error above {result.tolerance:.0e}"


def step_us(config: Any, plan: Any, rows: int, context: int, page: int, weights: Any) -> float:
    """Microseconds of one decode step of a model slice, best of 20."""
    inputs = step_inputs(config, rows, context, 1, page)
    program, state = StepProgram(config, plan), new_state(config, inputs, page)
    best = float("inf")
    for round_number in range(22):
        start = time.perf_counter()
        out, state = program.run(weights, inputs, state)
        jax.block_until_ready(out.tokens)
        if round_number > 1:
            best = min(best, time.perf_counter() - start)
    return 1e6 * best


def _steps(options: argparse.Namespace, device: Device) -> Any:
    config = slice_config(options.layers, options.experts)
    weights = jax.block_until_ready(random_weights(config))
    page = NAMED["k3"].page_size
    print(f"decode step of {options.layers} layers, {options.experts} experts, µs")
    for rows in options.rows:
        for ops in ((), *((op,) for op in kernel_supports()), tuple(kernel_supports())):
            plan = plan_kernels(config, device, dict.fromkeys(ops, "gpu"), measured=())
            name = f"{rows} rows, {' + '.join(ops) or 'all XLA'}"
            try:
                taken = step_us(config, plan, rows, options.context, page, weights)
            except Exception as failure:
                print(f"{name:<60} FAILED: {type(failure).__name__}: {str(failure)[:200]}")
                continue
            print(f"{name:<60}{taken:>10,.0f}", flush=True)
            yield {"rows": rows, "kernels": ops, "us": taken}


def _shape(options: argparse.Namespace) -> ModelShape:
    shape = NAMED[options.model]
    experts = min(shape.experts, options.experts)
    return dataclasses.replace(shape, experts=experts)


def _write(folder: Path, device: Device, results: list[Result], steps: list[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "device": device.kind,
        "jax": jax.__version__,
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "cases": [dataclasses.asdict(result) for result in results],
        "steps": steps,
    }
    path = folder / "check_gpu.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, interpreted")
    parser.add_argument("--model", choices=NAMED, default="k3")
    parser.add_argument("--rows", nargs="+", type=int, default=list(DECODE_ROWS))
    parser.add_argument("--context", type=int, default=8192, help="cached tokens per row")
    parser.add_argument("--experts", type=int, default=64, help="experts of each layer at most")
    parser.add_argument("--layers", type=int, default=4, help="layers of the timed step")
    parser.add_argument("--no-steps", action="store_true", help="leave the whole steps out")
    parser.add_argument("--only", nargs="+", choices=MAKERS, metavar="OP", help=", ".join(MAKERS))
    parser.add_argument("--out", metavar="FOLDER", help="write check_gpu.json there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
