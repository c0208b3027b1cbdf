"""The host tier: whole prefixes that the device has no room for, in host memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from k3jax.cache.prefix import PrefixEntry
from k3jax.cache.store import PrefixStore
from k3jax.state.transfer import PAGES_AT_ONCE, PrefixArrays

COPIES_IN_FLIGHT = 2
"""Prefixes on their way to the host: each occupies device memory of its own until it is there."""


ReadPrefix = Callable[[int, Sequence[int]], PrefixArrays]
"""Queues copying a slot and pages; what is written to them later does not show."""
WritePrefix = Callable[[int, Sequence[int], PrefixArrays, int], None]
"""Queues writing a slot and pages, all but so many of the first pages."""


@dataclass(eq=False)
class HostEntry:
    """A prefix in host memory, or on its way there."""

    tokens: tuple[int, ...]
    num_pages: int
    nbytes: int
    """Of its arrays, once they have arrived."""
    arrays: PrefixArrays

    @property
    def num_tokens(self) -> int:
        """Tokens that both halves stand for."""
        return len(self.tokens)


@dataclass
class HostCounters:
    """What the host tier did since start-up."""

    offloads: int = 0
    """Prefixes copied to the host."""
    hits: int = 0
    """Prefixes brought back."""
    hit_tokens: int = 0
    """Tokens by which they were longer than what the device still had."""
    evictions: int = 0


class HostTier:
    """Keeps what a `PrefixStore` is about to lose, and puts it back when a prompt continues it.

    `max_bytes` bounds the arrays held (token ids come on top); the least recently used prefix goes
    first. A prefix that has come back also stays here, so losing it once more costs no copy.
    Prefixes are whole: two that begin alike each hold all their pages. `slot_bytes` and
    `page_bytes` are those of one slot and one page over all layers. Prefixes that save fewer than
    `least_tokens` are neither kept nor brought back.
    """

    def __init__(
        self,
        max_bytes: int,
        store: PrefixStore,
        *,
        read: ReadPrefix,
        write: WritePrefix,
        slot_bytes: int,
        page_bytes: int,
        least_tokens: int = 1,
    ):
        for name, value, least in (
            ("max_bytes", max_bytes, 0),
            ("least_tokens", least_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}, expected at least {least}")
        self.max_bytes, self.least_tokens = max_bytes, least_tokens
        self.counters = HostCounters()
        self.nbytes = 0
        """Bytes of all entries."""
        self._store, self._read, self._write = store, read, write
        self._slot_bytes, self._page_bytes = slot_bytes, page_bytes
        self._entries: OrderedDict[tuple[int, ...], HostEntry] = OrderedDict()
        self._copying: deque[HostEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterator[HostEntry]:
        """Every prefix held, least recently used first."""
        return iter(self._entries.values())

    def offload(self, entry: PrefixEntry) -> None:
        """Keep a prefix whose slot and pages still hold it; their ids can be reused on return."""
        if entry.tokens in self._entries:
            self._entries.move_to_end(entry.tokens)
            return
        nbytes = self._slot_bytes + len(entry.pages) * self._page_bytes
        if entry.num_tokens < self.least_tokens or nbytes > self.max_bytes:
            return
        while self.nbytes + nbytes > self.max_bytes:
            self._evict()
        while len(self._copying) >= COPIES_IN_FLIGHT:
            self._arrive(self._copying[0])
        arrays = self._read(entry.slot, entry.pages)
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()
        kept = HostEntry(entry.tokens, len(entry.pages), nbytes, arrays)
        self._entries[entry.tokens] = kept
        self._copying.append(kept)
        self.nbytes += nbytes
        self.counters.offloads += 1

    def collect(self) -> None:
        """Take in the copies that have arrived, without waiting for others."""
        while self._copying and all(
            array.is_ready() for array in jax.tree.leaves(self._copying[0].arrays)
        ):
            self._arrive(self._copying[0])

    def promote(self, tokens: Sequence[int], limit: int, longer_than: int) -> bool:
        """Bring back the longest prefix of `tokens` of at most `limit` tokens, if it is worth it.

        Worth it is one at least `least_tokens` longer than `longer_than`, what the device has,
        when the pools can take both it and the sequence of `tokens` that is to continue it. True
        if it is now in the store's tree. Steps dispatched later read it.
        """
        entry = self._longest(tokens, limit, longer_than + self.least_tokens)
        if entry is None:
            return False
        store, size = self._store, self._store.page_size
        known = store.tree.known_pages(entry.tokens)
        store.pages.share(known)
        missing = entry.num_pages - len(known)
        own = -(-(len(tokens) + 1) // size) - entry.num_tokens // size
        if not (store.can_take(missing + own) and store.can_take_slots(2)):
            store.pages.release(known)
            return False
        # First, so that what is evicted below is not what is brought back.
        self._entries.move_to_end(entry.tokens)
        self._arrive(entry)
        taken, slot = store.take_pages(missing), store.take_slot()
        assert taken is not None and slot is not None, "the store said that it had room"
        pages = (*known, *taken)
        self._write(slot, pages, entry.arrays, len(known))
        store.publish(PrefixEntry(entry.tokens, pages, slot))
        store.pages.release(pages)
        store.slots.release([slot])
        self.counters.hits += 1
        self.counters.hit_tokens += entry.num_tokens - longer_than
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._copying.clear()
        self.nbytes = 0

    def check(self) -> None:
        """Raise AssertionError if the bytes counted are not those of the arrays held."""
        for entry in self._entries.values():
            if entry not in self._copying:
                held = sum(array.nbytes for array in jax.tree.leaves(entry.arrays))
                assert held == entry.nbytes, f"{held} bytes are held, {entry.nbytes} counted"
        total = sum(entry.nbytes for entry in self._entries.values())
        assert total == self.nbytes <= self.max_bytes, f"{total} bytes, {self.nbytes} counted"
        assert all(self._entries.get(e.tokens) is e for e in self._copying), "a copy has no entry"

    def _longest(self, tokens: Sequence[int], limit: int, least: int) -> HostEntry | None:
        fits = [
            entry
            for entry in self._entries.values()
            if least <= entry.num_tokens <= limit
            and entry.tokens[-1] == tokens[entry.num_tokens - 1]
        ]
        fits.sort(key=lambda entry: entry.num_tokens, reverse=True)
        return next((e for e in fits if tuple(tokens[: e.num_tokens]) == e.tokens), None)

    def _arrive(self, entry: HostEntry) -> None:
        """Wait until `entry` is in host memory, and let go of the device's copy."""
        if entry not in self._copying:
            return
        arrays = jax.tree.map(np.asarray, entry.arrays)
        last = entry.num_pages % PAGES_AT_ONCE
        if arrays.pages and last:
            arrays = arrays.replace(pages=(*arrays.pages[:-1], arrays.pages[-1][:, :last].copy()))
        entry.arrays = arrays
        self._copying.remove(entry)

    def _evict(self) -> None:
        _, entry = self._entries.popitem(last=False)
        if entry in self._copying:
            self._copying.remove(entry)
        self.nbytes -= entry.nbytes
        self.counters.evictions += 1
