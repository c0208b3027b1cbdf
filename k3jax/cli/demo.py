"""`k3jax demo`: the bundled model at work behind its service."""

from __future__ import annotations

import argparse
import json
import sys
import time

from k3jax.bundled import BUNDLED, bundled_model
from k3jax.cli.arguments import Subparsers

_DESCRIPTION = """\
Start the service (worker and gateway, on free ports of this machine) on the bundled model k3-nano,
ask it over HTTP for a sum, a tool call and the answer from its result, two values out of a long
list in one conversation, and JSON for a schema, compare with the right answers, and stop it.
Replies are greedy. The exit code is 0 if all are right and the second question about the list
found the first in the prefix cache.

The first run compiles, for a minute or so; its programs are kept for the next one.
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
    """Start, ask, stop; 0 if every answer is right."""
    start = time.perf_counter()
    bundled_model()  # says what is missing before anything starts

    from k3jax.cli.demo_show import DemoShow
    from k3jax.cli.http_chat import HttpChat
    from serving.gateway import GatewayFailed
    from serving.options import EngineSizes, ServeOptions, WorkerOptions
    from serving.server import NotStarted, Service

    sizes = EngineSizes(
        max_rows=1, max_context=1024, token_budget=256, num_pages=64, num_slots=8
    )  # few programs to compile, and room for the checkpoints of all conversations
    worker = WorkerOptions(BUNDLED, BUNDLED, listen="127.0.0.1:0", sizes=sizes, drain_seconds=2)
    out = None if args.json else sys.stdout
    service = Service(ServeOptions(worker, http="127.0.0.1:0"), lambda line: _print(line, out))
    _print(f"{BUNDLED} behind `k3jax serve`; the first run compiles, for a minute or so", out)
    try:
        with service.started() as gateway:
            assert gateway is not None
            ready = time.perf_counter() - start
            _print(f"ready after {ready:.1f} s at {gateway.url}/v1\n", out)
            items = DemoShow(out, HttpChat(gateway.url, BUNDLED).ask).run()
    except (GatewayFailed, NotStarted) as error:
        print(f"k3jax: error: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    right = sum(item["correct"] for item in items)
    if args.json:
        report = {"model": BUNDLED, "items": items, "ready_seconds": ready, "seconds": seconds}
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(f"{right} of {len(items)} right; stopped; {seconds:.1f} s in all")
    return 0 if right == len(items) else 1


def _print(line: str, out: object) -> None:
    if out is not None:
        print(line, flush=True)
