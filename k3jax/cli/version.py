"""`k3jax version`: what is installed, and the devices that JAX sees."""

import argparse
import json
import os
import platform
from typing import Any

from k3jax import __version__
from k3jax.cli.arguments import Subparsers

_EXAMPLES = """\
examples:
  k3jax version
  k3jax version --json | python3 -m json.tool
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax version`."""
    parser = subparsers.add_parser(
        "version",
        help="show the installed versions and the devices",
        description="Show the versions of k3jax, Python, jax, jaxlib and flax, and the devices.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report as aligned lines, or as one JSON object.

    A JAX that finds no usable device is reported, not raised: this is the command to ask why.
    """
    report = _versions() | _devices()
    if args.json:
        print(json.dumps(report))
        return 0
    for name, value in report.items():
        print(f"{name:<8} {', '.join(value) if isinstance(value, list) else value}")
    return 0


def _versions() -> dict[str, Any]:
    from importlib import metadata

    installed = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {"k3jax": __version__, "python": platform.python_version(), **installed}


def _devices() -> dict[str, Any]:
    import jax

    try:
        return {"devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]}
    except (RuntimeError, AssertionError) as error:  # which of the two depends on JAX_PLATFORMS
        reason = " ".join(str(error).split()) or "no backend could be started"
        wanted = os.environ.get("JAX_PLATFORMS", "not set")
        return {"devices": [], "problem": f"{reason} (JAX_PLATFORMS is {wanted})"}
