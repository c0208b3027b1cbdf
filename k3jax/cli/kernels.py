"""The --kernel option: which variant of an op runs, whatever would be chosen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

VARIANTS = ("xla", "gpu", "interpret")

HELP = "run OP as xla, gpu or interpret; repeatable (`k3jax info WEIGHTS --kernels` lists the ops)"


def add_kernel_argument(parser: Any, *, default: str | None = None) -> None:
    """Declare --kernel, which leaves `args.kernel` a dict; `default` is OP=VARIANT,…"""
    parser.add_argument(
        "--kernel", action=_Merge, type=variants, default=default or {}, metavar="OP=VARIANT",
        help=HELP,
    )  # fmt: skip


def variants(text: str) -> dict[str, str]:
    """OP=VARIANT[,OP=VARIANT…] as a dict; argparse shows what is wrong with anything else."""
    found = {}
    for part in text.split(","):
        op, equals, variant = part.strip().partition("=")
        if not op or not equals or variant not in VARIANTS:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is no OP=VARIANT with a variant of {', '.join(VARIANTS)}"
            )
        found[op] = variant
    return found


def checked(kernels: Mapping[str, str]) -> dict[str, str]:
    """The same, once every op is known to exist; prepares this process to interpret kernels.

    Call it before anything runs on a device. Raises ValueError naming an op that does not exist.
    """
    if "interpret" in kernels.values():
        # A kernel's interpreted parts wait for one another, each on a thread of XLA's pool, of
        # which a small machine has too few. Read when JAX starts its back end.
        os.environ.setdefault("NPROC", "16")
    if kernels:
        from pallas_kernels.implementation import check_ops

        check_ops(kernels)
    return dict(kernels)


class _Merge(argparse.Action):
    """Later values add to earlier ones; the first replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        seen = given if isinstance(given, dict) else {}
        setattr(namespace, self.dest, {**seen, **values})
