"""`k3jax demo` asks what k3-nano was trained for, and judges the answers."""

import io
import json
from pathlib import Path

import pytest

from k3jax import bundled
from k3jax.chat import ParsedOutput
from k3jax.cli import main
from k3jax.cli.demo_items import ITEMS
from k3jax.cli.demo_show import DemoShow
from k3jax.text_model import TextModel
from tests.cli.scripted import Script, called, said

SUM, TOOL, NOTES, JSON = ITEMS

RIGHT = [
    said("28+85=113", "8+5=13, 2+8+1=11"),
    called("get_price", "I call get_price.", item="violin"),
    said("The violin costs 88 euros.", "I tell the result."),
    said("badge=Zurich"),
    said('{"city": "Rome", "age": 33, "name": "Emma"}', "The keys are age, city, name."),
]


def shown(model: TextModel, replies: list[str]) -> tuple[str, list[dict], Script]:
    out, script = io.StringIO(), Script(model, list(replies))
    ticks = iter(range(10_000))
    items = DemoShow(out).run(model, script, lambda: next(ticks))
    return out.getvalue(), items, script


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """The toy tokenizer needs some 1,200 ids for the notes."""
    from dataclasses import replace

    from tests.random_weights import text_config
    from tests.test_text_model import folder_of

    folder = tmp_path_factory.mktemp("models") / "long"
    return TextModel.open(folder_of(folder, replace(text_config(), max_context=4096)))


def test_right_answers_are_right_and_shown(long_model: TextModel):
    text, items, script = shown(long_model, RIGHT)
    assert [item["correct"] for item in items] == [True] * 4
    for piece in (
        "1. A sum, with thinking\nuser: What is 28+85?\nthinking: 8+5=13, 2+8+1=11\n28+85=113\n",
        '→ get_price {"item": "violin"}\ntool: {"price": 88}\nthinking: I tell the result.\n',
        "user: Notes: queen=black, egg=Berlin, ",
        " … What is badge?\nbadge=Zurich\n",
    ):
        assert piece in text
    assert text.count("[right; ") == 4 and text.count("tokens/s]") == 4
    assert all(sampling.temperature == 0.0 for sampling in script.sampling)
    assert '{"price": 88}' in script.prompts[2] and "badge=Zurich" in script.prompts[3]


def test_wrong_answers_are_wrong_and_the_demo_goes_on(long_model: TextModel):
    replies = [
        said("28+85=103", "x"),
        called("get_price", item="viola"),
        said("The violin costs 88 euros.", ""),
        "badge=Zurich",  # cut off
        said('{"age":"33","city":"Rome","name":"Emma"}', ""),
    ]
    text, items, _ = shown(long_model, replies)
    assert [item["correct"] for item in items] == [False] * 4
    assert "[expected 28+85=113; " in text


def test_answer_without_the_call_is_wrong(long_model: TextModel):
    replies = [RIGHT[0], said("The violin costs 88 euros.", ""), *RIGHT[3:]]
    _, items, script = shown(long_model, replies)
    assert [item["correct"] for item in items] == [True, False, True, True]
    assert script.replies == []


def test_report_counts_every_turn(long_model: TextModel):
    _, items, _ = shown(long_model, RIGHT)
    tool = items[1]
    ids = [len(long_model.tokenizer.encode_control(reply)) for reply in RIGHT[1:3]]
    assert tool["completion_tokens"] == sum(ids)
    assert tool["tool_calls"] == [{"name": "get_price", "arguments": '{"item": "violin"}'}]
    assert tool["reasoning"] == ["I call get_price.", "I tell the result."]
    # The clock ticks once per token and once at the start of a turn.
    assert tool["prefill_seconds"] == 2 and tool["decode_seconds"] == sum(ids) - 2
    assert tool["tokens_per_second"] == 1.0


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
    assert SUM.expected == f"28+85={28 + 85}"
    assert str(json.loads(TOOL.result)["price"]) in TOOL.expected


def test_missing_bundled_model_is_one_clear_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "bundled.py"))
    assert main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("k3jax: error: the bundled model k3-nano is not in ")
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_bundled_model_gives_right_answers(capsys):
    assert main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # Each task is learnt to 90 % or more, so one unlucky item is no defect.
    assert sum(item["correct"] for item in report["items"]) >= 3
    assert all(item["tokens_per_second"] > 0 for item in report["items"])
