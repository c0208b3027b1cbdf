"""What the service needs in memory, by part, and whether it is there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from k3jax.config import K3Config
from k3jax.engine.engine_config import ResolvedConfig
from k3jax.state import DecodeState

MARGIN = 0.05
"""Of the free memory that is left to the programs' own buffers."""


class NotEnoughMemory(RuntimeError):
    """The device lacks memory for what was asked; says how much is wanted and free."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. `weights` are there already; `pools` are still to be allocated."""

    weights: int
    pools: dict[str, int]
    free: int | None
    """On the device, before the pools; None where it cannot be known."""

    @property
    def wanted(self) -> int:
        """Of the pools."""
        return sum(self.pools.values())

    def check(self) -> None:
        """Raise NotEnoughMemory if the pools do not fit."""
        if self.free is not None and self.wanted > self.free * (1 - MARGIN):
            raise NotEnoughMemory(
                f"the caches want {size(self.wanted)}, but {size(self.free)} are free, of which "
                f"{MARGIN:.0%} stay for programs; lower --max-rows, --max-context, --num-pages or "
                "--num-slots"
            )

    def lines(self) -> list[str]:
        """A table."""
        rows = [("weights", self.weights), *self.pools.items()]
        if self.free is not None:
            rows.append(("free after that", self.free - self.wanted))
        return [f"  {name:<18} {size(value):>10}" for name, value in rows]


def plan_memory(
    params: Any, config: K3Config, settings: ResolvedConfig, dtype: Any = None
) -> MemoryPlan:
    """What an engine of these settings needs beside its weights."""
    decode = jax.eval_shape(
        lambda: DecodeState.init(
            config,
            num_slots=settings.num_slots,
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            dtype=dtype or params.embed.dtype,
        )
    )
    pools: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(decode):
        name = "recurrent slots" if "recurrent" in jax.tree_util.keystr(path) else "latent pages"
        pools[name] = pools.get(name, 0) + leaf.size * leaf.dtype.itemsize
    return MemoryPlan(num_bytes(params), pools, free_bytes())


def num_bytes(tree: Any) -> int:
    """Of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


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
