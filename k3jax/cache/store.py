"""Pages and slots with the prefix tree that fills whatever running sequences leave free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k3jax.cache.pool import Pool
from k3jax.cache.prefix import Match, PrefixEntry, PrefixTree

Offload = Callable[[PrefixEntry], None]


@dataclass
class CacheCounters:
    """What the prefix cache did since start-up."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    """By `MissReason`."""


class PrefixStore:
    """Hands out pages and slots, evicting from the prefix tree when none is free.

    Pages and slots are separate pools with separate eviction: a prefix may lose its checkpoint and
    keep its pages. `offload` is told of every whole prefix that is about to lose one half.
    """

    def __init__(
        self, *, num_pages: int, num_slots: int, page_size: int, keep_prefixes: bool = True
    ):
        self.pages = Pool("pages", num_pages)
        self.slots = Pool("slots", num_slots)
        self.tree = PrefixTree(self.pages, self.slots, page_size)
        self.counters = CacheCounters()
        self.offload: Offload | None = None
        self.on_change: Callable[[PrefixEntry, bool], None] | None = None
        """Told of every prefix that became resumable (True) or ceased to be (False)."""
        self._keeps = keep_prefixes

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.tree.page_size

    def take_pages(self, count: int) -> list[int] | None:
        """`count` pages, each held once, or None (and nothing taken or evicted in vain)."""
        if not self.can_take(count):
            return None
        while self.pages.num_free < count:
            self._evict_pages()
        return [self.pages.take() for _ in range(count)]

    def can_take(self, count: int) -> bool:
        """Whether `count` pages are free or can be evicted."""
        missing = count - self.pages.num_free
        return missing <= 0 or self.evictable_pages(missing) >= missing

    def take_slot(self) -> int | None:
        """A slot, held once, or None when running sequences hold them all."""
        if not self.slots.num_free:
            entry = self.tree.oldest_checkpoint()
            if entry is None:
                return None
            self._lose(entry)
            self.tree.drop_checkpoint(entry)
        return self.slots.take()

    def can_take_slots(self, count: int) -> bool:
        """Whether `count` slots are free or can be evicted."""
        _, held = self.tree.held()
        return self.slots.num_free + sum(self.slots.count(s) == 1 for s in held) >= count

    def evictable_pages(self, enough: int) -> int:
        """Pages that only the tree holds (counting stops at `enough`)."""
        return self.tree.only_here(enough)

    def match(self, tokens: Sequence[int], limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens; pages and slot are held once more.

        Whoever gets it releases `pages`, `tail` and `slot`.
        """
        match = self.tree.match(tokens, limit) if self._keeps else Match()
        self.pages.share(match.pages)
        if match.tail is not None:
            self.pages.share([match.tail])
        if match.slot is not None:
            self.slots.share([match.slot])
        return match

    def count(self, match: Match, num_tokens: int) -> None:
        """Count a prompt of `num_tokens` that was admitted with `match`."""
        self.counters.queries += 1
        self.counters.query_tokens += num_tokens
        self.counters.hit_tokens += match.num_tokens
        self.counters.hits += match.num_tokens > 0
        if match.reason is not None:
            self.counters.misses[match.reason] += 1

    def publish(self, entry: PrefixEntry) -> None:
        """Keep a prefix whose step has run. The caller's references stay the caller's."""
        if self._keeps and self.tree.insert(entry) and self.on_change is not None:
            self.on_change(entry, True)

    def clear(self) -> None:
        """Forget all prefixes."""
        self.tree.clear()

    def _evict_pages(self) -> None:
        entries = self.tree.oldest_pages()
        assert entries is not None, "pages were counted as evictable"
        for entry in entries:
            self._lose(entry)
        self.tree.drop_pages()

    def _lose(self, entry: PrefixEntry) -> None:
        if self.offload is not None:
            self.offload(entry)
        if self.on_change is not None:
            self.on_change(entry, False)
