"""What an engine holds and has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from k3jax.cache.offload import HostTier
from k3jax.engine.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """What the engine holds and has done."""

    running: int
    waiting: int
    waiting_tokens: int
    """Prompt tokens of waiting sequences."""
    pages_total: int
    pages_free: int
    slots_total: int
    slots_free: int
    checkpoints: int
    """Resumable prefixes in the cache."""
    queries: int
    hits: int
    query_tokens: int
    hit_tokens: int
    misses: dict[str, int]
    evictions: dict[str, int]
    preemptions: int
    steps: int
    state_bytes: int
    pages_running: int = 0
    """Of running sequences; pages of cached prefixes can be had by whoever needs them."""
    host_entries: int = 0
    """Resumable prefixes in host memory."""
    host_bytes: int = 0
    host_hits: int = 0
    """Prefixes brought back from host memory."""
    host_hit_tokens: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, host: HostTier | None, state: Any, steps: int) -> EngineStats:
        """Count what is there; `state` is the pytree on the device."""
        store, waiting = scheduler.store, scheduler.waiting
        counters = store.counters
        return cls(
            running=len(scheduler.running),
            waiting=len(waiting),
            waiting_tokens=sum(len(s.tokens) for s in waiting),
            pages_total=store.pages.size,
            pages_free=store.pages.num_free,
            pages_running=min(store.pages.size, sum(len(s.pages) for s in scheduler.running)),
            slots_total=store.slots.size,
            slots_free=store.slots.num_free,
            checkpoints=sum(1 for _ in store.tree.entries()),
            queries=counters.queries,
            hits=counters.hits,
            query_tokens=counters.query_tokens,
            hit_tokens=counters.hit_tokens,
            misses=dict(counters.misses),
            evictions=dict(store.tree.evictions),
            preemptions=scheduler.preemptions,
            steps=steps,
            state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
            host_entries=0 if host is None else len(host),
            host_bytes=0 if host is None else host.nbytes,
            host_hits=0 if host is None else host.counters.hits,
            host_hit_tokens=0 if host is None else host.counters.hit_tokens,
        )
