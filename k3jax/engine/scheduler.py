"""What runs next: continuous batching over pages and slots, in integers.

Decode steps and prefill steps alternate while there is work for both, so between two tokens of a
running sequence lies at most one prefill step, of at most `token_budget` prompt tokens. Sequences
go in the order of priority, then arrival. A sequence is admitted when a lane, a slot and all pages
of its tokens can be had; pages for output come one by one, and when none is left the sequence that
goes last is put back in the queue, to continue later from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from k3jax.cache.prefix import Match, PrefixEntry
from k3jax.cache.store import PrefixStore
from k3jax.engine.request import FinishReason
from k3jax.engine.sequence import NO_SLOT, Emission, Phase, Publication, Row, Sequence, StepPlan

STEP_COST = 32
"""What a step costs besides its tokens, in tokens: weighs few large steps against padding."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and buckets. `prefill_shapes` are (rows, tokens per row), `decode_rows` row counts."""

    max_rows: int
    prefill_shapes: tuple[tuple[int, int], ...]
    decode_rows: tuple[int, ...]
    checkpoint_interval: int | None = None


class Scheduler:
    """Owns all sequences and the store of pages and slots."""

    def __init__(self, config: SchedulerConfig, store: PrefixStore):
        self.config, self.store = config, store
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.promote: Callable[[Seq[int], int, int], bool] | None = None
        """Asked to bring a prefix of (tokens, at most this long, longer than that) back."""
        self._lanes = list(range(config.max_rows - 1, -1, -1))
        self._open: list[StepPlan] = []
        self._decoded_last = False
        self._blocked: tuple[Sequence, int] | None = None
        """Who could not be admitted, and what had been released by then."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.rank)

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before older steps are absorbed."""
        self._admit()
        order = (self._plan_prefill, self._plan_decode)
        if not self._decoded_last:
            order = order[::-1]
        for make in order:
            plan = make()
            if plan is not None:
                self._decoded_last = make == self._plan_decode
                self._open.append(plan)
                for row in plan.rows:
                    row.sequence.last_plan = plan
                return plan
        return None

    def dispatched(self, plan: StepPlan) -> None:
        """The step is on its way: what only it read can be written by later ones."""
        self.store.pages.release(plan.released_pages)
        self.store.slots.release(plan.released_slots)
        plan.released_pages, plan.released_slots = [], []

    def absorb(self, plan: StepPlan, tokens: Seq[int]) -> list[Emission]:
        """The step has run and sampled `tokens`: publish, extend and end sequences."""
        self._close(plan)
        for publication in plan.publications:
            self.store.publish(publication.entry)
            self._release_publication(publication)
        plan.publications = []
        emissions = []
        for index, (row, token) in enumerate(zip(plan.rows, tokens, strict=False)):
            if not row.emits:
                continue
            sequence = row.sequence
            sequence.pending -= 1
            if sequence.phase is Phase.FINISHED:
                continue
            sequence.tokens.append(token)
            if sequence.keys is not sequence.tokens:
                sequence.keys.append(token)
            sequence.prompt_done = True
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                self._finish(sequence, keep=True)
            emissions.append(Emission(sequence, index, token, reason))
        return emissions

    def fail(self, plan: StepPlan) -> None:
        """The step did not run: nothing of it may be used."""
        self.dispatched(plan)
        self._close(plan)
        for publication in plan.publications:
            self._release_publication(publication)
        plan.publications = []

    def reset(self) -> None:
        """Drop all steps that have not been absorbed, after every sequence has been aborted."""
        for plan in list(self._open):
            self.fail(plan)

    def abort(self, sequence: Sequence) -> None:
        """Stop a sequence at once and free what it holds."""
        self._finish(sequence, keep=False)

    def check(self) -> None:
        """Raise AssertionError unless every page, slot and lane is accounted for."""
        pages, slots = self.store.tree.held()
        for sequence in self.running:
            pages.update(sequence.pages)
            slots.update([sequence.slot])
            if sequence.source not in (NO_SLOT, sequence.slot):
                slots.update([sequence.source])
            if sequence.copy is not None:
                pages.update([sequence.copy[0]])
        for plan in self._open:
            pages.update(plan.released_pages)
            slots.update(plan.released_slots)
            for publication in plan.publications:
                pages.update(publication.entry.pages)
                slots.update([publication.entry.slot])
        self.store.pages.check(pages)
        self.store.slots.check(slots)
        self.store.tree.check()
        lanes = sorted([*self._lanes, *(s.lane for s in self.running)])
        assert lanes == list(range(self.config.max_rows)), f"lanes are {lanes}"
        for sequence in self.waiting:
            held = sequence.pages or sequence.slot != NO_SLOT or sequence.lane != -1
            assert not held, "a waiting sequence holds something"

    # Admission

    def _admit(self) -> None:
        while True:
            ready = (s for s in self.waiting if s.pending == 0 and _leader_done(s))
            sequence = next(ready, None)
            if sequence is None:
                return
            if not self._could_reserve(sequence):
                victim = max(self.running, key=lambda s: s.rank, default=None)
                if victim is None or victim.request.priority <= sequence.request.priority:
                    return
                if not self._preempt(victim):
                    return
                continue
            self.waiting.remove(sequence)
            sequence.lane = self._lanes.pop()
            sequence.phase = Phase.PREFILL
            self.running.append(sequence)
            self.running.sort(key=lambda s: s.rank)

    def _could_reserve(self, sequence: Sequence) -> bool:
        """`_reserve` with a lane; not tried again before something has been released."""
        if not self._lanes or self._blocked == (sequence, self._released):
            return False
        if self._reserve(sequence):
            return True
        self._blocked = sequence, self._released
        return False

    @property
    def _released(self) -> int:
        return self.store.pages.released + self.store.slots.released

    def _reserve(self, sequence: Sequence) -> bool:
        """Slot and pages for all tokens so far, starting from the longest cached prefix."""
        limit = len(sequence.tokens) - 1
        match = self.store.match(sequence.keys, limit)
        if self.promote is not None and self.promote(sequence.keys, limit, match.num_tokens):
            self._release_match(match)
            match = self.store.match(sequence.keys, limit)
        if self._reserve_from(sequence, match):
            return True
        # A sequence that has everything to itself can do without the checkpoint that is in its way.
        alone = not self.running and match.num_tokens > 0
        return alone and self._reserve_from(sequence, Match(matched=match.matched))

    def _reserve_from(self, sequence: Sequence, match: Match) -> bool:
        """Reserve what `match` leaves to be had; releases the match when that fails."""
        pages = None
        slot = self.store.take_slot()
        if slot is not None:
            wanted = self._pages_for(len(sequence.tokens) + 1) - len(match.pages)
            growing = sum(s.phase is Phase.DECODE for s in self.running)
            if self.store.can_take(wanted + growing):
                pages = self.store.take_pages(wanted)
        if slot is None or pages is None:
            self._release_match(match)
            self.store.slots.release([] if slot is None else [slot])
            return False
        self.store.count(match, len(sequence.tokens))
        sequence.pages = [*match.pages, *pages]
        sequence.slot = slot
        sequence.source = NO_SLOT if match.slot is None else match.slot
        sequence.copy = None if match.tail is None else (match.tail, pages[0])
        sequence.computed = match.num_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = match.num_tokens
        sequence.checkpoints = self._checkpoints(sequence, match.matched)
        return True

    def _checkpoints(self, sequence: Sequence, matched: int) -> list[int]:
        """Where to leave checkpoints: last page boundary, branch point, intervals, the fork."""
        size, last = self.store.page_size, len(sequence.tokens) - 1
        wanted = {last // size * size, min(matched, last) // size * size}
        if self.config.checkpoint_interval:
            wanted.update(range(0, last + 1, self.config.checkpoint_interval))
        if sequence.request.n > 1 and sequence.choice == 0:
            wanted.add(sequence.num_prompt - 1)
        return sorted(at for at in wanted if sequence.computed < at <= last)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.store.page_size)

    # Planning

    def _plan_prefill(self) -> StepPlan | None:
        candidates = [s for s in self.running if s.phase is Phase.PREFILL]
        if not candidates:
            return None
        if candidates[0].request.images is not None:
            candidates = candidates[:1]
        else:
            candidates = [s for s in candidates if s.request.images is None]
        rows, width = self._prefill_shape([s.next_stop - s.computed for s in candidates])
        plan = StepPlan([], rows, width)
        for sequence in candidates[:rows]:
            self._prefill_row(plan, sequence, min(width, sequence.next_stop - sequence.computed))
        return plan

    def _prefill_shape(self, spans: Seq[int]) -> tuple[int, int]:
        """The bucket that computes most prompt tokens for its cost."""

        def value(shape: tuple[int, int]) -> float:
            rows, width = shape
            useful = sum(min(span, width) for span in spans[:rows])
            return useful / (rows * width + STEP_COST)

        return max(self.config.prefill_shapes, key=value)

    def _prefill_row(self, plan: StepPlan, sequence: Sequence, length: int) -> None:
        end = sequence.computed + length
        final = end == len(sequence.tokens)
        plan.rows.append(
            Row(
                sequence,
                start=sequence.computed,
                length=length,
                read_slot=sequence.source,
                write_slot=sequence.slot,
                emits=final,
                decodes=False,
                copy=sequence.copy,
                generated=sequence.num_generated,
            )
        )
        self._advance(plan, sequence, length)
        if final:
            sequence.phase = Phase.DECODE
            sequence.pending += 1
        elif end in sequence.checkpoints:
            self._leave_checkpoint(plan, sequence)

    def _leave_checkpoint(self, plan: StepPlan, sequence: Sequence) -> None:
        """The slot becomes a checkpoint; the sequence reads it and goes on in another one."""
        fresh = self.store.take_slot()
        if fresh is None:
            return
        plan.publications.append(self._publication(sequence))
        sequence.source, sequence.slot = sequence.slot, fresh

    def _plan_decode(self) -> StepPlan | None:
        rows: list[Sequence] = []
        for sequence in [s for s in self.running if s.may_decode]:
            if sequence.phase is Phase.DECODE and self._grow(sequence):
                rows.append(sequence)
        rows = [s for s in rows if s.phase is Phase.DECODE]
        if not rows:
            return None
        bucket = next(size for size in self.config.decode_rows if size >= len(rows))
        plan = StepPlan([], bucket, 1)
        for sequence in rows:
            plan.rows.append(
                Row(
                    sequence,
                    start=sequence.computed,
                    length=1,
                    read_slot=sequence.source,
                    write_slot=sequence.slot,
                    emits=True,
                    decodes=True,
                    generated=sequence.num_generated,
                )
            )
            self._advance(plan, sequence, 1)
            sequence.pending += 1
        return plan

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure of a page for the next token; False if the sequence has to wait for it."""
        while self._pages_for(sequence.computed + 1) > len(sequence.pages):
            page = self.store.take_pages(1)
            if page is not None:
                sequence.pages += page
                continue
            if any(plan.publications for plan in self._open):
                return False  # their pages can be evicted once those steps have run
            victim = max(self.running, key=lambda s: s.rank)
            if not self._preempt(victim) or victim is sequence:
                return False
        return True

    def _advance(self, plan: StepPlan, sequence: Sequence, length: int) -> None:
        sequence.computed += length
        if sequence.source not in (NO_SLOT, sequence.slot):
            plan.released_slots.append(sequence.source)
        sequence.source = sequence.slot
        if sequence.copy is not None:
            plan.released_pages.append(sequence.copy[0])
            sequence.copy = None

    # Leaving

    def _preempt(self, sequence: Sequence) -> bool:
        """Back to the queue; True if what it held can be taken at once."""
        at_once = sequence.last_plan is None or sequence.last_plan.absorbed
        self._leave(sequence, keep=True)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)
        return at_once

    def _finish(self, sequence: Sequence, *, keep: bool) -> None:
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is not Phase.FINISHED:
            self._leave(sequence, keep=keep)
        sequence.phase = Phase.FINISHED

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Give back lane, slot and pages; `keep` publishes the state first."""
        self.running.remove(sequence)
        self._lanes.append(sequence.lane)
        has_state = sequence.source == sequence.slot and sequence.computed > 0
        if keep and has_state:
            publication = self._publication(sequence)
            if sequence.last_plan is None or sequence.last_plan.absorbed:
                self.store.publish(publication.entry)
                self._release_publication(publication)
            else:
                sequence.last_plan.publications.append(publication)
        if sequence.source not in (NO_SLOT, sequence.slot):
            self.store.slots.release([sequence.source])
        if sequence.copy is not None:
            self.store.pages.release([sequence.copy[0]])
        self.store.slots.release([sequence.slot])
        self.store.pages.release(sequence.pages)
        sequence.pages, sequence.copy, sequence.lane = [], None, -1
        sequence.slot = sequence.source = NO_SLOT
        sequence.computed = 0

    def _publication(self, sequence: Sequence) -> Publication:
        """The sequence's state as it is after all planned steps, held for the tree."""
        count = sequence.computed
        entry = PrefixEntry(
            tuple(sequence.keys[:count]),
            tuple(sequence.pages[: self._pages_for(count)]),
            sequence.slot,
        )
        self.store.pages.share(entry.pages)
        self.store.slots.share([entry.slot])
        return Publication(entry)

    def _release_publication(self, publication: Publication) -> None:
        self.store.pages.release(publication.entry.pages)
        self.store.slots.release([publication.entry.slot])

    def _release_match(self, match: Match) -> None:
        self.store.pages.release([*match.pages, *([] if match.tail is None else [match.tail])])
        self.store.slots.release([] if match.slot is None else [match.slot])

    def _close(self, plan: StepPlan) -> None:
        self._open.remove(plan)
        plan.absorbed = True

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.stop_ids:
            return FinishReason.STOP
        if len(sequence.tokens) - sequence.num_prompt >= sequence.budget:
            return FinishReason.LENGTH
        return None


def _leader_done(sequence: Sequence) -> bool:
    leader = sequence.leader
    return leader is None or leader.prompt_done or leader.phase is Phase.FINISHED
