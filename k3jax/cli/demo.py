"""`k3jax demo`: the bundled model at work."""

from __future__ import annotations

import argparse
import json
import sys
import time

from k3jax.bundled import BUNDLED
from k3jax.cli.arguments import Subparsers
from k3jax.cli.loading import load_params, open_text_model

_DESCRIPTION = """\
Ask the bundled model k3-nano for a sum, a tool call and the answer from its result, a value out of
a long list, and JSON for a schema, and compare with the right answers. Replies are greedy.

The first run compiles, for up to a minute; its programs are kept for the next one.
"""

_EXAMPLES = """\
examples:
  k3jax demo
  k3jax demo --json | python3 -m json.tool
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="show what the bundled model can do",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run every item; 0 whatever the model answers, as long as it runs."""
    start = time.perf_counter()
    model = open_text_model(BUNDLED)
    params = load_params(model)

    from k3jax.cli.compile_clock import CompileClock
    from k3jax.cli.conversation import model_source
    from k3jax.cli.demo_show import DemoShow

    if not args.json:
        print(f"{BUNDLED} at work; the first run compiles, for up to a minute\n", flush=True)
    with CompileClock() as clock:
        show = DemoShow(None if args.json else sys.stdout)
        items = show.run(model, model_source(model, params), clock.running)
        compiling = clock.seconds
    seconds = time.perf_counter() - start
    if args.json:
        report = {"model": BUNDLED, "items": items, "seconds": seconds}
        print(json.dumps(report | {"compile_seconds": compiling}, ensure_ascii=False))
        return 0
    right = sum(item["correct"] for item in items)
    print(
        f"{right} of {len(items)} answers are right; {seconds:.1f} s in all, "
        f"{compiling:.1f} s of them compiling"
    )
    return 0
