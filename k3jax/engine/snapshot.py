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
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
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
    with _open(path) as data, _damage_named(path):
        return json.loads(str(data["description"]))


def load_snapshot(engine: Engine, path: str | Path) -> int:
    """Put a snapshot's prefixes into free slots and pages, most recently used first.

    Returns how many found room; nothing is evicted for them. Raises ValueError when the snapshot
    is of another model, page size or dtype, FileNotFoundError when there is none.
    """
    with _open(path) as data:
        with _damage_named(path):
            made_with = str(data["model"])
            count = sum(name.endswith("/tokens") for name in data.files)
            prompts = [tuple(data[f"{number}/tokens"].tolist()) for number in range(count)]
        if made_with != _identity(engine):
            raise ValueError(
                f"{path}: made with other weights, another page size or dtype than the engine's"
            )
        restored = []
        for number in reversed(range(count)):
            if engine.settings.prefix_cache and _has_room(engine, prompts[number]):
                with _damage_named(path):
                    arrays = _arrays(data, engine, number)
                    _check_shapes(arrays, engine, len(prompts[number]))
                _restore(engine, prompts[number], arrays)
                restored.append(number)
    for number in reversed(restored):  # the most recently used one last
        engine.store.tree.match(prompts[number], len(prompts[number]))
    return len(restored)


@contextmanager
def _damage_named(path: str | Path) -> Iterator[None]:
    """Errors of reading from inside the file become a ValueError that names it."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a damaged snapshot: {error}") from error


def _has_room(engine: Engine, tokens: tuple[int, ...]) -> bool:
    store = engine.store
    missing = -(-len(tokens) // store.page_size) - len(store.tree.known_pages(tokens))
    return store.pages.num_free >= missing and store.slots.num_free > 0


def _restore(engine: Engine, tokens: tuple[int, ...], arrays: PrefixArrays) -> None:
    """Write a prefix into free pages and a free slot, and publish it."""
    store = engine.store
    known = store.tree.known_pages(tokens)
    missing = -(-len(tokens) // store.page_size) - len(known)
    store.pages.share(known)
    pages = (*known, *(store.pages.take() for _ in range(missing)))
    slot = store.slots.take()
    written = write_prefix(engine.state.decode, slot, pages, arrays, len(known))
    engine.state = engine.state.replace(decode=written)
    store.publish(PrefixEntry(tokens, pages, slot))
    store.pages.release(pages)
    store.slots.release([slot])


def _check_shapes(arrays: PrefixArrays, engine: Engine, num_tokens: int) -> None:
    """Raise ValueError unless `arrays` are a whole prefix of `num_tokens` for these pools."""
    if num_tokens < 1:
        raise ValueError("a prefix without tokens")
    state = engine.state.decode
    pages = -(-num_tokens // state.latent.page_size) if state.latent.pages else 0
    sizes = [min(PAGES_AT_ONCE, pages - at) for at in range(0, pages, PAGES_AT_ONCE)]
    wanted = [
        _stacked(state.recurrent.matrices),
        _stacked(state.recurrent.windows),
        *(_stacked(state.latent.pages, size) for size in sizes),
    ]
    found = [arrays.slot.matrices, arrays.slot.windows, *arrays.pages]
    shapes = [None if array is None else tuple(array.shape) for array in found]
    if shapes != wanted:
        raise ValueError(f"a prefix of {num_tokens} tokens has arrays {shapes}, expected {wanted}")


def _stacked(pools: tuple[jax.Array, ...], *counts: int) -> tuple[int, ...] | None:
    return (len(pools), *counts, *pools[0].shape[1:]) if pools else None


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
