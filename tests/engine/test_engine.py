"""The engine's own promises: what it refuses, what it tells, and that it outlives failures."""

from dataclasses import dataclass, field, replace

import jax
import numpy as np
import pytest

from k3jax.engine.engine import Engine, QueueFull, StepFailed
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.generate import PromptImages
from k3jax.engine.request import FinishReason, Request, SamplingParams
from tests.properties.tiny_engine import (
    CONFIG,
    Answers,
    ask,
    free,
    make_engine,
    prompt_of,
    run,
    same,
    step,
)
from tests.random_weights import random_weights, text_config


def request(name: str = "a", length: int = 9, **changes) -> Request:
    return Request(name, prompt_of(length), **{"sampling": free(), **changes})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (request(n=0), "n = 0, expected 1..128"),
        (request(n=129), "n = 129"),
        (request(sampling=None), "'a': sampling = None, expected SamplingParams"),
        (request(length=64), "has 64 tokens, but the model's context is 64"),
        (Request("a", ()), "is empty"),
        (Request("a", (3, 97)), "token id 97 at position 1"),
        (request(sampling=free(stop_ids=(97,))), "stop id 97"),
        (request(images=PromptImages(np.zeros((1, 32), np.float32))), "no vision tower"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(wrong, words):
    engine = make_engine()
    with pytest.raises(ValueError, match=words):
        engine.submit(wrong)
    assert not engine.has_work


def test_a_running_id_is_refused_and_a_finished_one_is_not():
    engine = make_engine()
    engine.submit(request())
    with pytest.raises(ValueError, match="'a' is already running"):
        engine.submit(request())
    run(engine)
    assert run(engine, [request()])["a", 0].reason is FinishReason.LENGTH


def test_a_full_queue_takes_nothing_more():
    engine = make_engine(max_waiting=2)
    engine.submit(request("a", n=2))
    with pytest.raises(QueueFull, match="2 sequences are waiting"):
        engine.submit(request("b"))
    run(engine)
    engine.submit(request("b"))


def test_no_tokens_wanted_is_an_end_without_a_token():
    answers = run(make_engine(), [request(n=2, sampling=free(max_tokens=0))])
    assert [answers["a", choice].reason for choice in (0, 1)] == [FinishReason.LENGTH] * 2
    assert answers["a", 0].tokens == []


def test_a_sequence_ends_at_the_context():
    answer = ask(make_engine(), prompt_of(60), free(max_tokens=50))
    assert (len(answer.tokens), answer.reason) == (4, FinishReason.LENGTH)


def test_the_models_end_id_and_own_stop_ids_end_a_sequence():
    engine = make_engine()
    whole = ask(engine, prompt_of(9), free(max_tokens=12)).tokens
    stopped = ask(engine, prompt_of(9), free(max_tokens=12, stop_ids=(whole[4],)))
    assert stopped.tokens == whole[: whole.index(whole[4]) + 1]
    assert stopped.reason is FinishReason.STOP
    other = Engine(
        engine.params,
        replace(CONFIG, eos_token_ids=(whole[4],)),
        EngineConfig(**{**engine.settings.__dict__}),
    )
    # The config is static, so this engine compiles: it only has to queue.
    other.submit(Request("a", prompt_of(9), free(ignore_eos=False)))
    assert whole[4] in other.scheduler.waiting[0].stop_ids


def test_abort_tells_the_end_and_whether_there_was_anything():
    engine, answers = make_engine(), {}
    assert not engine.abort("a")
    engine.submit(request(n=2))
    for _ in range(3):
        step(engine, answers)
    assert engine.abort("a") and not engine.abort("a")
    while engine.has_work:
        step(engine, answers)
    assert {answers["a", choice].reason for choice in (0, 1)} == {FinishReason.ABORT}


def test_events_carry_usage_and_the_last_one_timing():
    engine = make_engine()
    ask(engine, prompt_of(20))
    engine.submit(request(length=20))
    events = list(engine.run())
    assert {(e.prompt_tokens, e.cached_tokens) for e in events} == {(20, 16)}
    assert [e.timing is not None for e in events] == [False] * 4 + [True]
    timing = events[-1].timing
    assert timing is not None
    assert timing.submitted <= timing.admitted <= timing.first_token <= timing.finished


def test_cache_changes_add_up_to_what_is_cached():
    engine = make_engine()
    known = set()
    for seed in range(6):
        ask(engine, prompt_of(17 + seed, seed))
        for change in engine.drain_cache_changes():
            assert (change.tokens in known) != change.stored
            (known.add if change.stored else known.remove)(change.tokens)
        assert known == {entry.tokens for entry in engine.store.tree.entries()}
    engine.flush_cache()
    assert {change.tokens for change in engine.drain_cache_changes()} == known
    assert engine.drain_cache_changes() == []


@dataclass
class Alternating:
    """Even and odd tokens by turns; may fail after some tokens."""

    fails_after: int | None = None
    seen: list[int] = field(default_factory=list)

    def fork(self) -> "Alternating":
        return Alternating(self.fails_after)

    def mask(self) -> bytes:
        return (b"\x55" if len(self.seen) % 2 == 0 else b"\xaa") * 16

    def accept(self, token: int) -> None:
        self.seen.append(token)
        if self.fails_after is not None and len(self.seen) > self.fails_after:
            raise RuntimeError("no such token")


def test_constraints_are_followed_by_every_choice_and_by_nobody_else():
    sampling = free(max_tokens=9, temperature=1.5, seed=1)
    engine = make_engine()
    constrained = request("a", n=3, sampling=sampling, constraint=Alternating())
    answers = run(engine, [constrained, request("b")])
    for choice in range(3):
        tokens = answers["a", choice].tokens
        assert [token % 2 for token in tokens] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert len({tuple(answers["a", choice].tokens) for choice in range(3)}) > 1
    same(answers["b", 0], ask(make_engine(), prompt_of(9)))


def lose_the_state(engine: Engine) -> None:
    """What a failed step leaves: donated buffers that are gone."""
    for leaf in jax.tree.leaves(engine.state):
        leaf.delete()


def test_after_a_failed_step_all_requests_have_ended_and_new_ones_work():
    engine = make_engine()
    expected = ask(engine, prompt_of(9))
    for name in "abcd":
        engine.submit(request(name, length=20, n=2))
    answers: Answers = {}
    for _ in range(4):
        step(engine, answers)
    lose_the_state(engine)
    with pytest.raises(StepFailed, match="deleted"):
        engine.step()
    assert not engine.has_work
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.checkpoints == 0
    assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)
    found = ask(engine, prompt_of(9))
    assert found.cached == 0
    same(found, expected)


class Mute(Alternating):
    """Cannot say what may come once it has seen a token."""

    def fork(self) -> "Mute":
        return Mute()

    def mask(self) -> bytes:
        if self.seen:
            raise RuntimeError("no such token")
        return super().mask()


class Short(Alternating):
    """Its masks lack words."""

    def fork(self) -> "Short":
        return Short()

    def mask(self) -> bytes:
        return b"\xff" * 4


class Nothing(Alternating):
    """Allows only what stands past the end of the vocabulary."""

    def fork(self) -> "Nothing":
        return Nothing()

    def mask(self) -> bytes:
        return (-1 << CONFIG.vocab_size & (1 << 128) - 1).to_bytes(16, "little")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (Alternating(fails_after=1), "RuntimeError: no such token"),
        (Mute(), "RuntimeError: no such token"),
        (Short(), "ValueError: a mask of 1 words, expected 4"),
        (Nothing(), "ValueError: its mask allows no token"),
    ],
)
def test_a_constraint_that_raises_ends_its_own_request_alone(constraint, error, n):
    engine = make_engine()
    engine.submit(request("a", n=n, constraint=constraint))
    engine.submit(request("b", length=20))

    events = list(engine.run())

    broken = [event for event in events if event.request_id == "a"]
    last = {event.choice: event for event in broken}
    assert [last[choice].finish_reason for choice in range(n)] == [FinishReason.ERROR] * n
    assert all(error in event.error for event in last.values())
    assert sum(event.finish_reason is not None for event in broken) == n
    tokens = [event.token for event in events if event.request_id == "b"]
    assert tokens == ask(make_engine(), prompt_of(20)).tokens
    engine.flush_cache()
    engine.scheduler.check()
    stats = engine.stats()
    assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)


def test_a_constraint_that_cannot_be_forked_is_refused():
    class Single(Alternating):
        def fork(self) -> "Alternating":
            raise RuntimeError("there is one of me")

    engine = make_engine()
    with pytest.raises(ValueError, match="there is one of me"):
        engine.submit(request("a", constraint=Single()))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_rows": 0}, "max_rows = 0, expected at least 1"),
        ({"num_slots": 0}, "num_slots = 0, expected at least 1"),
        ({"host_bytes": -1}, "host_bytes = -1"),
        ({"max_context": 257}, "max_context = 257, expected 2..256"),
        ({"max_context": 64, "num_pages": 3, "page_size": 16}, "hold 48, less than max_context"),
        ({"checkpoint_interval": 32}, "checkpoint_interval = 32, expected a multiple"),
        ({"checkpoint_interval": 96, "page_size": 16}, "checkpoint_interval = 96"),
        ({"contexts": (64,)}, r"contexts = \(64,\), expected to rise to 256"),
        ({"decode_rows": (8,)}, r"decode_rows = \(8,\), expected to rise to max_rows"),
        ({"prefill_shapes": ((2, 64),)}, "expected one of a single row"),
        ({"max_rows": 1.5}, "max_rows = 1.5, expected a whole number"),
        ({"max_rows": True}, "max_rows = True, expected a whole number"),
        ({"max_context": 200.0}, "max_context = 200.0, expected a whole number"),
        ({"num_pages": 9.5}, "num_pages = 9.5, expected a whole number"),
        ({"num_slots": 2.5}, "num_slots = 2.5, expected a whole number"),
        ({"checkpoint_interval": 64.0}, "checkpoint_interval = 64.0, expected a whole number"),
        ({"contexts": (1.5, 256)}, r"contexts\[0\] = 1.5, expected a whole number"),
        ({"contexts": (0, 256)}, r"contexts\[0\] = 0, expected at least 1"),
        ({"contexts": 256}, "contexts = 256, expected a tuple"),
        ({"decode_rows": (0, 16)}, r"decode_rows\[0\] = 0, expected at least 1"),
        ({"decode_rows": [16]}, r"decode_rows = \[16\], expected a tuple"),
        ({"prefill_shapes": ((0, 64), (1, 64))}, r"prefill_shapes\[0\]\[0\] = 0"),
        ({"prefill_shapes": ((1, 64, 2),)}, "expected rows and tokens per row"),
        ({"prefill_shapes": (64,)}, r"prefill_shapes\[0\] = 64, expected a tuple"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**settings).resolve(CONFIG)


@pytest.mark.parametrize("budget", [1, 2, 100, 512, 4096])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_buckets_hold_every_row_and_no_prefill_step_exceeds_its_budget(budget, rows):
    settings = EngineConfig(max_rows=rows, token_budget=budget).resolve(CONFIG)
    assert max(settings.decode_rows) == rows
    assert settings.contexts[-1] == settings.max_context == 256
    for count, width in settings.prefill_shapes:
        assert count <= rows and width >= 2
        assert count * width <= max(budget, 2)


@pytest.fixture
def compilations():
    """Names of what XLA has compiled since."""
    found: list[str] = []

    def listen(event: str, seconds: float, **what: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(what.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def image_request(name: str, config, features: int, after: int, seed: int) -> Request:
    assert config.vision is not None
    rng = np.random.default_rng(seed)
    prompt = (1, 2, 3, *[config.vision.media_token_id] * features, *range(5, 5 + after))
    images = PromptImages(rng.standard_normal((features, 32)).astype(np.float32))
    return Request(name, prompt, SamplingParams(max_tokens=3), images=images)


def test_after_warm_up_nothing_compiles(compilations):
    """With sizes of its own, so that nothing has been compiled by another test."""
    config = replace(text_config(), vocab_size=851)
    engine = Engine(
        random_weights(config),
        config,
        EngineConfig(
            max_rows=3,
            max_context=52,
            page_size=13,
            num_pages=11,
            num_slots=5,
            prefill_shapes=((1, 7), (3, 7)),
            decode_rows=(3,),
        ),
    )
    engine.warm_up()
    assert len(compilations) >= 5
    compilations.clear()
    penalized = SamplingParams(max_tokens=6, presence_penalty=1.0, logprobs=5, temperature=1.0)
    allowed = SamplingParams(max_tokens=4, top_k=3, temperature=0.7, min_p=0.1)
    prompt = tuple(range(1, 25))
    for name in "ab":
        engine.submit(Request(f"{name}0", prompt, penalized, n=3))
        engine.submit(Request(f"{name}1", prompt[:13], allowed))
        engine.submit(image_request(f"{name}2", config, features=11, after=3, seed=1))
        engine.submit(image_request(f"{name}3", config, features=4, after=20, seed=2))
        engine.submit(Request(f"{name}4", prompt[:5], SamplingParams(max_tokens=30)))
        for _ in range(5):
            engine.step()
        engine.abort(f"{name}1")
        for _ in engine.run():
            pass
    assert engine.stats().hits > 0
    lose_the_state(engine)
    engine.submit(Request("failing", prompt))
    with pytest.raises(StepFailed):
        engine.step()
    engine.submit(Request("after", prompt, SamplingParams(max_tokens=2)))
    assert list(engine.run())
    assert not compilations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": b"x"}, "expected a string"),
        ({"priority": "high"}, "priority = 'high'"),
        ({"priority": 1.5}, "priority = 1.5"),
        ({"n": True}, "n = True"),
        ({"n": 2.0}, "n = 2.0"),
        ({"prompt": "text"}, "not token ids"),
        ({"prompt": 7}, "not token ids"),
        ({"prompt": (1, 2.7)}, "2.7 at position 1"),
    ],
    ids=str,
)
def test_a_field_of_the_wrong_type_is_refused_and_disturbs_nobody(fields, message):
    engine = make_engine()
    engine.submit(Request("good", prompt_of(5), free(max_tokens=3)))
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**({"id": "bad", "prompt": (1, 2, 3)} | fields)))
    assert [event.request_id for event in engine.run()] == ["good"] * 3
    engine.scheduler.check()


@pytest.mark.parametrize("shape", [(4, 16), (4, 1), (4,), (4, 1, 32), ()], ids=str)
def test_image_features_of_another_shape_are_refused(shape):
    config = text_config()
    assert config.vision is not None
    engine = Engine(random_weights(config), config, EngineConfig(max_rows=1, max_context=64))
    prompt = (1, *[config.vision.media_token_id] * 4, 2)
    with pytest.raises(ValueError, match="features"):
        engine.submit(Request("a", prompt, images=PromptImages(np.zeros(shape, np.float32))))
    bad = PromptImages(np.full((4, config.hidden_size), "a"))
    with pytest.raises(ValueError, match="dtype"):
        engine.submit(Request("a", prompt, images=bad))


def test_numpy_numbers_are_numbers():
    engine = make_engine()
    sampling = free(max_tokens=np.int64(3), seed=np.int64(5))
    engine.submit(Request("a", np.asarray(prompt_of(5)), sampling, n=np.int64(2)))  # pyright: ignore[reportArgumentType]
    assert len(list(engine.run())) == 6


def test_warming_up_beside_a_running_request_is_refused():
    engine = make_engine()
    engine.submit(Request("a", prompt_of(5), free(max_tokens=3)))
    with pytest.raises(ValueError, match="warm_up: requests are running"):
        engine.warm_up()
    assert len(list(engine.run())) == 3
