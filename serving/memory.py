"""What the service needs in memory, by part, and whether it is there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from k3jax.config import K3Config
from k3jax.engine.engine_config import ResolvedConfig
from k3jax.engine.sampling import TokenHistory
from k3jax.engine.step import StepState
from k3jax.state import DecodeState

MARGIN = 0.05
"""Of the free memory that stays for what nobody counts: allocators, runtimes, code."""


class NotEnoughMemory(RuntimeError):
    """The device lacks memory for what was asked; says how much is wanted and free."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. `weights` are there already; the others are still to be allocated.

    `programs` is what the largest of each kind wants while it runs: temporaries, workspaces and
    results. One runs at a time, so the largest counts.
    """

    weights: int
    pools: dict[str, int]
    free: int | None
    """On the device, before the pools; None where it cannot be known."""
    programs: dict[str, int] = field(default_factory=dict)

    @property
    def wanted(self) -> int:
        """Of the pools, and of the largest program."""
        return sum(self.pools.values()) + max(self.programs.values(), default=0)

    def with_program(self, kind: str, number: int) -> MemoryPlan:
        """The same, with one more program of a kind."""
        largest = max(number, self.programs.get(kind, 0))
        return replace(self, programs={**self.programs, kind: largest})

    def check(self) -> None:
        """Raise NotEnoughMemory if pools and programs do not fit."""
        if self.free is not None and self.wanted > self.free * (1 - MARGIN):
            programs = "".join(f" and {size(n)} for the {k}" for k, n in self.programs.items())
            raise NotEnoughMemory(
                f"wanted are {size(sum(self.pools.values()))} for the caches{programs}, "
                f"{size(self.wanted)} in all, but {size(self.free)} are free, of which "
                f"{MARGIN:.0%} stay in reserve; lower --max-rows, --max-context, --token-budget, "
                "--num-pages or --num-slots"
            )

    def lines(self) -> list[str]:
        """A table."""
        rows = [("weights", self.weights), *self.pools.items(), *self.programs.items()]
        rows.append(("wanted", self.wanted))
        if self.free is not None:
            rows += [("free for it", self.free), ("left", self.free - self.wanted)]
        return [f"  {name:<18} {size(value):>10}" for name, value in rows]


def program_bytes(analysis: Any) -> int:
    """What a program allocates when it runs, from XLA's memory analysis (0 where there is none).

    Donated inputs that become outputs are allocated already.
    """
    if analysis is None:
        return 0
    fresh = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    return analysis.temp_size_in_bytes + fresh


def plan_memory(
    params: Any, config: K3Config, settings: ResolvedConfig, dtype: Any = None
) -> MemoryPlan:
    """What an engine of these settings needs beside its weights."""
    state = jax.eval_shape(
        lambda: StepState(
            decode=DecodeState.init(
                config,
                num_slots=settings.num_slots,
                num_pages=settings.num_pages,
                page_size=settings.page_size,
                dtype=dtype or params.embed.dtype,
            ),
            history=TokenHistory.init(settings.max_rows, config.vocab_size),
        )
    )
    pools = {
        "recurrent slots": _abstract_bytes(state.decode.recurrent),
        "latent pages": _abstract_bytes(state.decode.latent),
        "token histories": _abstract_bytes(state.history),
    }
    return MemoryPlan(num_bytes(params), pools, free_bytes())


def num_bytes(tree: Any) -> int:
    """Of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _abstract_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """On the first device; of the machine where the device is its processor."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if device.platform != "cpu" or not meminfo.is_file():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def size(number: int) -> str:
    """Bytes in three digits: 5.82 MB."""
    value, units = float(number), iter(("B", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while abs(value) >= 999.5:
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}"
