"""What an engine holds at this moment, in plain values that JSON can carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from k3jax.cache.pool import Pool
from k3jax.engine.engine import Engine
from k3jax.engine.sequence import NO_SLOT
from k3jax.state.latent import page_bytes
from k3jax.state.recurrent import slot_bytes


def describe(engine: Engine) -> dict[str, Any]:
    """Sizes, occupancy, sequences, prefix tree, host tier and counters of an engine.

    Token ids are counted, never shown. Call it on the engine's thread.
    """
    sequences = engine.scheduler.running
    tree_pages, tree_slots = engine.store.tree.held()
    pages = {page for s in sequences for page in s.pages}
    pages |= {s.copy[0] for s in sequences if s.copy is not None}
    slots = {slot for s in sequences for slot in (s.slot, s.source) if slot != NO_SLOT}
    return {
        "settings": {
            name: None if value is None else np.dtype(value).name if name == "dtype" else value
            for name, value in engine.settings_table.items()
        },
        "state": _state(engine),
        "pages": _occupancy(engine.store.pages, pages, tree_pages),
        "slots": _occupancy(engine.store.slots, slots, tree_slots),
        "sequences": [
            {
                "request": s.request.id,
                "choice": s.choice,
                "phase": s.phase.name.lower(),
                "tokens": len(s.tokens),
                "computed": s.computed,
                "cached": s.cached_tokens or 0,
                "pages": len(s.pages),
                "slot": _slot(s.slot),
                "reads_slot": _slot(s.source),
                "preemptions": s.preemptions,
            }
            for s in [*sequences, *engine.scheduler.waiting]
        ],
        "tree": _tree(engine, pages, slots),
        "host": _host(engine),
        "counters": dataclasses.asdict(engine.stats()),
    }


def _state(engine: Engine) -> dict[str, Any]:
    """Bytes of every kind of array, over all layers of the kind."""
    state, dtype = engine.state, engine.state.decode
    kinds: list[tuple[str, Sequence[jax.Array]]] = [
        ("KDA matrices", state.decode.recurrent.matrices),
        ("KDA windows", state.decode.recurrent.windows),
        ("MLA pages", state.decode.latent.pages),
        ("token histories", jax.tree.leaves(state.history)),
        ("last tokens", jax.tree.leaves(state.last_tokens)),
    ]
    activations = (*dtype.recurrent.windows, *dtype.latent.pages)[0].dtype
    return {
        "bytes": sum(array.nbytes for _, arrays in kinds for array in arrays),
        "slot_bytes": slot_bytes(engine.config, activations),
        "page_bytes": page_bytes(engine.config, engine.settings.page_size, activations),
        "pools": [
            {
                "kind": kind,
                "arrays": len(arrays),
                "shape": list(arrays[0].shape),
                "dtype": arrays[0].dtype.name,
                "bytes": sum(array.nbytes for array in arrays),
            }
            for kind, arrays in kinds
            if arrays
        ],
    }


def _occupancy(pool: Pool, running: set[int], cached: Iterable[int]) -> dict[str, int]:
    """How many ids are held by whom; the numbers but the first add up to it."""
    cached, free = set(cached), set(pool.free_ids())
    held = set(range(pool.size)) - free
    return {
        "total": pool.size,
        "free": len(free),
        "running": len(running - cached),
        "cached": len(cached - running),
        "running_and_cached": len(running & cached),
        "steps_in_flight": len(held - running - cached),
    }


def _tree(engine: Engine, pages: set[int], slots: set[int]) -> list[dict[str, Any]]:
    return [
        {
            "depth": run.depth,
            "start": run.start,
            "tokens": len(run.tokens),
            "pages": list(run.pages),
            "pages_in_use": len(pages.intersection(run.pages)),
            "slot": run.slot,
            "slot_in_use": run.slot in slots,
            "tails": [
                {
                    "tokens": count,
                    "page": page,
                    "slot": slot,
                    "in_use": page in pages or slot in slots,
                }
                for count, page, slot in run.tails
            ],
        }
        for run in engine.store.tree.runs()
    ]


def _host(engine: Engine) -> dict[str, Any] | None:
    if engine.host is None:
        return None
    return {
        "max_bytes": engine.host.max_bytes,
        "bytes": engine.host.nbytes,
        "entries": [
            {"tokens": entry.num_tokens, "pages": entry.num_pages, "bytes": entry.nbytes}
            for entry in engine.host.entries()
        ],
        **dataclasses.asdict(engine.host.counters),
    }


def _slot(slot: int) -> int | None:
    return None if slot == NO_SLOT else slot
