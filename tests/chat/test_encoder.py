"""Goldens: `chat_encoding.json` holds segments and toy ids of the released chat encoder."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.chat.encoder import chat_segments, encode_chat, expand_media_pads
from k3jax.chat.options import ChatOptions, thinking_from_openai
from k3jax.chat.segments import encode_segments, escape, unescape
from k3jax.chat.tokenizer import Tokenizer
from k3jax.chat.xtml import build_segments
from tests.chat.inputs import GOLDEN, golden_json, hostile_text

TOY = Tokenizer.from_dir(GOLDEN / "chat")
CASES = {case["name"]: case for case in golden_json("chat/chat_encoding.json")}
PROMPT = "<|media_begin|>image 8x8<|media_content|><|media_pad|><|media_end|>"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def arguments(case):
    options = dict(case["kwargs"])
    prompts = options.pop("image_prompts", None)
    return (
        case["messages"],
        ChatOptions(effort=options.pop("thinking_effort", None), **options),
        (prompts),
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "error" not in case])
def test_segments_and_ids_match_the_goldens(name):
    case = CASES[name]
    segments = build_segments(*arguments(case))
    assert [list(segment) for segment in segments] == case["segments"]
    assert "".join(segment.text for segment in segments) == case["text"]
    assert encode_segments(TOY, segments) == case["toy_ids"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "error" in case])
def test_rejected_goldens_are_rejected(name):
    with pytest.raises(ValueError):
        build_segments(*arguments(CASES[name]))
    with pytest.raises(ValueError):
        encode_chat(TOY, *arguments(CASES[name]))


@pytest.mark.parametrize(
    "name",
    [n for n, c in CASES.items() if "error" not in c and n != "image_part_without_prompt"],
)
def test_the_checked_entry_point_gives_the_same_ids(name):
    assert encode_chat(TOY, *arguments(CASES[name])) == CASES[name]["toy_ids"]


def test_reference_skips_what_it_does_not_know():
    user = {"role": "user", "content": "a"}
    options = ChatOptions()
    assert build_segments([{"role": "critic", "content": "b"}, user, 7], options) == (
        build_segments([user], options)
    )


def test_lazily_declared_tools_replace_the_content():
    declare = {"role": "system", "content": "ignored", "tools": [WEATHER]}
    text = "".join(s.text for s in build_segments([declare], ChatOptions(effort=None)))
    assert '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Avail' in text
    assert '```json\n[{"function":{"name":"weather",' in text and "ignored" not in text


def test_developer_counts_as_system():
    ask = {"role": "user", "content": "a"}
    assert encode_chat(TOY, [{"role": "developer", "content": "b"}, ask]) == (
        encode_chat(TOY, [{"role": "system", "content": "b"}, ask])
    )


def test_tool_results_without_id_keep_their_order():
    calls = [{"id": i, "function": {"name": n}} for i, n in (("a", "f"), ("None", "g"))]
    results = [
        {"role": "tool", "content": "1", "tool_call_id": None},
        {"role": "tool", "content": "2"},
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    text = "".join(s.text for s in build_segments(messages, ChatOptions()))
    assert 'tool="f" index="1"<|sep|>1' in text and 'tool="g" index="2"<|sep|>2' in text


def test_tool_results_count_from_the_latest_assistant_message():
    turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}, {"name": "g"}]}
    result = {"role": "tool", "content": ""}
    segments = build_segments([turn, result, result, turn, result], ChatOptions())
    indices = re.findall(r'role="tool" tool="(.)" index="(.)"', "".join(s.text for s in segments))
    assert indices == [("f", "1"), ("g", "2"), ("f", "1")]


def test_of_two_calls_with_one_id_the_first_is_answered():
    calls = [{"id": "a", "function": {"name": name}} for name in ("f", "g")]
    result = {"role": "tool", "content": "1", "tool_call_id": "a"}
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, result]
    text = "".join(s.text for s in build_segments(messages, ChatOptions()))
    assert 'tool="f" index="1"<|sep|>1' in text


def test_arguments_too_deep_or_long_for_json_are_raw():
    for raw in ("[" * 100_000, '{"a": ' + "9" * 5000 + "}"):
        call = {"id": "a", "function": {"name": "f", "arguments": raw}}
        segments = build_segments([{"role": "assistant", "tool_calls": [call]}], ChatOptions())
        assert (raw, False) in segments


@given(hostile_text)
def test_attribute_escape_inverts(text):
    assert unescape(escape(text)) == text
    assert '"' not in escape(text)


def conversation(text: str, broken: str):
    """Every field that a user, tool or schema can fill, filled with `text`."""
    function = {"name": f"f{text}", "arguments": {text: text, "o": {text: [text]}}}
    raw = {"name": f"g{text}", "arguments": broken}
    schema = {"type": "object", "description": text, "properties": {text: {"enum": [text]}}}
    tool = {"name": f"f{text}", "description": text, "parameters": schema}
    messages = [
        {"role": "system", "content": text, "name": f"n{text}"},
        {"role": "system", "tools": [{"type": "function", "function": tool}]},
        {"role": "user", "content": text, "name": f"n{text}"},
        {
            "role": "assistant",
            "content": text,
            "name": f"n{text}",
            "reasoning_content": text,
            "tool_calls": [{"id": text, "function": function}, {"id": text + "2", **raw}],
        },
        {"role": "tool", "tool_call_id": text + "2", "content": text},
        {"role": "tool", "tool_call_id": text, "content": [{"type": "text", "text": text}]},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]},
    ]
    wanted = {"type": "json_schema", "json_schema": {"name": text, "schema": schema}}
    options = ChatOptions(
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        response_format=wanted,
    )
    return messages, options, [PROMPT]


def markers(request):
    return [token for token in encode_chat(TOY, *request) if TOY.is_special(token)]


HARMLESS = markers(conversation("x", "{"))


@given(hostile_text)
def test_no_text_of_a_request_can_become_a_marker(text):
    assert markers(conversation(text, "{" + text)) == HARMLESS


@given(hostile_text)
def test_markers_come_from_control_segments_only(text):
    request = conversation(text, "{" + text)
    fixed = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", PROMPT}
    segments = chat_segments(TOY, *request)
    assert {segment.text for segment in segments if segment.control} == fixed
    assert any(text in segment.text for segment in segments if not segment.control)


def test_a_literal_placeholder_takes_an_image_only_in_the_reference():
    literal = [{"role": "user", "content": "a <|kimi_image_placeholder|> b"}]
    segments = build_segments(literal, ChatOptions(), [PROMPT])
    assert (PROMPT, True) in segments
    with pytest.raises(ValueError, match="1 image prompts for 0 image places"):
        encode_chat(TOY, literal, ChatOptions(), [PROMPT])
    assert TOY.decode(encode_chat(TOY, literal)).count("<|kimi_image_placeholder|>") == 1


def test_an_image_part_without_a_prompt_is_an_error():
    with pytest.raises(ValueError, match="more image places in the messages than the 0 images"):
        encode_chat(TOY, [{"role": "user", "content": [{"type": "image"}]}])


def test_each_pad_is_repeated_for_its_image():
    ids = TOY.encode_control(f"a{PROMPT}b{PROMPT}")
    pad = TOY.special_ids["<|media_pad|>"]
    expanded = expand_media_pads(TOY, ids, [3, 1])
    assert expanded.count(pad) == 4
    assert [t for t in expanded if t != pad] == [t for t in ids if t != pad]
    first = expanded.index(pad)
    assert expanded[first : first + 3] == [pad] * 3 and expanded[first + 3] != pad
    with pytest.raises(ValueError, match=r"2 .* ids in the prompt for 1 images"):
        expand_media_pads(TOY, ids, [3])


def test_a_tokenizer_without_chat_markers_is_an_error():
    bare = Tokenizer({bytes([i]): i for i in range(256)})
    with pytest.raises(ValueError, match="neither K3's chat markers"):
        encode_chat(bare, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("effort", "thinking", "expected"),
    [
        (None, None, (True, "max")),
        ("none", None, (False, None)),
        ("low", None, (True, "low")),
        ("high", {"effort": "max"}, (True, "max")),
        ("none", {"effort": "low"}, (True, "low")),
        ("high", {"type": "disabled"}, (False, None)),
        (None, {"type": "enabled", "keep": "all"}, (True, "max")),
        (None, {"effort": "none"}, (False, None)),
    ],
)
def test_reasoning_controls_map(effort, thinking, expected):
    assert thinking_from_openai(effort, thinking) == expected


@pytest.mark.parametrize(
    ("effort", "thinking", "field"),
    [
        ("medium", None, "reasoning_effort"),
        ("high", {"effort": "medium"}, "thinking.effort"),
        (None, {"type": "auto"}, "thinking.type"),
        (None, {"keep": "last"}, "thinking.keep"),
    ],
)
def test_unknown_reasoning_controls_are_named(effort, thinking, field):
    with pytest.raises(ValueError, match=field):
        thinking_from_openai(effort, thinking)


# No keyword of JSON Schema begins with x, so nothing here is a wrong schema.
@given(
    st.dictionaries(
        st.text(max_size=4).map(lambda name: "x" + name),
        st.integers() | st.text(max_size=4),
        max_size=4,
    )
)
def test_tools_do_not_depend_on_key_order(schema):
    def ids(items):
        function = {"name": "f", "parameters": dict(items)}
        tools = [{"type": "function", "function": function}]
        return encode_chat(TOY, [{"role": "user", "content": ""}], ChatOptions(tools=tools))

    assert ids(schema.items()) == ids(reversed(schema.items()))
    assert json.dumps(schema, ensure_ascii=False, sort_keys=True, separators=(",", ":")) in (
        TOY.decode(ids(schema.items()))
    )
