"""Whatever is asked of the scheduler in whatever order: no wrong token, nothing lost, no stall."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.properties.scheduler_rig import Rig, Sizes
from tests.properties.symbolic_device import VOCAB

SHAPES = (
    ((1, 8),),
    ((1, 4), (2, 4), (1, 8)),
    ((1, 2), (3, 2)),
    ((1, 3), (1, 16), (4, 3)),
)


def sizes_of(draw) -> Sizes:
    """Sizes by `draw(low, high)`, tight more often than not."""
    page_size = draw(1, 5)
    context = draw(6, 24)
    least = -(-context // page_size)
    return Sizes(
        page_size=page_size,
        num_pages=least + draw(0, least) * draw(0, 2),
        num_slots=draw(1, 7),
        max_rows=draw(1, 4),
        max_context=context,
        shapes=SHAPES[draw(0, len(SHAPES) - 1)],
        interval=(None, page_size, 2 * page_size)[draw(0, 2)],
        keep=draw(0, 7) > 0,
    )


class Traffic:
    """Requests that share prefixes with one another and with earlier outputs."""

    def __init__(self, rig: Rig):
        self.rig = rig
        self._known: list[list[int]] = [[0] * 24, [1, 2, 3, 4] * 6]

    def submit(self, draw) -> None:
        """Queue a request made of `draw(low, high)`."""
        known = self._known[draw(0, len(self._known) - 1)]
        longest = self.rig.sizes.max_context - 1
        suffix = [draw(0, VOCAB - 2) for _ in range(draw(0, 3))]
        prompt = [*known[: draw(0, len(known))], *suffix][: draw(1, longest)] or [0]
        keys = None
        if draw(0, 5) == 0:
            place, image = draw(0, len(prompt) - 1), draw(1, 2)
            keys = [*prompt[:place], *[-image] * len(prompt[place:])]
        made = self.rig.submit(
            prompt,
            n=(1, 1, 2, 3)[draw(0, 3)],
            priority=draw(0, 2),
            max_tokens=draw(1, 12),
            keys=keys,
            constrained=draw(0, 5) == 0,
            seed=draw(0, 1),
        )
        if keys is None:
            self._known.append(made[0].tokens)  # grows as the answer comes
        del self._known[2:-12]

    def abort(self, draw) -> None:
        """Give up some request."""
        requests = list(self.rig.live)
        self.rig.abort(requests[draw(0, len(requests) - 1)])

    def finish(self) -> None:
        """All that is left gets done, and then nothing is held but by the cache."""
        self.rig.drain()
        self.rig.flush()
        store = self.rig.store
        assert store.pages.num_free == store.pages.size
        assert store.slots.num_free == store.slots.size


def drawn(data):
    return lambda low, high: data.draw(st.integers(low, high))


class SchedulerMachine(RuleBasedStateMachine):
    """Random submits, steps, aborts, flushes and failures, in pools that are often too small."""

    @initialize(data=st.data())
    def start(self, data):
        self.traffic = Traffic(Rig(sizes_of(drawn(data))))

    @rule(data=st.data())
    def submit(self, data):
        self.traffic.submit(drawn(data))

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.traffic.rig.step()

    @precondition(lambda self: self.traffic.rig.live)
    @rule(data=st.data())
    def abort(self, data):
        self.traffic.abort(drawn(data))

    @rule()
    def flush(self):
        self.traffic.rig.flush()

    @rule()
    def fail(self):
        self.traffic.rig.fail()

    def teardown(self):
        if hasattr(self, "traffic"):
            self.traffic.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("block", range(3))
def test_thousands_of_random_moves_lose_nothing_and_make_no_wrong_token(block):
    """The same without hypothesis, which finds smaller examples but takes many times longer."""
    preemptions = hits = 0
    for seed in range(70 * block, 70 * (block + 1)):
        draw = random.Random(seed).randint
        rig = Rig(sizes_of(draw))
        traffic = Traffic(rig)
        for _ in range(draw(10, 60)):
            move = draw(0, 99)
            if move < 35:
                traffic.submit(draw)
            elif move < 90:
                rig.step()
            elif move < 97 and rig.live:
                traffic.abort(draw)
            elif move == 98:
                rig.flush()
            elif move == 99:
                rig.fail()
        traffic.finish()
        preemptions += rig.scheduler.preemptions
        hits += rig.store.counters.hits
    assert preemptions > 50 and hits > 100, "the moves did not come to what they are to test"
