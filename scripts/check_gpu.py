"""Runs every kernel and whole steps on this machine's GPU: right against XLA, then timed beside it.

Examples:
    python scripts/check_gpu.py                          # K3's shapes, batch 1, 16 and 64
    python scripts/check_gpu.py --minutes 4 --rows 1 --out results
    python scripts/check_gpu.py --interpret              # tiny shapes, interpreted, on a CPU

In this order: what the machine is; every kernel against its XLA form; decode, prefill and
verification steps of a slice of K3 with all kernels against all XLA; times of every kernel, of XLA,
and the least that the device could take; times of the steps with no kernel, one, all, and the
fastest choice. Checks always run; what is timed ends when --minutes are nearly over, and what was
left out is said.
Errors of kernels are relative to the largest value; steps may differ by 0.2 in log-probability.

Exit code 1 when something is wrong or fails, 2 without a Hopper GPU. --out writes check_gpu.json to
a folder.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Interpreted kernels wait for one another on threads of XLA's pool, which has one per core.
os.environ.setdefault("NPROC", "16")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from pallas_kernels.implementation import Device, Implementation
from pallas_kernels.shapes import DECODE_ROWS, NAMED, SMALL, ModelShape
from scripts.gpu.budget import Budget
from scripts.gpu.cases import MAKERS, cases
from scripts.gpu.kernel_checks import HEADER, KernelCheck, describe
from scripts.gpu.machine import about_machine, memory, unfit
from scripts.gpu.model_slice import held_bytes, random_weights, slice_config, small_config
from scripts.gpu.step_cases import MODELS
from scripts.gpu.step_checks import StepChecks, StepRow
from scripts.gpu.timed_steps import Model, Timing

KERNEL_SECONDS = 4.0
"""What timing one kernel and its XLA form takes at most, on a GPU."""


def main(argv: list[str] | None = None) -> int:
    """Check and time what the arguments name; the exit code says whether all is right."""
    options = _parser().parse_args(argv)
    if options.interpret:
        options.rows, options.context, options.span = [2], 40, 9
    budget = Budget(options.minutes)
    try:
        device = Device.current()
    except RuntimeError as error:
        print(f"JAX finds no device: {error}", file=sys.stderr)
        return 2
    about = about_machine()
    print(", ".join(f"{name} {value}" for name, value in about.items() if value is not None))
    reason = None if options.interpret else unfit(device) or _too_large(options)
    if reason:
        print(f"{reason}; --interpret checks on a CPU", file=sys.stderr)
        return 2
    kernels = [
        KernelCheck(case, _runs(options), device)
        for rows in options.rows
        for case in cases(_shape(options), rows, options.context)
        if not options.only or case.op in options.only
    ]
    print(f"{HEADER}\nright against XLA?", flush=True)
    for kernel in kernels:
        print(describe(kernel.check()), flush=True)
    steps = _steps(options, device, budget) if _has_steps(options) else None
    if steps:
        steps.check()
    _said_memory(budget)
    print(f"how fast?\n{HEADER}", flush=True)
    for kernel in kernels:
        if kernel.result.ok and budget.allows(kernel.result.name, KERNEL_SECONDS):
            print(describe(kernel.time(1 if options.interpret else 5)), flush=True)
    timed = steps.time() if steps else []
    for row in timed:
        print(row)
    _said_memory(budget)
    for name in budget.skipped:
        print(f"no time left for: {name}")
    wrong = [k.result.name for k in kernels if not k.result.ok] + (steps.failures if steps else [])
    if options.out:
        _write(Path(options.out), about, kernels, timed, wrong, budget)
    print(f"{sum(kernel.result.ok for kernel in kernels)} of {len(kernels)} kernels right", end="")
    print(f", {len(steps.failures)} wrong steps" if steps else "")
    return 1 if wrong or not kernels else 0


def _has_steps(options: argparse.Namespace) -> bool:
    return not options.no_steps and (options.interpret or options.model in MODELS)


def _config(options: argparse.Namespace) -> K3Config:
    if options.interpret:
        return small_config()
    full = MODELS[options.model]()
    return slice_config(options.layers, min(options.experts, full.num_experts), full=full)


def _too_large(options: argparse.Namespace) -> str | None:
    """Why weights and state of the steps do not fit the device, or None."""
    limit = memory()[1]
    if limit is None or not _has_steps(options):
        return None
    page = NAMED[options.model].page_size
    needed = held_bytes(_config(options), max(options.rows), options.context, page)
    if needed < 0.7 * limit:
        return None
    return (
        f"the steps hold {needed / 1e9:.0f} GB and need room to work, of {limit / 1e9:.0f} GB: "
        "fewer --layers, --experts, --rows or less --context"
    )


def _steps(options: argparse.Namespace, device: Device, budget: Budget) -> StepChecks:
    config = _config(options)
    params = jax.block_until_ready(random_weights(config))
    shape = _shape(options)
    model = Model(params, config, jnp.dtype("bfloat16"), shape.page_size, _runs(options), device)
    print(f"steps of {config.num_layers} layers with {config.num_experts} experts", flush=True)
    return StepChecks(
        model,
        shape,
        budget,
        lambda text: print(f"  {text}", flush=True),
        ops=options.only or MAKERS,
        rows=options.rows,
        context=options.context,
        span=options.span,
        timing=Timing(1, 1) if options.interpret else Timing(7, 10),
    )


def _shape(options: argparse.Namespace) -> ModelShape:
    shape = SMALL if options.interpret else NAMED[options.model]
    return dataclasses.replace(shape, experts=min(shape.experts, options.experts))


def _runs(options: argparse.Namespace) -> Implementation:
    return Implementation.INTERPRET if options.interpret else Implementation.GPU


def _said_memory(budget: Budget) -> None:
    peak, limit = memory()
    known = f", at most {peak / 1e9:.1f} of {limit / 1e9:.1f} GB" if peak and limit else ""
    print(f"[{budget.used:.0f} s{known}]", flush=True)


def _write(
    folder: Path,
    about: dict[str, Any],
    kernels: Sequence[KernelCheck],
    steps: Sequence[StepRow],
    wrong: Sequence[str],
    budget: Budget,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        **about,
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "seconds": round(budget.used),
        "peak_bytes": memory()[0],
        "cases": [dataclasses.asdict(kernel.result) for kernel in kernels],
        "steps": [row._asdict() for row in steps],
        "wrong": list(wrong),
        "skipped": budget.skipped,
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
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default 8)")
    parser.add_argument("--model", choices=NAMED, default="k3")
    parser.add_argument("--rows", nargs="+", type=int, default=list(DECODE_ROWS))
    parser.add_argument("--context", type=int, default=8192, help="cached tokens per row")
    parser.add_argument("--experts", type=int, default=64, help="experts of each layer at most")
    parser.add_argument("--layers", type=int, default=4, help="layers of the steps")
    parser.add_argument("--span", type=int, default=512, help="tokens of the prefill step")
    parser.add_argument(
        "--no-steps", action="store_true", help="leave whole steps out, as --only does"
    )
    parser.add_argument("--only", nargs="+", choices=MAKERS, metavar="OP", help=", ".join(MAKERS))
    parser.add_argument("--out", metavar="FOLDER", help="write check_gpu.json there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
