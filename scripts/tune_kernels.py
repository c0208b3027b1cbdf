"""Times the engine's own steps with and without each kernel on this GPU, for the kernel plan.

Examples:
    python scripts/tune_kernels.py WEIGHTS --batch 1,16 --context 8192
    python scripts/tune_kernels.py --shape k3 --layers 4 --experts 64 --dry-run
    python scripts/tune_kernels.py --interpret --out FOLDER     # the machinery alone, on a CPU

For every batch and context: decode steps of so many rows, steps that verify three drafts in each,
and a prefill step of one row's span (or those of them that --steps names).
First everything is XLA, then each kernel is tried beside the best so far, and the one that makes
the steps fastest stays, until none makes one faster by 2 % without making another slower. A step
that fails, or whose answer is not that of XLA, is reported and not chosen. What was measured goes
to pallas_kernels/tuned, one file per kind of device, where plan_kernels finds it; what the file
holds of other models and workloads stays. WEIGHTS is a folder or k3-nano; --shape takes some layers
of a released model with random weights and stands for all of it.

Exit code 1 when a kernel failed or was wrong, 2 without a Hopper GPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Interpreted kernels wait for one another on threads of XLA's pool, which has one per core.
os.environ.setdefault("NPROC", "16")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from k3jax.bundled import weights_folder
from k3jax.engine.kernel_plan import model_shape
from k3jax.weights import load_model
from pallas_kernels.implementation import (
    Device,
    Implementation,
    device_rule,
    kernel_supports,
    runs_kernels,
)
from pallas_kernels.measured import FOLDER, measured_steps, merged, write_measured
from pallas_kernels.shapes import ModelShape
from scripts.gpu.model_slice import random_weights, slice_config, small_config
from scripts.gpu.selection import Selection, Subject, select
from scripts.gpu.step_cases import MODELS
from scripts.gpu.timed_steps import STEP_OPS, Model, Step, StepTrials, Timing


class Tuned(NamedTuple):
    """What came of one workload."""

    batch: int
    context: int
    selection: Selection
    failures: dict[str, str]
    """By step and kernels."""


def main(argv: list[str] | None = None) -> int:
    """Tune what the arguments name; see the module's text for the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    _check(parser, options)
    device = Device.current()
    if not options.interpret and not runs_kernels(device):
        print(f"{device_rule(device)}; --interpret tries it on a CPU", file=sys.stderr)
        return 2
    try:
        model, subject = _model(options, device)
        found = []
        for tuned in tune(options, model, subject):
            found.append(tuned)
            if not options.json:
                print(table(tuned), flush=True)
            if not options.dry_run:
                _say(f"wrote {_write(options, device, tuned)}")
    except (ValueError, FileNotFoundError) as error:
        print(f"tune_kernels.py: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"device": device.kind, "workloads": [as_dict(t) for t in found]}))
    return 1 if any(tuned.failures for tuned in found) else 0


def tune(options: argparse.Namespace, model: Model, subject: Subject) -> Iterator[Tuned]:
    """Each workload in turn; `subject` is that of all, but for batch and context."""
    fitting = [op for op, supports in kernel_supports().items() if supports(subject.shape).ok]
    kinds = {kind: STEP_OPS[kind] for kind in options.steps}
    step_ops = {k: tuple(op for op in ops if op in fitting) for k, ops in kinds.items()}
    timing = Timing(options.rounds, options.calls)
    for batch in options.batch:
        for context in options.context:
            _say(f"batch {batch}, context {context}")
            steps = {kind: Step(kind, model, batch, context, options.span) for kind in kinds}
            trials = StepTrials(steps, timing, _say)
            about = subject._replace(batch=batch, context=context)
            selection = select(about, step_ops, trials.times_us)
            failures = {
                f"{kind}: {' + '.join(ops)}": why for (kind, ops), why in trials.failures.items()
            }
            yield Tuned(batch, context, selection, failures)


def table(tuned: Tuned) -> str:
    """One line for every op and kind of step, and below them what was chosen and what failed."""
    lines = [
        f"batch {tuned.batch}, context {tuned.context}",
        f"  {'op':<14}{'step':<9}{'without µs':>12}{'with µs':>12}{'':>8}",
    ]
    lines += [
        f"  {row.op:<14}{row.step:<9}{row.xla_us:>12,.0f}{row.gpu_us:>12,.0f}"
        f"{row.gpu_us / row.xla_us - 1:>+8.1%}"
        for row in tuned.selection.measured
    ]
    lines.append(f"  chosen: {', '.join(tuned.selection.ops) or 'none, all XLA'}")
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in tuned.failures.items())])


def as_dict(tuned: Tuned) -> dict[str, Any]:
    """What `table` shows."""
    return {
        "batch": tuned.batch,
        "context": tuned.context,
        "chosen": list(tuned.selection.ops),
        "steps": [
            {name: getattr(row, name) for name in ("op", "step", "xla_us", "gpu_us", "about")}
            for row in tuned.selection.measured
        ],
        "failures": tuned.failures,
    }


def _model(options: argparse.Namespace, device: Device) -> tuple[Model, Subject]:
    """What is timed, and the model that it stands for."""
    runs = Implementation.INTERPRET if options.interpret else Implementation.GPU
    page, dtype = options.page_size, jnp.dtype(options.dtype)
    about = f"{time.strftime('%Y-%m-%d')}, jax {jax.__version__}"
    if options.weights:
        params, config = load_model(weights_folder(options.weights), dtype=dtype)
        whole = model_shape(params, config, page_size=page, dtype=dtype)
    else:
        full = small_config() if options.interpret else MODELS[options.shape]()
        config = full
        if not options.interpret:
            experts = min(full.num_experts, options.experts)
            config = slice_config(options.layers, experts, full=full)
            about = (
                f"{options.layers} of {full.num_layers} layers with {experts} of "
                f"{full.num_experts} experts, random weights, {about}"
            )
        params = jax.block_until_ready(random_weights(config))
        whole = ModelShape.of(full, str(dtype), page)
    model = Model(params, config, dtype, page, runs, device)
    return model, Subject(whole, 0, 0, about)


def _write(options: argparse.Namespace, device: Device, tuned: Tuned) -> Path:
    folder = Path(options.out) if options.out else FOLDER
    steps = merged(measured_steps(device.kind, folder), tuned.selection.measured)
    return write_measured(device.kind, steps, {"by": "scripts/tune_kernels.py"}, folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with exit code 2 and one line where options do not go together."""
    if options.interpret and not (options.out or options.dry_run):
        parser.error("--interpret needs --out FOLDER: it measures no kernel of a GPU")
    if options.interpret and options.shape:
        parser.error("--shape is of a size for GPUs; --interpret has a tiny model of its own")
    if not options.interpret and bool(options.weights) == bool(options.shape):
        parser.error("expected either WEIGHTS or --shape")
    if options.shape and options.dtype != "bfloat16":
        parser.error("--shape has weights of bfloat16")
    small = options.interpret and not options.weights
    defaults = {
        "batch": [2 if small else 1],
        "context": [40 if small else 4096],
        "span": 9 if small else 512,
        "page_size": 16 if small else 64,
        "rounds": 1 if small else 9,
        "calls": 1 if small else 10,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, expected at least 1")
    return number


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in STEP_OPS:
            raise argparse.ArgumentTypeError(f"{kind!r}, expected {', '.join(STEP_OPS)}")
    return kinds


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", nargs="?", metavar="WEIGHTS", help="a folder, or k3-nano")
    parser.add_argument("--shape", choices=MODELS, help="layers of this model, random weights")
    parser.add_argument("--layers", type=_positive, default=4, help="of --shape (default 4)")
    parser.add_argument("--experts", type=_positive, default=128, help="of --shape (default 128)")
    parser.add_argument("--batch", type=_numbers, help="decoding rows, as 1,16 (default 1)")
    parser.add_argument("--context", type=_numbers, help="tokens per row (default 4096)")
    parser.add_argument("--span", type=_positive, help="tokens of the prefill step (default 512)")
    parser.add_argument(
        "--steps", type=_kinds, default=list(STEP_OPS), help=f"of {','.join(STEP_OPS)} (all)"
    )
    parser.add_argument("--page-size", type=_positive, help="(default 64)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=_positive, help="of which the median counts (default 9)")
    parser.add_argument("--calls", type=_positive, help="of a step in a round (default 10)")
    parser.add_argument("--out", metavar="FOLDER", help="in place of pallas_kernels/tuned")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--json", action="store_true", help="print one object, not tables")
    parser.add_argument("--interpret", action="store_true", help="interpreted kernels, on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
