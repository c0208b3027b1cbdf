"""Exercises: right answers, the split, and what the judge takes."""

import itertools
import json

import numpy as np
import pytest

from k3jax.chat.encoder import encode_chat
from k3jax.chat.parser import parse_output
from scripts.nano import tasks
from scripts.nano.corpus import Encoder, Mode, held_out
from scripts.nano.tasks import Draw, accepts
from scripts.nano.toolbox import TOOLS
from tests.scripts.nano_model import nano_tokenizer

TOKENIZER = nano_tokenizer()
MODES = (Mode(False), Mode(True), Mode(True, "max"))


def some(name: str, count: int = 40):
    rng = np.random.default_rng(3)
    return [held_out(rng, name) for _ in range(count)]


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_expected_reply_is_accepted_after_encoding_and_parsing(name, mode):
    encoder = Encoder(TOKENIZER)
    for one in some(name, 10):
        ids = encoder.reply(one.messages[-1], mode)
        parsed = parse_output(TOKENIZER, ids, thinking=mode.thinking)
        assert accepts(one, parsed.message())
        assert parsed.finish_reason == ("tool_calls" if name == "call" else "stop")
        assert parsed.reasoning == (one.messages[-1]["reasoning_content"] if mode.thinking else "")


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_prompt_is_that_of_the_chat_encoder(name, mode):
    encoder = Encoder(TOKENIZER)
    for one in some(name, 5):
        wanted = encode_chat(TOKENIZER, list(one.messages[:-1]), mode.options(one))
        assert encoder.prompt(one, mode) == wanted


@pytest.mark.parametrize("name", tasks.TASKS)
def test_another_exercises_reply_is_refused(name):
    made = some(name)
    for one, other in itertools.pairwise(made):
        same = one.messages[-1]["content"] == other.messages[-1]["content"]
        if name not in ("no_tool", "talk", "call") and not same:
            assert not accepts(one, other.messages[-1])
        assert not accepts(one, {"role": "assistant", "content": "something else"})


def test_call_with_a_wrong_argument_type_name_or_number_of_calls_is_refused():
    one = next(e for e in some("call") if any(isinstance(v, int) for v in arguments(e).values()))
    right = one.messages[-1]
    name, given = right["tool_calls"][0]["function"]["name"], arguments(one)

    def reply(name, arguments):
        return {"content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}

    assert accepts(one, reply(name, json.dumps(given)))
    assert not accepts(one, reply(name, {key: str(value) for key, value in given.items()}))
    assert not accepts(one, reply("other", given))
    assert not accepts(one, reply(name, given | {"more": 1}))
    assert not accepts(one, reply(name, "{broken"))
    assert not accepts(one, {"content": "", "tool_calls": right["tool_calls"] * 2})


def arguments(exercise):
    return exercise.messages[-1]["tool_calls"][0]["function"]["arguments"]


def test_json_is_judged_as_values_not_as_text():
    one = some("json")[0]
    value = json.loads(one.messages[-1]["content"])
    assert accepts(one, {"content": json.dumps(value, indent=2)})
    assert not accepts(one, {"content": json.dumps({key: str(v) for key, v in value.items()})})
    assert not accepts(one, {"content": f"```json\n{json.dumps(value)}\n```"})


def test_json_answers_have_exactly_the_asked_properties_in_sorted_order():
    for one in some("json"):
        assert one.response_format is not None
        schema = one.response_format["json_schema"]["schema"]
        value = json.loads(one.messages[-1]["content"])
        assert list(value) == sorted(schema["properties"])
        python = {"string": str, "integer": int, "boolean": bool}
        for key, spec in schema["properties"].items():
            assert type(value[key]) is python[spec["type"]]


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (0, 0, "0+0=0"),
        (2, 3, "2+3=5"),
        (27, 18, "7+8=15, 2+1+1=4"),
        (99, 1, "9+1=10, 9+0+1=10"),
        (5, 140, "5+0=5, 0+4=4, 0+1=1"),
    ],
)
def test_carry_steps_add_column_by_column(a, b, steps):
    assert tasks.carry_steps(a, b) == steps


def test_the_split_separates_training_from_evaluation():
    rng = np.random.default_rng(0)

    def keys(held):
        found = set()
        for _ in range(1500):
            found.add(tasks.sum_pair(Draw(rng, held)))
        return {(min(pair), max(pair)) for pair in found}

    training, evaluation = keys(False), keys(True)
    assert not training & evaluation
    assert len(evaluation) > 100


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name != "talk"])
def test_no_held_out_request_is_drawn_for_training(name):
    rng = np.random.default_rng(1)
    tools = tuple(tool for tool in TOOLS if tool.parameters)

    def texts(held):
        source = Draw(rng, held, tools=tools[:3] if name == "no_tool" else tools)
        made = [tasks.TASKS[name](source) for _ in range(300)]
        return {repr([(m["content"], m.get("tool_calls", [{}])[0].get("function"))
                      for m in one.messages]) for one in made}  # fmt: skip

    assert not texts(True) & texts(False)


def test_notes_have_more_than_400_tokens_and_one_value_per_key():
    for one in some("recall"):
        text = one.messages[0]["content"].split(". What is")[0]
        assert len(TOKENIZER.encode(text)) > 400
        entries = [entry.split("=") for entry in text.removeprefix("Notes: ").split(", ")]
        assert len({key for key, _ in entries}) == len(entries)
        assert one.messages[-1]["content"].split("=") in entries


def test_there_are_twenty_tools_and_every_request_names_every_argument():
    assert len(TOOLS) >= 20
    for tool in TOOLS:
        for request in tool.requests:
            text, fixed = request if isinstance(request, tuple) else (request, {})
            assert all(f"{{{name}}}" in text or name in fixed for name in tool.parameters)
