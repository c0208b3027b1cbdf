"""Compiles kernels and whole steps for NVIDIA GPUs without one; fails on spills and copies.

Examples:
    python scripts/check_cuda_compile.py                       # K3's shapes for an H200
    python scripts/check_cuda_compile.py --target h100 --model kimi-linear --rows 1
    python scripts/check_cuda_compile.py --only kda_decode step --json compile.json
    python scripts/check_cuda_compile.py --rows 16 --cache FOLDER   # again only if sources changed

Every kernel alone, then the engine's own jitted step of a slice of K3 (two KDA layers and one MLA
layer with routed experts) with all kernels: decode steps, verification steps of 4 tokens per row (8
if there is one row), and a prefill span. Nothing is allocated.

Needs JAX's CUDA plugin but neither GPU nor driver nor CUDA toolkit: pip install ".[cuda-compile]".
One line per kernel: registers, spilled bytes, shared memory, threads, and matrix and bulk copy
instructions. Wrong are spills, state that is not updated in place, copies of more than 1 MiB, and
in steps conversions and transpositions too, beyond the number that is known. Exit code 1 then,
2 when the plugin is missing, or no plan gives the target kernels: each is named with the reason.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.gpu.compiling import (  # isort: skip
    TARGETS,
    Report,
    compile_for,
    missing_plugin,
    target_device,
)
from pallas_kernels.implementation import Implementation, device_rule, runs_kernels
from pallas_kernels.shapes import DECODE_ROWS, NAMED
from scripts.gpu.cases import MAKERS, Specs, cases
from scripts.gpu.source_cache import SourceCache
from scripts.gpu.step_cases import StepCase, step_cases

STEP = "step"
"""Stands for whole steps where ops are chosen."""


def main(argv: list[str] | None = None) -> int:
    """Compile what the arguments name; the exit code says whether all is well."""
    options = _parser().parse_args(argv)
    reason = refused(options.target)
    if reason:
        for name in _names(options):
            print(f"{name} [{options.target}]: not compiled, {reason}")
        return 2
    missing = missing_plugin()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    cache = _cache(options)
    known = None if cache is None else cache.read()
    if known is not None:
        print(f"{known}\nsources are as they were then", flush=True)
        return 0
    reports = []
    for report in _reports(options):
        print(describe(report), flush=True)
        reports.append(report)
    if options.json:
        text = json.dumps([dataclasses.asdict(report) for report in reports], indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    wrong = sum(bool(report.problems) for report in reports)
    summary = f"{len(reports) - wrong} of {len(reports)} as they should be"
    print(summary)
    if wrong or not reports:
        return 1
    if cache is not None:
        cache.write("\n".join([*map(describe, reports), summary]))
    return 0


def _cache(options: argparse.Namespace) -> SourceCache | None:
    if not options.cache:
        return None
    said = {name: value for name, value in vars(options).items() if name not in ("cache", "json")}
    return SourceCache(options.cache, [f"{name}={value}" for name, value in said.items()])


def _reports(options: argparse.Namespace) -> Iterator[Report]:
    shape = NAMED[options.model]
    for rows in options.rows:
        for case in cases(shape, rows, options.context):
            if options.only and case.op not in options.only:
                continue
            yield compile_for(
                case.name,
                case.jitted(Implementation.GPU),
                case.arguments(Specs()),
                options.target,
                donated=case.donated,
                expected_kernels=1,
            )
    if not options.only or STEP in options.only:
        for step in step_cases(options.model, options.rows, options.context, options.span):
            yield _compile_step(step, options.target)


def refused(target: str) -> str | None:
    """Why no plan runs kernels on such a device, so that there is nothing to compile; or None."""
    device = target_device(target)
    return None if runs_kernels(device) else device_rule(device)


def _names(options: argparse.Namespace) -> Iterator[str]:
    """What `_reports` would report on."""
    shape = NAMED[options.model]
    for rows in options.rows:
        for case in cases(shape, rows, options.context):
            if not options.only or case.op in options.only:
                yield case.name
    if not options.only or STEP in options.only:
        for step in step_cases(options.model, options.rows, options.context, options.span):
            yield step.name


def _compile_step(step: StepCase, target: str) -> Report:
    return compile_for(
        step.name,
        step.program,
        step.arguments,
        target,
        donated=(2,),
        expected_kernels=step.expected_kernels,
        known_moves=step.known_moves,
    )


def describe(report: Report) -> str:
    """A few lines for people."""
    lines = [
        f"{report.name} [{report.target}]: {report.seconds:.1f} s, "
        f"{report.aliased_bytes:,} of {report.donated_bytes:,} donated bytes reused, "
        f"{report.temporary_bytes:,} temporary, {len(report.large_moves)} copies, "
        "conversions and transpositions above 1 MiB"
    ]
    lines += [
        f"  {k.name}: {k.registers} registers, {k.spilled_bytes} spilled, "
        f"{k.shared_bytes:,} shared, {k.threads} threads, {k.wgmma} wgmma, {k.tma} tma"
        for k in report.kernels
    ]
    return "\n".join([*lines, *(f"  WRONG: {problem}" for problem in report.problems)])


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--model", choices=NAMED, default="k3")
    names = (*MAKERS, STEP)
    parser.add_argument("--only", nargs="+", choices=names, metavar="OP", help=", ".join(names))
    parser.add_argument("--rows", nargs="+", type=int, default=DECODE_ROWS, help="batch sizes")
    parser.add_argument("--context", type=int, default=8192, help="cached tokens per row")
    parser.add_argument("--span", type=int, default=512, help="tokens of the prefill step; 0: none")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="keep what came of it, and compile again only if needed"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
