"""`k3jax demo` asks what k3-nano was trained for, over HTTP, and judges the answers."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from k3jax import bundled
from k3jax.chat import ParsedOutput
from k3jax.chat.deltas import Delta, collect
from k3jax.cli import main
from k3jax.cli.demo_items import ITEMS
from k3jax.cli.demo_show import DemoShow
from k3jax.cli.http_chat import HttpChat, HttpTurn
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import nano, running_gateway, running_worker
from tests.serving.scripted import Replies, argument, call, response, tools

SUM, TOOL, NOTES, JSON = ITEMS


def said(text: str, thought: str = "") -> list[Delta]:
    reasoning = [Delta("reasoning", thought)] if thought else []
    return [*reasoning, Delta("content", text), Delta("finish", finish_reason="stop")]


def called(name: str, arguments: str) -> list[Delta]:
    return [
        Delta("call_start", index=0, name=name, call_id="c0"),
        Delta("call_arguments", arguments, index=0),
        Delta("call_end", index=0),
        Delta("finish", finish_reason="tool_calls"),
    ]


RIGHT = [
    said("28+85=113", "8+5=13, 2+8+1=11"),
    called("get_price", '{"item": "violin"}'),
    said("The violin costs 88 euros.", "I tell the result."),
    said("badge=Zurich"),
    said("flute=Oslo"),
    said('{"city": "Rome", "age": 33, "name": "Emma"}', "The keys are age, city, name."),
]


class Script:
    """A service that says what the test wrote; `cached` tokens of every prompt."""

    def __init__(self, replies: list[list[Delta]], cached: int = 64) -> None:
        self.replies, self.cached = list(replies), cached
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []

    def __call__(self, messages: Any, show: Any, **options: Any) -> HttpTurn:
        self.asked.append((list(messages), options))
        deltas = self.replies.pop(0)
        show(deltas)
        return HttpTurn(100, self.cached, 5, 0.5, 1.5, collect(deltas))


def test_right_answers_are_right_and_shown():
    out, script = io.StringIO(), Script(RIGHT)

    items = DemoShow(out, script).run()

    assert [item["correct"] for item in items] == [True] * 4
    for piece in (
        "1. A sum, with thinking\nuser: What is 28+85?\nthinking: 8+5=13, 2+8+1=11\n28+85=113\n",
        '→ get_price {"item": "violin"}\n',
        'tool: {"price": 88}\nthinking: I tell the result.\n',
        "user: Notes: queen=black, egg=Berlin, ",
        " … What is badge?\nbadge=Zurich\n",
        "100 prompt tokens, 64 of them cached; first token after 500 ms, 5 at 4 tokens/s",
    ):
        assert piece in out.getvalue()
    assert out.getvalue().count("[right]") == 4


def test_conversations_hold_what_was_said_before():
    script = Script(RIGHT)

    DemoShow(None, script).run()

    roles = [[message["role"] for message in messages] for messages, _ in script.asked]
    assert roles[2] == ["user", "assistant", "tool"]
    assert roles[4] == ["user", "assistant", "user"]
    assert script.asked[2][0][2] == {
        "role": "tool",
        "tool_call_id": "c0",
        "name": "get_price",
        "content": '{"price": 88}',
    }
    assert all(options["temperature"] == 0 for _, options in script.asked)
    assert [options.get("reasoning_effort") for _, options in script.asked][3:5] == ["none"] * 2


def test_wrong_answers_are_wrong_and_the_demo_goes_on():
    cut_off = [Delta("content", "badge=Zurich"), Delta("finish", finish_reason="length")]
    script = Script(
        [
            said("28+85=103", "x"),
            called("get_price", '{"item": "viola"}'),
            said("The violin costs 88 euros."),
            cut_off,
            said("flute=Oslo"),
            said('{"age":"33","city":"Rome","name":"Emma"}'),
        ]
    )
    out = io.StringIO()

    items = DemoShow(out, script).run()

    assert [item["correct"] for item in items] == [False] * 4
    assert "[wrong: expected 28+85=113]" in out.getvalue()


def test_answer_without_the_call_is_wrong():
    script = Script([RIGHT[0], said("The violin costs 88 euros."), *RIGHT[3:]])

    items = DemoShow(None, script).run()

    assert [item["correct"] for item in items] == [True, False, True, True]
    assert script.replies == []


def test_follow_up_that_found_nothing_cached_is_wrong():
    items = DemoShow(None, Script(RIGHT, cached=0)).run()

    assert [item["correct"] for item in items] == [True, True, False, True]


def test_report_tells_every_turn():
    items = DemoShow(None, Script(RIGHT)).run()

    turns = items[1]["turns"]
    assert turns[0]["tool_calls"] == [{"name": "get_price", "arguments": '{"item": "violin"}'}]
    assert turns[1]["reasoning"] == "I tell the result."
    assert (turns[1]["cached_tokens"], turns[1]["first_token_seconds"]) == (64, 0.5)


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ('{"age":33,"city":"Rome","name":"Emma"}', True),
        ('{ "name": "Emma", "city": "Rome", "age": 33 }', True),
        ('{"age":33,"city":"Rome"}', False),
        ("```json", False),
        ("", False),
    ],
)
def test_json_is_compared_as_a_value(content: str, right: bool):
    assert JSON.accepts(ParsedOutput(content=content, finish_reason="stop")) is right


def test_questions_are_answered_by_what_they_hold():
    notes = dict(pair.split("=") for pair in NOTES.question[7:].split(".")[0].split(", "))
    assert len(notes) == 105 and NOTES.expected == f"badge={notes['badge']}"
    assert NOTES.question.endswith(" What is badge?")
    assert NOTES.follow_up == ("What is flute?", f"flute={notes['flute']}")
    assert SUM.expected == f"28+85={28 + 85}"
    assert str(json.loads(TOOL.result)["price"]) in TOOL.expected


def test_missing_bundled_model_is_one_clear_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "bundled.py"))
    assert main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("k3jax: error: the bundled model k3-nano is not in ")
    assert printed.err.count("\n") == 1


def test_demo_through_worker_and_gateway():
    """All that the real thing does but the model, whose part a script plays."""
    price = call("get_price", argument("item", "violin"))
    table = {
        SUM.question: response(SUM.expected),
        TOOL.question: tools(price),
        NOTES.question: response(NOTES.expected),
        "What is flute?": response("flute=Oslo"),
        JSON.question: response(JSON.expected),
    }
    model = nano()
    tokenizer = model.text.tokenizer
    replies = Replies(tokenizer, table, thought="Hm.")
    after_result = f"Hm.<|close|>think<|sep|><|open|>response<|sep|>{response(TOOL.expected)}"

    def play(request: Any, choice: int) -> Any:
        if 'role="tool"' in tokenizer.decode(request.prompt):
            return tokenizer.encode_control(after_result)
        return replies(request, choice)

    engine = FakeEngine(play, eos=model.text.config.eos_token_ids, remember=True)
    with running_worker(lambda: engine) as worker, running_gateway(worker) as gateway:
        items = DemoShow(None, HttpChat(gateway.url, "nano").ask).run()

    assert [item["correct"] for item in items] == [True] * 4
    assert items[2]["turns"][1]["cached_tokens"] > 0.9 * items[2]["turns"][0]["prompt_tokens"]
    assert items[0]["turns"][0]["reasoning"] == "Hm."


def test_refused_request_is_told():
    with running_worker(FakeEngine) as worker, running_gateway(worker) as gateway:
        chat = HttpChat(gateway.url, "nano")
        with pytest.raises(ValueError, match=r"refused the request \(400\).*temperature"):
            chat.ask([{"role": "user", "content": "hi"}], lambda deltas: None, temperature=9)


@pytest.mark.slow
def test_bundled_model_gives_right_answers(capsys):
    assert main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(item["correct"] for item in report["items"])
    assert report["items"][2]["turns"][1]["cached_tokens"] > 0
