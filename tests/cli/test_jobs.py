"""Requests are checked line by line before anything runs, and get the command's defaults."""

import json

import pytest

from k3jax.chat import ChatOptions
from k3jax.cli.jobs import JobMaker
from k3jax.engine.request import MAX_SEED, SamplingParams
from k3jax.text_model import TextModel

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


@pytest.fixture
def maker(text_model: TextModel) -> JobMaker:
    sampling = SamplingParams(temperature=0.5, max_tokens=20, seed=100)
    return JobMaker(text_model, sampling, ChatOptions(effort="low"))


def lines(*requests: object) -> list[bytes]:
    return [json.dumps(request).encode() + b"\n" for request in requests]


def text_of(maker: JobMaker, tokens) -> str:
    return maker.model.tokenizer.decode(tokens)


def test_prompt_becomes_a_user_message(maker: JobMaker):
    (job,) = maker.from_lines(lines({"prompt": "Hello"}), "f")
    expected = maker.model.chat_prompt([{"role": "user", "content": "Hello"}], maker.options)
    assert job.prompt == expected
    assert (job.id, job.thinking, job.sampling) == (0, True, maker.sampling)


def test_messages_are_taken_as_they_are(maker: JobMaker):
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    (job,) = maker.from_lines(lines({"messages": messages}), "f")
    assert job.prompt == maker.model.chat_prompt(messages, maker.options)


def test_system_text_precedes_plain_prompts_only(maker: JobMaker):
    maker = JobMaker(maker.model, maker.sampling, maker.options, system="Be kind.")
    messages = [{"role": "user", "content": "Hello"}]
    plain, own = maker.from_lines(lines({"prompt": "Hello"}, {"messages": messages}), "f")
    assert "Be kind." in text_of(maker, plain.prompt.tokens)
    assert "Be kind." not in text_of(maker, own.prompt.tokens)


def test_tokens_and_raw_prompts_go_past_the_template(maker: JobMaker):
    raw = JobMaker(maker.model, maker.sampling, maker.options, raw=True)
    first, second = raw.from_lines(lines({"tokens": [5, 845, 0]}, {"prompt": "ab"}), "f")
    assert first.prompt.tokens == (5, 845, 0)
    assert text_of(raw, second.prompt.tokens) == "ab"
    assert first.thinking is second.thinking is None


def test_options_of_a_line_win_over_the_commands(maker: JobMaker):
    request = {"messages": [{"role": "user", "content": "x"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    changes = [
        ({}, {}),
        ({"effort": "high"}, {"effort": "high"}),
        ({"effort": "none"}, {"thinking": False}),
        ({"thinking": False}, {"thinking": False}),
        ({"thinking": True}, {"effort": "low"}),
        ({"thinking": {"type": "enabled", "effort": "max"}}, {"effort": "max"}),
        ({"tools": [WEATHER], "tool_choice": "none"},) * 2,
        ({"response_format": schema},) * 2,
    ]
    for given, expected in changes:
        job = maker.from_request(request | given, 0)
        options = ChatOptions(**{"effort": "low", **expected})
        assert job.prompt == maker.model.chat_prompt(request["messages"], options), given
        assert job.thinking is options.thinking


def test_line_can_turn_thinking_on_again(text_model: TextModel):
    maker = JobMaker(text_model, SamplingParams(), ChatOptions(thinking=False, effort=None))
    job = maker.from_request({"prompt": "x", "thinking": True}, 0)
    messages = [{"role": "user", "content": "x"}]
    assert job.prompt == text_model.chat_prompt(messages, ChatOptions(effort="max"))
    assert maker.from_request({"prompt": "x"}, 0).thinking is False


def test_sampling_of_a_line_wins_over_the_commands(maker: JobMaker):
    fields = {
        "max_tokens": 0,
        "temperature": 1,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 9,
        "ignore_eos": True,
        "logprobs": 2,
    }
    job = maker.from_request({"prompt": "x", "stop_ids": [3, 4], **fields}, 5)
    assert job.sampling == SamplingParams(stop_ids=(3, 4), **fields)


def test_equal_lines_get_different_seeds(maker: JobMaker):
    jobs = maker.from_lines(lines(*[{"prompt": "x"}] * 3), "f")
    assert [job.sampling.seed for job in jobs] == [100, 101, 102]
    last = JobMaker(maker.model, SamplingParams(seed=MAX_SEED), maker.options)
    assert last.from_request({"prompt": "x"}, 1).sampling.seed == 0


def test_id_is_the_lines_own_or_its_number(maker: JobMaker):
    requests = lines({"prompt": "x"}, {"prompt": "y", "id": "b-7"}, {"prompt": "z", "id": None})
    requests.insert(1, b"  \n")
    assert [job.id for job in maker.from_lines(requests, "f")] == [0, "b-7", None]


def test_images_of_a_plain_prompt_come_first(maker: JobMaker, tmp_path):
    from PIL import Image

    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    job = maker.from_text("What?", [str(tmp_path / "a.png")] * 2)
    assert job.prompt.tokens.count(611) == 2 == len(job.prompt.images)
    text = text_of(maker, job.prompt.tokens)
    assert text.index("<|media_pad|>") < text.index("What?")


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ([], "expected a JSON object, not list"),
        ({}, "expected exactly one of prompt, messages and tokens, not none"),
        ({"prompt": "x", "tokens": [1]}, "expected exactly one of prompt, messages and tokens"),
        ({"prompt": "x", "temprature": 1}, "unknown field 'temprature'"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt": 5}, "prompt must be a string, not int"),
        ({"prompt": "word " * 900}, "prompt has "),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role must be one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"tokens": []}, "prompt is empty; it needs at least one token"),
        (
            {"tokens": [3, 846]},
            "prompt: token id 846 at position 1 is outside the vocabulary 0..845",
        ),
        ({"tokens": [3, -1]}, "prompt: token id -1 at position 1"),
        ({"tokens": [True]}, "tokens must be a list of token ids"),
        ({"tokens": "abc"}, "tokens must be a list of token ids"),
        ({"tokens": [1], "tools": [WEATHER]}, "tools needs the chat template"),
        ({"prompt": "x", "tools": [{"type": "browser"}]}, "tools[0].type must be 'function'"),
        ({"prompt": "x", "tools": {}}, "tools must be a list"),
        (
            {"prompt": "x", "tools": [WEATHER] * 2},
            "tools[1].function.name 'get_weather' is declared",
        ),
        ({"prompt": "x", "tool_choice": "sometimes"}, "tool_choice must be auto, none"),
        (
            {"prompt": "x", "tools": [WEATHER], "tool_choice": "required"},
            "tool_choice 'required' cannot be enforced here",
        ),
        (
            {
                "prompt": "x",
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            },
            "tool_choice {'type': 'function', 'function'",
        ),
        ({"prompt": "x", "response_format": "xml"}, "response_format.type must be"),
        ({"prompt": "x", "effort": "medium"}, "reasoning_effort must be one of none, low, high"),
        ({"prompt": "x", "thinking": "yes"}, "thinking must be true, false or an object"),
        ({"prompt": "x", "thinking": {"type": "maybe"}}, "thinking.type must be enabled or"),
        ({"prompt": "x", "temperature": "hot"}, "temperature = 'hot', expected a number"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens = -1, expected at least 0"),
        ({"prompt": "x", "stop_ids": 3}, "stop_ids = 3, expected a tuple"),
        ({"prompt": "x", "stop_ids": [846]}, "stop_ids: stop id 846 is outside the vocabulary"),
        ({"prompt": "x", "seed": None}, "seed = None, expected a whole number"),
    ],
)
def test_line_that_is_no_request_is_an_error_with_its_place(maker, request_, problem):
    with pytest.raises(ValueError) as error:
        maker.from_lines([b"\n", *lines({"prompt": "good"}, request_)], "file.jsonl")
    assert str(error.value).startswith(f"file.jsonl:3: {problem}")


@pytest.mark.parametrize(
    "line", [b'{"prompt": "x"', b"\xff\xfe", b'{"prompt": "x", "top_p": NaN}', b"[" * 100_000]
)
def test_line_that_is_no_json_is_an_error_with_its_place(maker: JobMaker, line: bytes):
    with pytest.raises(ValueError, match=r"^file\.jsonl:1: "):
        maker.from_lines([line], "file.jsonl")


def test_file_without_requests_is_an_error(maker: JobMaker):
    with pytest.raises(ValueError, match="f: no requests; expected one JSON object per line"):
        maker.from_lines([b"\n", b"  "], "f")


def test_raw_prompt_cannot_have_images(maker: JobMaker):
    raw = JobMaker(maker.model, maker.sampling, maker.options, raw=True)
    with pytest.raises(ValueError, match="a raw prompt cannot have images"):
        raw.from_text("x", ["a.png"])
