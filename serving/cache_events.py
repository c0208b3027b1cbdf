"""Tells routers which prefixes can be resumed here, in blocks.

A block is announced while at least one prefix that covers it has a checkpoint on the device, so a
router that follows the announced blocks of a conversation finds the state to go on from.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from smg_grpc_proto.generated import common_pb2 as common

from k3jax.engine.engine import CacheChange

HISTORY = 256
"""Batches kept for a subscriber that comes back."""

MAX_UNSENT = 1024
"""Batches that a subscriber may lag behind before its stream ends."""


def chain(tokens: Sequence[int], block_size: int) -> Iterator[tuple[int, Sequence[int]]]:
    """(hash, ids) of the whole blocks of a prefix; a hash covers all ids before it.

    The first block that shows an image ends the chain: the engine knows its tokens by what they
    show, as negative numbers, and a router only by one and the same id.
    """
    parent = b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        if min(block) < 0:
            return
        packed = b"".join(token.to_bytes(4, "little") for token in block)
        parent = hashlib.blake2b(parent + packed, digest_size=8).digest()
        yield int.from_bytes(parent, "little", signed=True), block


class CachePublisher:
    """Turns the engine's cache events into numbered batches for any number of subscribers."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.sequence = 0
        self._event_id = 0
        self._covered: Counter[int] = Counter()
        self._prefixes: set[tuple[int, ...]] = set()
        self._history: deque[common.KvEventBatch] = deque(maxlen=HISTORY)
        self._subscribers: set[Subscription] = set()

    @property
    def num_subscribers(self) -> int:
        """Routers that listen."""
        return len(self._subscribers)

    def apply(self, changes: Iterable[CacheChange]) -> None:
        """Publish what the engine reports."""
        out: list[common.KvCacheEvent] = []
        for change in changes:
            out.extend((self._stored if change.stored else self._removed)(change.tokens))
        if out:
            self.sequence += 1
            batch = common.KvEventBatch(
                sequence_number=self.sequence, timestamp=time.time(), events=out
            )
            self._history.append(batch)
            for subscriber in self._subscribers:
                subscriber.put(batch)

    def subscribe(self, start: int = 0) -> Subscription:
        """From the current state; or after batch `start` of before, where it is remembered."""
        subscription = Subscription(self._subscribers.discard)
        oldest = self._history[0].sequence_number if self._history else self.sequence + 1
        if 0 < start <= self.sequence and start >= oldest - 1:
            missed = [batch for batch in self._history if batch.sequence_number > start]
        else:
            missed = [self.snapshot()] if self.sequence else []
        for batch in missed:
            subscription.put(batch)
        self._subscribers.add(subscription)
        return subscription

    def snapshot(self) -> common.KvEventBatch:
        """All that can be resumed now, as one batch that replaces what was announced before."""
        events = [common.KvCacheEvent(cleared=common.KvCacheCleared())]
        announced: set[int] = set()
        for tokens in sorted(self._prefixes, key=len):
            events.extend(
                common.KvCacheEvent(stored=stored) for stored in self._missing(tokens, announced)
            )
            announced.update(block_hash for block_hash, _ in chain(tokens, self.block_size))
        return common.KvEventBatch(
            sequence_number=self.sequence,
            timestamp=time.time(),
            events=events,
            snapshot=common.KvSnapshotChunk(index=0, count=1, blocks=len(announced)),
        )

    def prefixes(self) -> list[tuple[int, int]]:
        """(tokens, hash of the last whole block) of everything resumable, longest first."""
        found = []
        for tokens in self._prefixes:
            hashes = [block_hash for block_hash, _ in chain(tokens, self.block_size)]
            found.append((len(tokens), hashes[-1] if hashes else 0))
        return sorted(found, reverse=True)

    def _stored(self, tokens: tuple[int, ...]) -> Iterator[common.KvCacheEvent]:
        if tokens in self._prefixes:
            return
        self._prefixes.add(tokens)
        for stored in self._missing(tokens, self._covered):
            yield self._event(stored=stored)
        self._covered.update(block_hash for block_hash, _ in chain(tokens, self.block_size))

    def _removed(self, tokens: tuple[int, ...]) -> Iterator[common.KvCacheEvent]:
        if tokens not in self._prefixes:
            return
        self._prefixes.remove(tokens)
        gone = []
        for block_hash, _ in chain(tokens, self.block_size):
            self._covered[block_hash] -= 1
            if not self._covered[block_hash]:
                del self._covered[block_hash]
                gone.append(block_hash)
        if gone:
            yield self._event(removed=common.KvBlocksRemoved(block_hashes=gone))

    def _missing(
        self, tokens: Sequence[int], announced: Container[int]
    ) -> Iterator[common.KvBlocksStored]:
        """The blocks of a prefix that are not announced yet: its end, one chain."""
        parent: int | None = None
        blocks = []
        for block_hash, block in chain(tokens, self.block_size):
            if block_hash in announced:
                parent = block_hash
                continue
            blocks.append(
                common.KvBlock(block_hash=block_hash, token_ids=block, block_size=self.block_size)
            )
        if blocks:
            stored = common.KvBlocksStored(blocks=blocks, tier=common.KV_CACHE_TIER_DEVICE)
            if parent is not None:
                stored.parent_block_hash = parent
            yield stored

    def _event(self, **data: object) -> common.KvCacheEvent:
        self._event_id += 1
        return common.KvCacheEvent(event_id=self._event_id, **data)  # pyright: ignore[reportArgumentType]


class Subscription:
    """One router's batches, in order."""

    def __init__(self, leave: Callable[[Subscription], None]) -> None:
        self._queue: asyncio.Queue[common.KvEventBatch | None] = asyncio.Queue()
        self._leave = leave
        self.lagged = False

    def put(self, batch: common.KvEventBatch) -> None:
        """Add a batch; a subscriber that lags too far behind gets no more."""
        if self._queue.qsize() < MAX_UNSENT:
            self._queue.put_nowait(batch)
        elif not self.lagged:
            self.lagged = True
            self._queue.put_nowait(None)

    async def next(self, timeout: float) -> common.KvEventBatch | None:
        """The next batch; None after `timeout` seconds, or at once when it has lagged."""
        try:
            return await asyncio.wait_for(self._queue.get(), timeout)
        except TimeoutError:
            return None

    def close(self) -> None:
        """Receive nothing more."""
        self._leave(self)
