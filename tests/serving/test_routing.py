"""Two replicas behind the real gateway: conversations go back to where their state is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

import k3jax
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from serving.engine_loop import EngineLike
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import RunningWorker, nano, running_gateway, running_worker
from tests.serving.scripted import Replies
from tests.serving.waiting import eventually

MODEL = nano()
CONVERSATIONS, TURNS = 8, 3
WORDS = "music paper green seven house light under stone winter bread paint garden".split()


def remembering() -> FakeEngine:
    replies = Replies(MODEL.text.tokenizer, {}, thought="Hm.")
    return FakeEngine(replies, eos=MODEL.text.config.eos_token_ids, remember=True)


def follow_ups(
    policy: str, make_engine: Callable[[], EngineLike], conversations: int = CONVERSATIONS
) -> tuple[int, float, list[int]]:
    """Follow-ups that found their prefix, the share of their tokens that did, and the spread."""
    rng = random.Random(5)
    with (
        running_worker(make_engine) as first,
        running_worker(make_engine) as second,
        running_gateway(first, second, policy=policy) as gateway,
    ):
        api = OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert eventually(lambda: len(gateway.workers()) == 2)
        if policy == "cache_aware":
            assert eventually(lambda: all(map(subscribed, (first, second))))
        talks: list[list[Any]] = [
            [{"role": "system", "content": f"{i}: " + " ".join(rng.choices(WORDS, k=200))}]
            for i in range(conversations)
        ]
        hits, cached, total = 0, 0, 0
        for turn in range(TURNS):
            for i in rng.sample(range(conversations), conversations):
                question = " ".join(rng.choices(WORDS, k=12))
                talks[i].append({"role": "user", "content": question})
                answer = api.chat.completions.create(
                    model="nano",
                    messages=talks[i],
                    reasoning_effort="none",
                    max_completion_tokens=8,
                    temperature=0,
                )
                content = answer.choices[0].message.content
                talks[i].append({"role": "assistant", "content": content or "-"})
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                if turn:
                    found = (details.cached_tokens or 0) if details else 0
                    hits += found > 0
                    cached += found
                    total += answer.usage.prompt_tokens
            time.sleep(0.2)
        spread = [len(list(w.worker.requests.latest(1000))) for w in (first, second)]
    return hits, cached / total, spread


def subscribed(worker: RunningWorker) -> bool:
    return worker.worker.publisher.num_subscribers > 0


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_follow_ups_find_their_prefix(policy: str):
    hits, share, spread = follow_ups(policy, remembering)

    possible = CONVERSATIONS * (TURNS - 1)
    print(f"{policy}: {hits}/{possible} follow-ups, {share:.1%} of their tokens, spread {spread}")
    assert min(spread) > 0
    if policy == "cache_aware":
        assert hits == possible
        assert share > 0.8
    else:
        assert hits < possible


def test_follow_ups_of_the_real_engine_go_to_the_state_that_it_kept():
    params, config = k3jax.load_model(MODEL.text.folder)
    sizes = EngineConfig(
        max_rows=1,
        max_context=1024,
        num_slots=24,
        num_pages=128,
        prefill_shapes=((1, 256),),
        decode_rows=(1,),
        contexts=(1024,),
    )

    hits, share, spread = follow_ups("cache_aware", lambda: Engine(params, config, sizes), 4)

    assert min(spread) > 0
    assert hits == 4 * (TURNS - 1)
    assert share > 0.8
