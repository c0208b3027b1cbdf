"""An engine's cached prefixes in a file: to look at, or to start another engine warm.

A snapshot is an `.npz` file. `description` is the JSON of `describe`, `model` identifies weights
and sizes. With arrays, prefix number i has `i/tokens` (as the cache knows them), `i/matrices`,
`i/windows` and `i/pages/0`, `i/pages/1`, …, as bits in unsigned integers, since NumPy's format has
no bfloat16; the least recently used prefix comes first.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.cache.prefix import PrefixEntry
from k3jax.engine.engine import Engine
from k3jax.engine.inspection import describe
from k3jax.engine.prefix_copies import read_prefix, write_prefix
from k3jax.state.transfer import PAGES_AT_ONCE, PrefixArrays, SlotCopy


def save_snapshot(engine: Engine, path: str | Path, *, arrays: bool = False) -> int:
    """Write a snapshot, replacing `path` when it is whole; returns the number of prefixes in it.

    `arrays` adds the prefixes that can be resumed, those in host memory too. Waits for the device.
    """
    path = Path(path)
    content: dict[str, Any] = {
        "description": json.dumps(describe(engine)),
        "model": _identity(engine),
    }
    number = 0
    if arrays:
        for tokens, prefix in _prefixes(engine):
            content[f"{number}/tokens"] = np.asarray(tokens, np.int64)
            named = [("matrices", prefix.slot.matrices), ("windows", prefix.slot.windows)]
            named += [(f"pages/{index}", chunk) for index, chunk in enumerate(prefix.pages)]
            for name, array in named:
                if array is not None:
                    content[f"{number}/{name}"] = _bits(np.asarray(array))
            number += 1
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez(file, **content)
    os.replace(partial, path)
    return number


def read_snapshot(path: str | Path) -> dict[str, Any]:
    """What `describe` said when the snapshot was made.

    Raises FileNotFoundError, and ValueError naming a file that is no snapshot.
    """
    with _open(path) as data:
        return json.loads(str(data["description"]))


def load_snapshot(engine: Engine, path: str | Path) -> int:
    """Put a snapshot's prefixes into free slots and pages, most recently used first.

    Returns how many found room; nothing is evicted for them. Raises ValueError when the snapshot
    is of another model, page size or dtype, FileNotFoundError when there is none.
    """
    with _open(path) as data:
        if str(data["model"]) != _identity(engine):
            raise ValueError(
                f"{path}: made with other weights, another page size or dtype than the engine's"
            )
        count = sum(name.endswith("/tokens") for name in data.files)
        prompts = [data[f"{number}/tokens"].tolist() for number in range(count)]
        restored = [
            number
            for number in reversed(range(len(prompts)))
            if engine.settings.prefix_cache
            and _restore(engine, tuple(prompts[number]), lambda n=number: _arrays(data, engine, n))
        ]
    for number in reversed(restored):  # the most recently used one last
        engine.store.tree.match(prompts[number], len(prompts[number]))
    return len(restored)


def _restore(engine: Engine, tokens: tuple[int, ...], arrays: Callable[[], PrefixArrays]) -> bool:
    """Write a prefix into free pages and a free slot and publish it; False without room."""
    store = engine.store
    known = store.tree.known_pages(tokens)
    missing = -(-len(tokens) // store.page_size) - len(known)
    if store.pages.num_free < missing or not store.slots.num_free:
        return False
    store.pages.share(known)
    pages = (*known, *(store.pages.take() for _ in range(missing)))
    slot = store.slots.take()
    written = write_prefix(engine.state.decode, slot, pages, arrays(), len(known))
    engine.state = engine.state.replace(decode=written)
    store.publish(PrefixEntry(tokens, pages, slot))
    store.pages.release(pages)
    store.slots.release([slot])
    return True


def _arrays(data: Any, engine: Engine, number: int) -> PrefixArrays:
    state = engine.state.decode
    activations = jax.tree.leaves((state.recurrent.windows, state.latent))[0].dtype

    def array(name: str, dtype: Any) -> Any:
        key = f"{number}/{name}"
        return data[key].view(dtype) if key in data.files else None

    chunks = sum(name.startswith(f"{number}/pages/") for name in data.files)
    return PrefixArrays(
        SlotCopy(array("matrices", np.float32), array("windows", activations)),
        tuple(array(f"pages/{index}", activations) for index in range(chunks)),
    )


def _prefixes(engine: Engine) -> Iterator[tuple[tuple[int, ...], PrefixArrays]]:
    """Tokens and arrays of every resumable prefix, those of the host first."""
    cached = list(engine.store.tree.entries())
    on_device = {entry.tokens for entry in cached}
    if engine.host is not None:
        for entry in engine.host.entries():
            if entry.tokens not in on_device:
                yield entry.tokens, _trimmed(entry.arrays, entry.num_pages)
    for entry in cached:
        arrays = read_prefix(engine.state.decode, entry.slot, entry.pages)
        yield entry.tokens, _trimmed(arrays, len(entry.pages))


def _trimmed(arrays: PrefixArrays, num_pages: int) -> PrefixArrays:
    pages = [
        np.asarray(chunk)[:, : num_pages - number * PAGES_AT_ONCE]
        for number, chunk in enumerate(arrays.pages)
    ]
    return arrays.replace(pages=tuple(pages))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _identity(engine: Engine) -> str:
    """Digest of configuration, sizes and a sample of the weights."""
    digest = hashlib.blake2b(repr(engine.config).encode(), digest_size=16)
    for array in jax.tree.leaves(engine.state.decode):
        digest.update(repr((array.shape[1:], array.dtype.name)).encode())
    for weights in (engine.params.final_norm, engine.params.embed[0], engine.params.embed[-1]):
        digest.update(np.asarray(weights).tobytes())
    return digest.hexdigest()


def _open(path: str | Path) -> Any:
    try:
        data = np.load(path, allow_pickle=False)
        if not isinstance(data, np.lib.npyio.NpzFile) or "description" not in data.files:
            raise ValueError(f"{path} is not a snapshot of an engine")
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a snapshot of an engine") from error
    return data
