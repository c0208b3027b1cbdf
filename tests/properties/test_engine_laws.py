"""The laws of the engine on a small real model, with NaN in whatever nobody holds.

`cold` answers a request on its own in an engine without a cache: what every answer has to equal.
"""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.engine.engine import Engine
from k3jax.engine.generate import generate
from k3jax.engine.request import FinishReason, Request, SamplingParams
from tests.properties.tiny_engine import (
    CONFIG,
    NARROW,
    PAGE,
    Answer,
    Answers,
    ask,
    cached_state,
    free,
    make_engine,
    prompt_of,
    run,
    same,
    step,
    weights,
)

engine_of = cache(make_engine)
"""Engines that tests share; each test flushes what it finds."""


def fresh(**changes) -> Engine:
    engine = engine_of(**changes)
    engine.flush_cache()
    return engine


@cache
def cold(prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
    answer = ask(fresh(prefix_cache=False), prompt, sampling)
    assert answer.cached == 0
    return answer


def same_state(found: Engine, expected: Engine, tokens: list[int]) -> None:
    states = zip(cached_state(found, tokens), cached_state(expected, tokens), strict=True)
    for a, b in states:
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("length", [1, 5, 6, 16, 17, 31, 48])
def test_any_spans_of_a_prompt_give_the_same_logits_and_state(length):
    prompt = prompt_of(length)
    wide, narrow = fresh(), fresh(prefill_shapes=NARROW)
    expected = ask(wide, prompt)
    same(ask(narrow, prompt), expected)
    same_state(narrow, wide, [*prompt, *expected.tokens[:-1]])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 40])
def test_a_whole_prompt_hit_gives_what_computing_gives(length):
    prompt, engine = prompt_of(length, 1), fresh()
    first, again = ask(engine, prompt), ask(engine, prompt)
    assert (first.cached, again.cached) == (0, (length - 1) // PAGE * PAGE)
    same(first, cold(prompt, free()))
    same(again, first)


@given(shared=st.integers(1, 40), length=st.integers(1, 40), answer=st.integers(1, 9))
@settings(max_examples=15)
def test_a_hit_gives_what_computing_gives(shared, length, answer):
    """After any other prompt with which the new one has some of its tokens in common."""
    before = prompt_of(40, 2)[:shared]
    prompt = (*before[:length], *prompt_of(40, 3)[: max(0, length - shared)])
    engine = fresh()
    earlier = ask(engine, before, free(max_tokens=answer))
    same(ask(engine, prompt), cold(prompt, free()))
    follow_up = (*before, *earlier.tokens, 5, 7)
    continued = ask(engine, follow_up)
    assert continued.cached >= shared // PAGE * PAGE - PAGE
    same(continued, cold(follow_up, free()))
    reference = fresh(prefill_shapes=NARROW)
    ask(reference, follow_up)
    same_state(engine, reference, [*follow_up, *continued.tokens[:-1]])


def test_a_follow_up_turn_computes_only_what_is_new():
    engine, prompt = fresh(), prompt_of(13, 4)
    first = ask(engine, prompt)
    follow_up = (*prompt, *first.tokens, 3)
    continued = ask(engine, follow_up)
    assert continued.cached == len(follow_up) - 2
    same(continued, cold(follow_up, free()))


SAMPLINGS = (
    free(max_tokens=12),
    free(max_tokens=3, temperature=0.9, top_p=0.9, seed=3),
    free(max_tokens=14, temperature=1.3, top_k=20, min_p=0.01, seed=2**40),
    free(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.7),
    free(max_tokens=9, temperature=1.0, presence_penalty=1.5, seed=8, logprobs=3),
    free(max_tokens=7, logprobs=None),
)
PROMPTS = tuple(prompt_of(40, 5)[:length] for length in (1, 7, 8, 17, 30, 40)) + tuple(
    (*prompt_of(40, 5)[:16], *prompt_of(length, 6)) for length in (1, 8, 13)
)


@st.composite
def traffic(draw):
    """(steps to wait, prompt, sampling, choices, priority) of each request."""
    one = st.tuples(
        st.integers(0, 4),
        st.sampled_from(PROMPTS),
        st.sampled_from(SAMPLINGS),
        st.sampled_from([1, 1, 2]),
        st.integers(0, 1),
    )
    return draw(st.lists(one, min_size=2, max_size=6))


def run_traffic(engine: Engine, requests) -> Answers:
    answers: Answers = {}
    for number, (wait, prompt, sampling, n, priority) in enumerate(requests):
        for _ in range(wait):
            step(engine, answers)
        engine.submit(Request(str(number), prompt, sampling, n=n, priority=priority))
    while engine.has_work:
        step(engine, answers)
    return answers


def check_traffic(answers: Answers, requests) -> None:
    """Every choice is what it would be on its own."""
    assert len(answers) == sum(n for _, _, _, n, _ in requests)
    for number, (_, prompt, sampling, n, _) in enumerate(requests):
        for choice in range(n):
            seeded = SamplingParams(
                **{**sampling.__dict__, "seed": sampling.seed + choice if choice else sampling.seed}
            )
            same(answers[str(number), choice], cold(prompt, seeded))


@given(requests=traffic())
@settings(max_examples=12)
def test_an_answer_does_not_depend_on_what_else_runs(requests):
    check_traffic(run_traffic(fresh(), requests), requests)


def test_preempted_sequences_end_as_if_nothing_had_been():
    """Three rows that need 7 pages each, of 12; penalties and seeds have to survive, too."""
    requests = [
        (0, prompt_of(30, number), SamplingParams(**{**sampling.__dict__, "max_tokens": 22}), 1, 0)
        for number, sampling in enumerate(SAMPLINGS[1:5])
    ]
    engine = make_engine()
    answers = run_traffic(engine, requests)
    assert engine.stats().preemptions >= 2
    check_traffic(answers, requests)


def test_pools_are_whole_again_after_any_traffic():
    engine = make_engine()
    run_traffic(engine, [(1, prompt, SAMPLINGS[0], 2, 0) for prompt in PROMPTS])
    stats = engine.stats()
    cached_pages, cached_slots = engine.store.tree.held()
    assert stats.pages_free + len(cached_pages) == stats.pages_total
    assert stats.slots_free + len(cached_slots) == stats.slots_total
    assert stats.running == stats.waiting == 0 and stats.hits > 0
    engine.flush_cache()
    stats = engine.stats()
    assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)


def test_two_hundred_aborts_leave_a_working_engine():
    engine, rng = make_engine(), np.random.default_rng(9)
    answers: Answers = {}
    for number in range(200):
        prompt = PROMPTS[rng.integers(len(PROMPTS))]
        engine.submit(Request(str(number), prompt, free(max_tokens=9), n=1 + number % 2))
        for _ in range(rng.integers(4)):
            step(engine, answers)
        if number >= 2:
            engine.abort(str(number - rng.integers(3)))
    for number in range(200):
        engine.abort(str(number))
    run(engine)
    ended = [answer for answer in answers.values() if answer.reason is FinishReason.ABORT]
    assert len(ended) > 100
    same(ask(engine, PROMPTS[5]), cold(PROMPTS[5], free()))
    engine.flush_cache()
    stats = engine.stats()
    assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)


def test_the_engine_and_generate_give_the_same_tokens():
    prompts = [prompt_of(length, 7) for length in (1, 33, 48, 48)]
    samplings = [
        free(max_tokens=14, logprobs=None),
        free(max_tokens=14, logprobs=None),
        free(max_tokens=9, logprobs=None, temperature=1.1, top_p=0.95, seed=5),
        free(max_tokens=14, logprobs=None, temperature=0.8, repetition_penalty=1.2, seed=2**33),
    ]
    expected = generate(weights(), CONFIG, prompts, samplings)
    requests = [
        Request(str(number), prompt, sampling)
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    answers = run(fresh(), requests)
    for number, completion in enumerate(expected):
        found = answers[str(number), 0]
        assert (tuple(found.tokens), found.reason) == (completion.tokens, completion.finish_reason)
