"""A device that keeps, instead of numbers, which tokens every state and latent was made from.

Scheduler plans run on it step by step. A row must find in its slot and pages exactly the traces of
its own tokens; everything that nobody holds is poisoned between steps. What it samples depends on
everything read, so a sequence's output can be told beforehand, without a cache.
"""

from dataclasses import dataclass

from k3jax.cache.prefix import PrefixEntry
from k3jax.cache.store import PrefixStore
from k3jax.engine.sequence import NO_SLOT, Row, Sequence, StepPlan

VOCAB = 6
STOP = 5
EMPTY = 0
"""Trace of no tokens."""


def trace(before: int, token: int) -> int:
    """What is left of some tokens and one more."""
    return hash((before, 1000 + token))  # hash(-1) is hash(-2)


def sampled(digest: int, seed: int, generated: int) -> int:
    """The token after `digest`: stop ids come up now and then."""
    mixed = hash((digest, seed, generated, 17)) >> 7
    return STOP if mixed % 11 == 0 else mixed % (VOCAB - 1)


class Truth:
    """A sequence's tokens and their traces as they are without cache, batch or limits."""

    def __init__(self, sequence: Sequence):
        self._seed = sequence.sampling.seed
        self._prompt = sequence.num_prompt
        self.tokens: list[int] = []
        self._traces = [EMPTY]
        for token in sequence.keys:
            self._append(token)

    def after(self, count: int) -> int:
        """The trace of the first `count` tokens."""
        self._grow(count)
        return self._traces[count]

    def token(self, position: int) -> int:
        """The token at `position`."""
        self._grow(position + 1)
        return self.tokens[position]

    def _grow(self, count: int) -> None:
        while len(self.tokens) < count:
            self._append(sampled(self._traces[-1], self._seed, len(self.tokens) - self._prompt))

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self._traces.append(trace(self._traces[-1], token))


@dataclass(frozen=True)
class Written:
    """What a slot or a position holds: the trace of so many tokens, and the step it is of."""

    count: int
    digest: int
    step: int


POISON = Written(-1, -1, 1 << 60)


class SymbolicDevice:
    """Slots, pages and each lane's last token; steps run at once, in order of dispatch."""

    def __init__(self, store: PrefixStore, max_rows: int):
        self._store = store
        self._size = store.page_size
        self.slots = [POISON] * store.slots.size
        self.pages = [[POISON] * self._size for _ in range(store.pages.size)]
        self.last_tokens = [-1] * max_rows
        self.steps = 0

    def poison_free(self) -> None:
        """Ruin whatever nobody holds."""
        for slot in self._store.slots.free_ids():
            self.slots[slot] = POISON
        for page in self._store.pages.free_ids():
            self.pages[page] = [POISON] * self._size

    def poison_all(self) -> None:
        """Ruin everything, as after a step that failed."""
        self.slots = [POISON] * len(self.slots)
        self.pages = [[POISON] * self._size for _ in self.pages]

    def run(self, plan: StepPlan, truths: dict[Sequence, Truth]) -> list[int]:
        """Copy, read, check, write and sample, as the step does."""
        self.steps += 1
        sources = [list(self.pages[row.copy[0]]) if row.copy else [] for row in plan.rows]
        for row, source in zip(plan.rows, sources, strict=True):
            if row.copy is not None:
                assert self._store.pages.count(row.copy[0]), "a free page is copied"
                self.pages[row.copy[1]] = source
        for row in plan.rows:
            self._check_reads(row, truths[row.sequence])
        written = [row.write_slot for row in plan.rows]
        assert len(set(written)) == len(written), "two rows write one slot"
        others = {row.read_slot for row in plan.rows if row.read_slot != row.write_slot}
        assert not others & set(written), "a slot is read and written by different rows"
        places: set[tuple[int, int]] = set()
        tokens = []
        for row in plan.rows:
            new = self._write(row, truths[row.sequence])
            assert not places & new, "two rows write one position"
            places |= new
            digest = self.slots[row.write_slot].digest
            token = sampled(digest, row.sequence.sampling.seed, row.generated)
            if row.emits:
                self.last_tokens[row.sequence.lane] = token
            tokens.append(token)
        return tokens

    def check_entry(self, entry: PrefixEntry, absorbed: int) -> None:
        """Both halves of a cached prefix are those of its tokens, by steps that have finished."""
        found = self.slots[entry.slot]
        assert found.step <= absorbed, "a state is cached before its step has run"
        digest = EMPTY
        for position, token in enumerate(entry.tokens):
            digest = trace(digest, token)
            latent = self._latent(entry.pages, position)
            assert latent.step <= absorbed, "a latent is cached before its step has run"
            assert latent.digest == digest, f"cached position {position} is of other tokens"
        assert (found.count, found.digest) == (entry.num_tokens, digest), (
            f"a checkpoint at {entry.num_tokens} tokens holds a state of {found.count}"
        )

    def _latent(self, pages: tuple[int, ...] | list[int], position: int) -> Written:
        return self.pages[pages[position // self._size]][position % self._size]

    def _check_reads(self, row: Row, truth: Truth) -> None:
        sequence, start = row.sequence, row.start
        if row.read_slot == NO_SLOT:
            assert start == 0, "a sequence starts from nothing in its middle"
        else:
            assert self._store.slots.count(row.read_slot), "a free slot is read"
            state = self.slots[row.read_slot]
            assert state.count == start, f"a row at {start} reads a state of {state.count} tokens"
            assert state.digest == truth.after(start), "a row reads a state of other tokens"
        for position in range(start):
            latent = self._latent(sequence.pages, position)
            assert latent.digest == truth.after(position + 1), (
                f"a row at {start} reads position {position} of other tokens, or poison"
            )
        given = [self.last_tokens[sequence.lane]]
        if not row.decodes:
            given = sequence.keys[start : start + row.length]
        expected = [truth.token(start + place) for place in range(row.length)]
        assert given == expected, "a row is given other tokens than its sequence has"

    def _write(self, row: Row, truth: Truth) -> set[tuple[int, int]]:
        places = set()
        for position in range(row.start, row.start + row.length):
            page = row.sequence.pages[position // self._size]
            assert self._store.pages.count(page), "a free page is written"
            places.add((page, position % self._size))
            count = position + 1
            self.pages[page][position % self._size] = Written(count, truth.after(count), self.steps)
        assert self._store.slots.count(row.write_slot), "a free slot is written"
        end = row.start + row.length
        self.slots[row.write_slot] = Written(end, truth.after(end), self.steps)
        return places
