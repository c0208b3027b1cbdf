"""The Python client: what a worker says, in the library's words."""

import io
from pathlib import Path

import pytest

from k3jax.chat import ChatOptions, collect
from k3jax.cli import main
from k3jax.engine.request import FinishReason, SamplingParams
from serving.client import Client, ClientTls
from serving.gateway import free_port
from serving.security import Tls
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import nano, running_worker
from tests.serving.scripted import Replies, argument, call, response, tools

MODEL = nano()
TABLE = {
    "weather": tools(call("weather", argument("city", "Paris"))),
    "hi": response("Hello, you."),
}
CERTIFICATES = Path(__file__).parent / "certificates"


def scripted(**options: int) -> FakeEngine:
    replies = Replies(MODEL.text.tokenizer, TABLE)
    return FakeEngine(replies, eos=MODEL.text.config.eos_token_ids, **options)


def test_chat_speaks_the_models_format_without_its_folder():
    with running_worker(scripted) as worker, Client(worker.address) as client:
        said = collect(client.chat([{"role": "user", "content": "hi"}]))
        called = collect(client.chat([{"role": "user", "content": "weather"}]))
        name = client.info.served_model_name

    assert (said.reasoning, said.content, said.finish_reason) == (
        "Let me think.",
        "Hello, you.",
        "stop",
    )
    assert [(c.name, c.parsed()) for c in called.tool_calls] == [("weather", {"city": "Paris"})]
    assert called.finish_reason == "tool_calls"
    assert name == "nano"


def test_answer_that_is_cut_off_says_so():
    sampling = SamplingParams(max_tokens=3)
    with running_worker(scripted) as worker, Client(worker.address) as client:
        options = ChatOptions(thinking=False)
        reply = collect(client.chat([{"role": "user", "content": "hi"}], options, sampling))

    assert reply.finish_reason == "length"
    assert "Hello, you.".startswith(reply.content)


def test_generation_tells_what_it_cost():
    with running_worker(FakeEngine) as worker, Client(worker.address) as client:
        generation = client.generate([5, 6, 7], SamplingParams(max_tokens=4))
        ids = list(generation)

    assert ids == [3, 4, 5, 6]
    assert generation.finish_reason is FinishReason.LENGTH
    assert (generation.prompt_tokens, generation.stop_id) == (3, None)
    assert 0 <= generation.times["queue"] <= generation.times["first_token"]


def test_stop_id_is_apart_from_the_ids():
    with running_worker(FakeEngine) as worker, Client(worker.address) as client:
        generation = client.generate([5, 6, 7], SamplingParams(max_tokens=9, stop_ids=(5,)))
        ids = list(generation)

    assert (ids, generation.stop_id) == ([3, 4], 5)
    assert generation.finish_reason is FinishReason.STOP


def test_leaving_the_loop_cancels_the_request():
    engine = FakeEngine(step_seconds=0.002)
    with running_worker(lambda: engine) as worker, Client(worker.address) as client:
        for _ in client.generate([5, 6, 7], SamplingParams(max_tokens=8_000)):
            break
        for _ in range(500):
            if engine.aborted:
                break
            list(client.generate([1], SamplingParams(max_tokens=1)))

    assert len(engine.aborted) == 1


def test_refusal_is_a_value_error_with_the_field():
    with (
        running_worker(FakeEngine) as worker,
        Client(worker.address) as client,
        pytest.raises(ValueError, match="stop_token_ids"),
    ):
        list(client.generate([5], SamplingParams(stop_ids=(10**6,))))


def test_service_that_is_not_ready_is_a_connection_error():
    with (
        running_worker(FakeEngine, ready=False) as worker,
        Client(worker.address) as client,
        pytest.raises(ConnectionError, match=r"starting \(UNAVAILABLE\)"),
    ):
        list(client.generate([5]))


def test_chat_command_talks_to_the_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/think off\nhi\n"))
    with running_worker(scripted) as worker:
        code = main(["chat", "--server", worker.address])

    assert code == 0
    printed = capsys.readouterr()
    assert printed.out == "thinking: Let me think.\nHello, you.\nHello, you.\n"
    assert printed.err.count("prompt tokens (0 cached)") == 2


def test_chat_command_asks_for_no_more_than_the_context_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with running_worker(scripted, model=nano(max_context=200)) as worker:
        assert main(["chat", "--server", worker.address, "--max-tokens", "1k"]) == 0

    assert "Hello, you." in capsys.readouterr().out


def test_chat_command_without_model_or_service_says_what_it_needs(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["chat"]) == 2
    assert "either WEIGHTS or --server" in capsys.readouterr().err


def test_chat_command_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--server", f"127.0.0.1:{free_port()}"]) == 2
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_token_and_certificate_are_shown():
    tls = Tls(
        CERTIFICATES / "server.pem", CERTIFICATES / "server.key", client_ca=CERTIFICATES / "ca.pem"
    )
    shown = ClientTls(
        CERTIFICATES / "ca.pem", CERTIFICATES / "client.pem", CERTIFICATES / "client.key"
    )
    with (
        running_worker(FakeEngine, tls=tls, token="secret") as worker,
        Client(worker.address, token="secret", tls=shown) as client,
    ):
        assert list(client.generate([5, 6, 7], SamplingParams(max_tokens=2))) == [3, 4]
