"""Drives a scheduler as the engine does, over a symbolic device, and checks it after every move."""

from collections import deque
from dataclasses import dataclass, field

from k3jax.cache.store import PrefixStore
from k3jax.engine.request import FinishReason, Request, SamplingParams
from k3jax.engine.scheduler import Scheduler, SchedulerConfig
from k3jax.engine.sequence import Emission, Phase, Sequence, StepPlan
from tests.properties.symbolic_device import STOP, SymbolicDevice, Truth


@dataclass(frozen=True)
class Sizes:
    """Pools and buckets of one rig."""

    page_size: int = 4
    num_pages: int = 12
    num_slots: int = 8
    max_rows: int = 4
    max_context: int = 24
    shapes: tuple[tuple[int, int], ...] = ((1, 4), (2, 4), (1, 8))
    interval: int | None = None
    keep: bool = True


class _AnyToken:
    """A constraint that allows everything: the scheduler only asks whether there is one."""

    def fork(self) -> "_AnyToken":
        return self

    def mask(self) -> bytes:
        return b"\xff" * 4

    def accept(self, token: int) -> None:
        pass


@dataclass
class Rig:
    """Scheduler, store and device, with one step in flight."""

    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.store = PrefixStore(
            num_pages=sizes.num_pages,
            num_slots=sizes.num_slots,
            page_size=sizes.page_size,
            keep_prefixes=sizes.keep,
        )
        rows = tuple(sorted({1, sizes.max_rows}))
        self.scheduler = Scheduler(
            SchedulerConfig(sizes.max_rows, sizes.shapes, rows, sizes.interval), self.store
        )
        self.device = SymbolicDevice(self.store, sizes.max_rows)
        self.truths: dict[Sequence, Truth] = {}
        self.live: dict[str, list[Sequence]] = {}
        self.plans: list[StepPlan] = []
        self.emissions: list[Emission] = []
        self._in_flight: deque[tuple[StepPlan, list[int], int]] = deque()
        self._absorbed = 0
        self._requests = 0
        self._arrivals = 0

    def submit(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        priority: int = 0,
        max_tokens: int = 4,
        keys: list[int] | None = None,
        constrained: bool = False,
        seed: int = 0,
        stops: bool = True,
    ) -> list[Sequence]:
        """Queue a request; `keys` (negative where an image is) make it one with images."""
        budget = min(max_tokens, self.sizes.max_context - len(prompt))
        assert budget > 0
        request = Request(
            str(self._requests),
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, seed=seed),
            n=n,
            priority=priority,
            images=None if keys is None else object(),  # pyright: ignore[reportArgumentType]
        )
        self._requests += 1
        made: list[Sequence] = []
        for choice in range(n):
            tokens = list(prompt)
            sequence = Sequence(
                request,
                choice,
                SamplingParams(max_tokens=max_tokens, seed=seed + choice),
                self._arrivals,
                budget,
                frozenset([STOP] if stops else []),
                tokens,
                tokens if keys is None else list(keys),
                _AnyToken() if constrained else None,
                leader=made[0] if made and self.sizes.keep else None,
            )
            self._arrivals += 1
            self.truths[sequence] = Truth(sequence)
            self.scheduler.add(sequence)
            made.append(sequence)
        self.live[request.id] = list(made)
        self.check()
        return made

    def step(self) -> list[Emission]:
        """Plan and dispatch a step, then absorb the one before it."""
        ready = [s for s in self.scheduler.running if s.may_decode and self._has_page(s)]
        in_prefill = [s for s in self.scheduler.running if s.phase is Phase.PREFILL]
        before = {s: s.preemptions for s in self.scheduler.running}
        plan = self.scheduler.plan()
        ready = [s for s in ready if s.preemptions == before[s]]
        self.check()
        if plan is not None:
            self._check_shape(plan)
            self._check_turns(plan, ready, in_prefill)
            tokens = self.device.run(plan, self.truths)
            self.scheduler.dispatched(plan)
            self._in_flight.append((plan, tokens, self.device.steps))
            self.plans.append(plan)
            self.check()
        emissions: list[Emission] = []
        while self._in_flight and (plan is None or len(self._in_flight) > 1):
            emissions += self._absorb(*self._in_flight.popleft())
        return emissions

    def abort(self, request_id: str) -> None:
        """Give up a request."""
        for sequence in self.live.pop(request_id):
            self.scheduler.abort(sequence)
            self.check()

    def flush(self) -> None:
        """Forget all cached prefixes."""
        self.store.clear()
        self.check()

    def fail(self) -> None:
        """The next step raises: everything ends, as in the engine."""
        self.scheduler.plan()
        for request_id in list(self.live):
            for sequence in self.live.pop(request_id):
                self.scheduler.abort(sequence)
        self._in_flight.clear()
        self.scheduler.reset()
        self.store.clear()
        self.device.poison_all()
        self.check()
        assert self.store.pages.num_free == self.store.pages.size
        assert self.store.slots.num_free == self.store.slots.size

    def drain(self) -> list[Emission]:
        """Step until all is done; fails when that takes far longer than everything one by one."""
        emissions: list[Emission] = []
        work = sum(len(s.tokens) + s.budget for some in self.live.values() for s in some)
        for _ in range(20 * work + 20):
            if not self.live and not self._in_flight:
                return emissions
            emissions += self.step()
        raise AssertionError(f"no end in sight: {[*self.scheduler.running]}")

    def output(self, sequence: Sequence) -> list[int]:
        """What the sequence has produced."""
        return sequence.tokens[sequence.num_prompt :]

    def check(self) -> None:
        """Everything is accounted for, and every cached prefix is whole; then poison the rest."""
        self.scheduler.check()
        for entry in self.store.tree.entries():
            self.device.check_entry(entry, self._absorbed)
        self.device.poison_free()

    def _absorb(self, plan: StepPlan, tokens: list[int], number: int) -> list[Emission]:
        self._absorbed = number
        emissions = self.scheduler.absorb(plan, tokens)
        for emission in emissions:
            self._check_emission(emission)
        self.emissions += emissions
        self.check()
        return emissions

    def _check_emission(self, emission: Emission) -> None:
        sequence, truth = emission.sequence, self.truths[emission.sequence]
        position = len(sequence.tokens) - 1
        count = position + 1 - sequence.num_prompt
        assert emission.token == sequence.tokens[-1] == truth.token(position), "a wrong token"
        reason = None
        if emission.token in sequence.stop_ids:
            reason = FinishReason.STOP
        elif count == sequence.budget:
            reason = FinishReason.LENGTH
        assert emission.finish_reason == reason
        if reason is not None:
            rest = [s for s in self.live[sequence.request.id] if s is not sequence]
            self.live[sequence.request.id] = rest
            if not rest:
                del self.live[sequence.request.id]

    def _has_page(self, sequence: Sequence) -> bool:
        return sequence.computed < len(sequence.pages) * self.sizes.page_size

    def _check_shape(self, plan: StepPlan) -> None:
        """The plan fits a bucket, and what is known of its rows is true."""
        lanes = [row.sequence.lane for row in plan.rows]
        assert len(set(lanes)) == len(lanes) and -1 not in lanes
        assert plan.context <= self.sizes.max_context
        asked = [row.sequence for row in plan.rows if row.emits]
        blind = [s for s in asked if s.constraint is not None and s.pending > 1]
        assert not blind, "a constrained row is asked for a token before its last one is known"
        if plan.width == 1:
            assert len(plan.rows) <= plan.num_rows <= self.sizes.max_rows
            assert all(row.decodes and row.length == 1 and row.emits for row in plan.rows)
        else:
            assert (plan.num_rows, plan.width) in self.sizes.shapes
            assert len(plan.rows) <= plan.num_rows
            assert all(1 <= row.length <= plan.width and not row.decodes for row in plan.rows)
            if any(row.sequence.request.images is not None for row in plan.rows):
                assert len(plan.rows) == plan.num_rows == 1

    def _check_turns(self, plan: StepPlan, ready: list[Sequence], prefill: list[Sequence]) -> None:
        """Decode steps and prefill steps take turns while there is work for both."""
        rows = {row.sequence for row in plan.rows}
        if plan.width == 1:
            missed = [s for s in ready if s.phase is Phase.DECODE and s not in rows]
            assert not missed, "a decode step leaves out a row that was ready"
        if not self.plans:
            return
        decoded = self.plans[-1].width == 1
        if not decoded and any(s.phase is Phase.DECODE for s in ready):
            assert plan.width == 1, "a second prefill step before rows that could decode"
        if decoded and any(s.phase is Phase.PREFILL for s in prefill):
            assert plan.width > 1, "a second decode step before a waiting prompt"
