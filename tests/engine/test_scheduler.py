"""Plans on a symbolic device (tests/properties): every read is checked, freed places are poison."""

import pytest

from k3jax.engine.request import FinishReason
from k3jax.engine.sequence import Phase
from tests.properties.scheduler_rig import Rig, Sizes


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + place) % 5 for place in range(length)]


def hits(rig: Rig) -> int:
    return rig.store.counters.hit_tokens


@pytest.mark.parametrize("interval", [None, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17])
def test_a_repeated_prompt_continues_within_itself(length, interval):
    """Lengths around pages, checkpoints and spans; at least one token is always computed."""
    rig = Rig(Sizes(interval=interval))
    first = rig.submit(prompt_of(length), max_tokens=3, stops=False)[0]
    rig.drain()
    again = rig.submit(prompt_of(length), max_tokens=3, stops=False)[0]
    rig.drain()
    assert rig.output(again) == rig.output(first)
    assert first.cached_tokens == 0
    assert again.cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize("length", [3, 8, 9])
def test_a_follow_up_turn_continues_from_the_last_reply(length):
    rig = Rig()
    first = rig.submit(prompt_of(length), max_tokens=4, stops=False)[0]
    rig.drain()
    follow_up = rig.submit([*first.tokens, 3, 3], stops=False)[0]
    rig.drain()
    assert follow_up.cached_tokens == length + 3, "the last token of a reply is never computed"


def test_the_branch_of_a_shared_prefix_becomes_a_checkpoint():
    rig = Rig(Sizes(num_pages=24))
    for last in (0, 1, 2):
        sequence = rig.submit([*prompt_of(8), *[last] * 5], stops=False)[0]
        rig.drain()
        assert sequence.cached_tokens == (8 if last == 2 else 0)


def test_two_identical_prompts_of_one_step_do_not_use_one_another():
    rig = Rig(Sizes(shapes=((1, 16), (2, 16))))
    one, two = (rig.submit(prompt_of(9), stops=False)[0] for _ in range(2))
    rig.step()
    assert {row.sequence for row in rig.plans[0].rows} == {one, two}
    rig.drain()
    assert one.cached_tokens == two.cached_tokens == 0
    assert rig.output(one) == rig.output(two)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_choices_share_their_prompt(length):
    rig = Rig()
    choices = rig.submit(prompt_of(length), n=3, max_tokens=5, stops=False)
    rig.drain()
    assert len({tuple(rig.output(choice)) for choice in choices}) > 1, "seeds make no difference"
    assert [choice.cached_tokens for choice in choices] == [0, length - 1, length - 1]


def test_a_sequence_is_preempted_twice_and_none_the_wiser():
    rig = Rig(Sizes(num_pages=8, num_slots=4))
    last = rig.submit(prompt_of(8), priority=2, max_tokens=12, stops=False)[0]
    for times in (1, 2):
        while last.phase is not Phase.DECODE or last.num_generated < 3 * times:
            rig.step()
        urgent = rig.submit([4] * 12, priority=0, max_tokens=9, stops=False)[0]
        while last.preemptions < times:
            rig.step()
        while urgent.phase is not Phase.FINISHED:
            rig.step()
    rig.drain()
    assert last.preemptions == 2 and len(rig.output(last)) == 12


def test_a_preempted_sequence_continues_from_where_it_was():
    rig = Rig(Sizes(max_rows=1, num_pages=12))
    low = rig.submit(prompt_of(8), priority=1, max_tokens=9, stops=False)[0]
    while low.num_generated < 5:
        rig.step()
    rig.submit([3, 3], priority=0, stops=False)
    rig.drain()
    assert low.preemptions == 1
    starts = [row.start for plan in rig.plans for row in plan.rows if row.sequence is low]
    assert starts == sorted(set(starts)), "tokens were computed twice"


def test_exhausted_pools_make_requests_wait():
    rig = Rig(Sizes(num_pages=6, num_slots=2, max_rows=4))
    for first in range(7):
        rig.submit(prompt_of(11, first), max_tokens=8, stops=False)
    rig.step()
    assert len(rig.scheduler.running) < 7 and rig.scheduler.waiting
    rig.drain()
    assert sum(e.finish_reason is FinishReason.LENGTH for e in rig.emissions) == 7


def test_one_page_pool_and_one_slot_serve_one_after_another():
    rig = Rig(Sizes(num_pages=6, num_slots=1))
    made = [rig.submit(prompt_of(20), max_tokens=4, stops=False)[0] for _ in range(3)]
    rig.drain()
    assert len({tuple(rig.output(sequence)) for sequence in made}) == 1


def test_running_sequences_wait_for_at_most_one_prefill_step_per_token():
    rig = Rig(Sizes(num_pages=40, max_context=24, shapes=((1, 2),)))
    talker = rig.submit([1], max_tokens=20, stops=False)[0]
    rig.step()
    for first in range(3):
        rig.submit(prompt_of(20, first), max_tokens=1, stops=False)
    gaps = []
    last = 0
    while talker.phase is not Phase.FINISHED:
        rig.step()
        if rig.plans[-1].rows[0].sequence is talker and rig.plans[-1].width == 1:
            gaps.append(len(rig.plans) - last)
            last = len(rig.plans)
    assert max(gaps) == 2 and len(gaps) == 19


def test_a_prompt_is_not_kept_waiting_by_running_sequences():
    rig = Rig(Sizes(num_pages=40, shapes=((1, 4),)))
    for first in range(3):
        rig.submit([first], max_tokens=20, stops=False)
    rig.step()
    late = rig.submit(prompt_of(12), max_tokens=1, stops=False)[0]
    steps = 0
    while late.phase is not Phase.FINISHED:
        rig.step()
        steps += 1
    assert steps <= 2 * (3 + 2) + 2, "three spans, each after at most one decode step"


def test_smaller_priorities_are_admitted_first():
    rig = Rig(Sizes(max_rows=1, num_pages=12))
    order = [rig.submit([p], priority=p, stops=False)[0] for p in (1, 0, 2)]
    rig.drain()
    ended = [e.sequence for e in rig.emissions if e.finish_reason]
    assert ended == [order[1], order[0], order[2]]


def test_stop_ids_and_lengths_are_exact():
    rig = Rig(Sizes(num_pages=24))
    reasons = set()
    for first in range(5):
        for length in (1, 4, 9):
            sequence = rig.submit(prompt_of(length, first), max_tokens=9)[0]
            ended = rig.drain()[-1]
            reasons.add(ended.finish_reason)
            stopped = ended.finish_reason is FinishReason.STOP
            assert (rig.output(sequence)[-1] in sequence.stop_ids) == stopped
            assert stopped or len(rig.output(sequence)) == 9
            assert not sequence.stop_ids & set(rig.output(sequence)[:-1])
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("after", range(8))
def test_an_aborted_request_gives_everything_back(after):
    rig = Rig(Sizes(num_slots=4, keep=True))
    rig.submit(prompt_of(13), n=2, max_tokens=6, stops=False)
    for _ in range(after):
        rig.step()
    rig.abort("0")
    assert not rig.scheduler.running and not rig.scheduler.waiting
    rig.drain()
    rig.flush()
    assert rig.store.pages.num_free == rig.store.pages.size
    assert rig.store.slots.num_free == rig.store.slots.size


def test_what_an_aborted_request_had_not_computed_is_not_cached():
    rig = Rig(Sizes(shapes=((1, 4),)))
    rig.submit(prompt_of(12), stops=False)
    rig.step()
    rig.abort("0")
    retry = rig.submit(prompt_of(12), stops=False)[0]
    rig.drain()
    assert retry.cached_tokens == 0, "the first span leaves no checkpoint"


def test_two_images_with_equal_tokens_share_nothing_after_the_first():
    rig = Rig(Sizes(num_pages=24))
    tokens = [1, 2, 3, 4, 0, 0, 0, 0, 1]
    keys = [[*tokens[:4], *[image] * 4, 1] for image in (-1, -2, -1)]
    made = [rig.submit(tokens, keys=key, stops=False)[0] for key in keys[:1]]
    rig.drain()
    for key in keys[1:]:
        made.append(rig.submit(tokens, keys=key, stops=False)[0])
        rig.drain()
    assert [sequence.cached_tokens for sequence in made] == [0, 0, 8]
    assert rig.output(made[0]) == rig.output(made[2]) != rig.output(made[1])


def test_a_constrained_sequence_sees_each_token_before_the_next_is_asked_for():
    rig = Rig()
    rig.submit([1, 2], max_tokens=4, constrained=True, stops=False)
    free = rig.submit([3, 4], max_tokens=8, stops=False)[0]
    while rig.live:
        rig.step()
        for sequence in rig.scheduler.running:
            assert sequence is free or sequence.pending <= 1
    assert len(rig.output(free)) == 8


def test_nothing_of_a_failed_step_is_used():
    rig = Rig()
    rig.submit(prompt_of(9), stops=False)
    rig.step()
    rig.fail()
    retry = rig.submit(prompt_of(9), stops=False)[0]
    rig.drain()
    assert retry.cached_tokens == 0


def test_a_blocked_head_is_tried_again_only_when_something_was_released():
    rig = Rig(Sizes(num_pages=8, num_slots=4))
    rig.submit(prompt_of(9), max_tokens=12, stops=False)
    rig.step()
    blocked = rig.submit([4] * 20, max_tokens=1, stops=False)[0]
    tries: list[int] = []
    rig.scheduler.promote = lambda *_: tries.append(len(rig.plans)) or False

    steps = 0
    while blocked.phase is Phase.WAITING:
        rig.step()
        steps += 1

    assert steps > 10
    assert len(tries) <= 3
