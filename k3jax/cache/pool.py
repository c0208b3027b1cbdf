"""Reference-counted ids: pages of the latent cache, slots of the recurrent state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class PoolExhausted(Exception):
    """No id of the pool is free."""


class Pool:
    """The ids 0..size-1, each free or held by one or more owners."""

    def __init__(self, name: str, size: int):
        if size < 1:
            raise ValueError(f"{name} = {size}, expected at least 1")
        self.name = name
        self._counts = [0] * size
        self._free = list(range(size - 1, -1, -1))
        self.released = 0
        """Holds given back so far: while it stands still, what could not be taken cannot be."""

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    def free_ids(self) -> tuple[int, ...]:
        """The ids that nobody holds."""
        return tuple(self._free)

    def count(self, item: int) -> int:
        """Owners of `item`."""
        return self._counts[item]

    def take(self) -> int:
        """A free id, held once. Raises PoolExhausted."""
        if not self._free:
            raise PoolExhausted(f"all {self.size} {self.name} are in use")
        item = self._free.pop()
        self._counts[item] = 1
        return item

    def share(self, items: Iterable[int]) -> None:
        """Hold `items`, which somebody already holds, once more."""
        for item in items:
            if self._counts[item] < 1:
                raise ValueError(f"{self.name}: {item} is free, so it cannot be shared")
            self._counts[item] += 1

    def release(self, items: Iterable[int]) -> None:
        """Give back one hold on each of `items`."""
        for item in items:
            if self._counts[item] < 1:
                raise ValueError(f"{self.name}: {item} is already free")
            self._counts[item] -= 1
            self.released += 1
            if self._counts[item] == 0:
                self._free.append(item)

    def check(self, held: Mapping[int, int]) -> None:
        """Raise AssertionError unless exactly `held` (id → owners) is held and all else free."""
        counts = {item: count for item, count in enumerate(self._counts) if count}
        wanted = {item: count for item, count in held.items() if count}
        if counts != wanted:
            odd = {
                item: (counts.get(item, 0), wanted.get(item, 0))
                for item in counts.keys() | wanted.keys()
                if counts.get(item, 0) != wanted.get(item, 0)
            }
            raise AssertionError(f"{self.name}: id → (counted, owned) differ: {odd}")
        if sorted(self._free) != [i for i, count in enumerate(self._counts) if not count]:
            raise AssertionError(f"{self.name}: the free list is not the ids that nobody holds")
