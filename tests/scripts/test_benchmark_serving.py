"""The load generator: it sends what it says, and its figures are those of the samples."""

from pathlib import Path

import pytest

from k3jax.chat.tokenizer import Tokenizer
from scripts.benchmark_serving import _talks, closed_loop, fixed_loop, main, open_loop
from scripts.load.conversations import Shape, first_messages
from scripts.load.own_service import BareEngine, _tokens
from scripts.load.report import Objective, percentile, summarize, sustainable
from scripts.load.targets import NO_THINKING, Http, Native, Sample
from scripts.nano.vocabulary import write
from serving.gateway import free_port
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import nano, running_gateway, running_worker

OBJECTIVE = Objective(ttft=0.5, tpot=0.1)


def sample(first: float, each: float, tokens: int = 5, error: str = "") -> Sample:
    arrivals = [10.0 + first + each * i for i in range(tokens)]
    return Sample(10.0, arrivals, tokens, queue=first / 2, error=error)


def test_figures_follow_from_the_samples():
    samples = [sample(0.1, 0.01), sample(0.2, 0.02), sample(0.9, 0.01), sample(0, 0, error="no")]

    report = summarize("x", samples, 2.0, OBJECTIVE)

    assert (report.requests, report.failures, report.first_error) == (4, 1, "no")
    assert report.requests_per_second == pytest.approx(1.5)
    assert report.tokens_per_second == pytest.approx(7.5)
    assert report.goodput == pytest.approx(1.0)
    assert report.times["TTFT"][50] == pytest.approx(200)
    assert report.times["TPOT"][95] == pytest.approx(20)
    assert report.times["end to end"][99] == pytest.approx(940)
    assert report.times["queue"][50] == pytest.approx(100)


def test_service_that_is_not_there_is_named_and_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    url = f"http://127.0.0.1:{free_port()}"
    options = ["--http", url, "--concurrency", "1", "--conversations", "2", "--tokens", "2"]
    monkeypatch.setattr("sys.argv", ["benchmark_serving.py", *options])

    assert main() == 1
    assert "2 failed" in (said := capsys.readouterr().out)
    assert "first error: Connection error" in said


@pytest.mark.parametrize(("p", "expected"), [(50, 2), (95, 4), (1, 1), (25, 1), (26, 2)])
def test_percentile_is_a_value_that_occurred(p: float, expected: float):
    assert percentile([4, 1, 3, 2], p) == expected


def test_sustainable_concurrency_is_the_largest_that_keeps_the_objective():
    reports = [
        (1, summarize("1", [sample(0.1, 0.01)], 1, OBJECTIVE)),
        (4, summarize("4", [sample(0.4, 0.09)], 1, OBJECTIVE)),
        (16, summarize("16", [sample(0.4, 0.2)], 1, OBJECTIVE)),
    ]

    assert sustainable(reports, OBJECTIVE) == 4
    assert sustainable(reports[2:], OBJECTIVE) is None


def test_conversations_differ_but_for_what_they_share():
    beginnings = first_messages(Shape(words=5, shared_words=7), seed=3)

    first, second = next(beginnings), next(beginnings)

    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_closed_loop_runs_every_turn_of_every_conversation(concurrency: int):
    engine = FakeEngine()
    with running_worker(lambda: engine) as worker:
        samples, seconds = closed_loop(
            Native(worker.address), Shape(words=5, turns=2), 7, 5, concurrency
        )
        records = list(worker.worker.requests.latest(100))

    assert len(samples) == 10
    assert [s.tokens for s in samples] == [7] * 10
    assert not any(s.error for s in samples)
    assert len(records) == 10 + concurrency
    assert seconds > 0


def test_gateway_is_measured_like_a_worker():
    with running_worker(FakeEngine) as worker, running_gateway(worker) as gateway:
        samples, _ = closed_loop(Http(gateway.url, "nano"), Shape(words=5, turns=2), 7, 3, 2)

    assert [s.tokens for s in samples] == [7] * 6
    assert all(s.arrivals and not s.error for s in samples)


def test_open_loop_does_not_wait_for_the_earlier_ones():
    engine = FakeEngine(step_seconds=0.02)
    with running_worker(lambda: engine) as worker:
        samples, _ = open_loop(Native(worker.address), Shape(words=5), 20, 5, 100.0)

    spans = sorted((s.sent, s.arrivals[-1]) for s in samples)
    assert len(samples) == 5
    assert spans[1][0] < spans[0][1]


def test_same_conversations_go_to_every_way_in():
    talks = [[{"role": "user", "content": f"Number {i}"}] for i in range(5)]
    with running_worker(FakeEngine) as worker:
        samples, seconds = fixed_loop(Native(worker.address), talks, 6, 2)

    assert [s.tokens for s in samples] == [6] * 5
    assert seconds > 0


@pytest.mark.parametrize("tokens", [64, 131])
def test_prompts_come_close_to_the_length_that_was_asked_for(tokens: int):
    model = nano().text

    talks = _talks(model, tokens, 3, seed=2)

    lengths = [len(model.chat_prompt(talk, NO_THINKING).tokens) for talk in talks]
    assert len(talks) == len({str(talk) for talk in talks}) == 3
    assert all(tokens <= length < tokens + 8 for length in lengths)


def test_benchmark_model_speaks_like_the_bundled_one(tmp_path: Path):
    write(tmp_path, _tokens(16128))

    tokenizer, bundled = Tokenizer.from_dir(tmp_path), nano().text.tokenizer

    assert tokenizer.vocab_size == 16384
    text = "Notes: queen=black, egg=Berlin"
    assert tokenizer.encode(text) == bundled.encode(text)
    assert tokenizer.special_ids["<|open|>"] == 16128 + 3


def test_bare_engine_answers_every_conversation():
    engine = FakeEngine()
    bare = BareEngine(engine, nano().text)
    talks = _talks(bare.model, 40, 5, seed=1)

    samples, seconds = bare.run(talks, 4, 2)

    assert [s.tokens for s in samples] == [4] * 5
    assert engine.steps == 12  # two at a time
    assert seconds > 0
