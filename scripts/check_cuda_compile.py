"""Compiles every kernel for NVIDIA GPUs without one, and fails on spills, copies and lost aliasing.

Examples:
    python scripts/check_cuda_compile.py                       # K3's shapes for an H200
    python scripts/check_cuda_compile.py --target h100 --model kimi-linear --rows 1
    python scripts/check_cuda_compile.py --only kda_decode --json compile.json

Needs JAX's CUDA plugin but neither GPU nor driver nor CUDA toolkit; what to install is said when
it is missing. One line per kernel: registers, spilled bytes, shared memory, threads, and matrix and
bulk copy instructions. Exit code 1 when something is wrong, 2 when the plugin is missing.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.gpu.compiling import TARGETS, Report, compile_for, missing_plugin  # isort: skip
from pallas_kernels.implementation import Implementation
from pallas_kernels.shapes import DECODE_ROWS, NAMED
from scripts.gpu.cases import MAKERS, Specs, cases


def main(argv: list[str] | None = None) -> int:
    """Compile what the arguments name; the exit code says whether all is well."""
    options = _parser().parse_args(argv)
    missing = missing_plugin()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    reports = []
    for rows in options.rows:
        for case in cases(NAMED[options.model], rows, options.context):
            if options.only and case.op not in options.only:
                continue
            report = compile_for(
                case.name,
                case.jitted(Implementation.GPU),
                case.arguments(Specs()),
                options.target,
                donated=case.donated,
                expected_kernels=1,
            )
            print(describe(report), flush=True)
            reports.append(report)
    if options.json:
        text = json.dumps([dataclasses.asdict(report) for report in reports], indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    wrong = sum(bool(report.problems) for report in reports)
    print(f"{len(reports) - wrong} of {len(reports)} as they should be")
    return 1 if wrong or not reports else 0


def describe(report: Report) -> str:
    """A few lines for people."""
    lines = [
        f"{report.name} [{report.target}]: {report.seconds:.1f} s, "
        f"{report.aliased_bytes:,} of {report.donated_bytes:,} donated bytes reused, "
        f"{report.temporary_bytes:,} temporary, {len(report.large_copies)} copies and "
        f"{report.large_rewrites} conversions or transpositions above 1 MiB"
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
    parser.add_argument("--only", nargs="+", choices=MAKERS, metavar="OP", help=", ".join(MAKERS))
    parser.add_argument("--rows", nargs="+", type=int, default=DECODE_ROWS, help="batch sizes")
    parser.add_argument("--context", type=int, default=8192, help="cached tokens per row")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
