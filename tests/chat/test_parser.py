"""Goldens: `tool_parse.json` holds tools sections and the calls that mlx-lm's parser reads."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat.deltas import collect
from k3jax.chat.options import ChatOptions
from k3jax.chat.parser import OutputParser, parse_output
from k3jax.chat.segments import encode_segments
from k3jax.chat.tokenizer import Tokenizer
from k3jax.chat.xtml import build_segments
from tests.chat.inputs import GOLDEN, golden_json, hostile_text

TOY = Tokenizer.from_dir(GOLDEN / "chat")
TEXTS = ("reasoning", "content", "call_arguments")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | hostile_text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(hostile_text, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
calls = st.fixed_dictionaries(
    {
        "name": hostile_text.filter(bool),
        "arguments": st.dictionaries(hostile_text, json_values, max_size=3),
    }
)
replies = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "reasoning_content": hostile_text.filter(lambda text: not text or text.strip()),
        "content": hostile_text,
        "tool_calls": st.lists(calls, max_size=3),
    }
)


def ids_of(text):
    """A reply written out; markers in it are markers."""
    return TOY.encode_control(text)


def scripted(message, thinking=True):
    """What the model would generate for a message: its ids without the generation prompt."""
    options = ChatOptions(effort=None, thinking=thinking, add_generation_prompt=False)
    whole = encode_segments(TOY, build_segments([message], options))
    prompt = encode_segments(TOY, build_segments([], ChatOptions(effort=None, thinking=thinking)))
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def stream(ids, thinking=True):
    parser = OutputParser(TOY, thinking)
    return [parser.push(token) for token in ids], parser


def reply(text, thinking=True, reason=None):
    return parse_output(TOY, ids_of(text), thinking=thinking, reason=reason)


@pytest.mark.parametrize("case", golden_json("chat/tool_parse.json"), ids=lambda c: c["name"])
def test_calls_match_the_goldens(case):
    ids = ids_of(f"<|open|>tools<|sep|>{case['tools_section']}<|close|>tools<|sep|>")
    parsed = parse_output(TOY, ids, thinking=False).tool_calls
    if "error" in case:
        with pytest.raises(ValueError, match="arguments of call 0 to 'get_weather'"):
            parsed[0].parsed()
    else:
        assert [{"name": c.name, "arguments": c.parsed()} for c in parsed] == case["calls"]


@settings(max_examples=50)
@given(replies, st.booleans())
def test_parsing_inverts_encoding(message, thinking):
    parsed = parse_output(TOY, scripted(message, thinking), thinking=thinking)
    assert parsed.reasoning == (message["reasoning_content"] if thinking else "")
    assert parsed.content == message["content"]
    read = [{"name": call.name, "arguments": call.parsed()} for call in parsed.tool_calls]
    assert read == message["tool_calls"]
    assert parsed.finish_reason == ("tool_calls" if read else "stop")
    assert parsed.partial_call is None


@settings(max_examples=50)
@given(replies)
def test_a_parsed_reply_encodes_to_the_ids_it_came_from(message):
    ids = scripted(message)
    assert scripted(parse_output(TOY, ids).message()) == ids


@settings(max_examples=50)
@given(replies, st.data())
def test_the_stream_joins_to_the_one_shot_parse(message, data):
    ids = scripted(message)
    pushed, parser = stream(ids)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    batches = [pushed[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    joined = [delta for batch in batches for deltas in batch for delta in deltas]
    assert collect(joined + parser.finish()) == parse_output(TOY, ids)
    text = {kind: "".join(d.text for d in joined if d.kind == kind) for kind in TEXTS}
    assert text["reasoning"] == message["reasoning_content"]
    assert text["content"] == message["content"]
    assert not any("\ufffd" in delta.text for delta in joined)


def check_cut(ids, end, whole):
    cut = parse_output(TOY, ids[:end], reason="length")
    assert cut.finish_reason == "length"
    assert whole.reasoning.startswith(cut.reasoning)
    assert whole.content.startswith(cut.content)
    assert whole.tool_calls[: len(cut.tool_calls)] == cut.tool_calls
    if cut.partial_call is not None:
        complete = whole.tool_calls[len(cut.tool_calls)]
        assert complete.name == cut.partial_call.name
        assert complete.arguments.startswith(cut.partial_call.arguments)


@settings(max_examples=50)
@given(replies, st.data())
def test_a_cut_reply_is_a_prefix_of_the_whole(message, data):
    ids = scripted(message)
    check_cut(ids, data.draw(st.integers(0, len(ids) - 1)), parse_output(TOY, ids))


def test_a_reply_cut_after_any_token_is_a_prefix():
    arguments = {"city": 'Zürich "🙂"', "days": 2, "at": [1.5, None], "now": True}
    calls = [{"name": "weather", "arguments": arguments}, {"name": "now", "arguments": "{}"}]
    message = {"role": "assistant", "reasoning": "🙂 hm", "content": "Ok…", "tool_calls": calls}
    ids = scripted(message)
    whole = parse_output(TOY, ids)
    assert [call.parsed() for call in whole.tool_calls] == [arguments, {}]
    for end in range(len(ids)):
        check_cut(ids, end, whole)


WORDS = (*map(ids_of, ("think", "response", "tools", "call", "argument", "json", "message")),)
HEADERS = (*map(ids_of, (' tool="f"', ' key="k"', ' type="string"', ' type="number"')),)
scraps = st.sampled_from(
    [*WORDS, *HEADERS, *map(ids_of, ("<|open|>", "<|close|>", "<|sep|>", " 3", "[1", "🙂"))]
    + [[240], [159], [600], [845], ids_of("<|open|>tools<|sep|>")]
    + [ids_of('<|open|>call tool="g"<|sep|>'), ids_of('<|open|>argument key="a"<|sep|>')]
    + [ids_of(f"<|close|>{tag}<|sep|>") for tag in ("argument", "call", "tools", "think")]
)


@given(st.lists(scraps, max_size=30), st.booleans())
def test_any_ids_parse_without_showing_a_marker(pieces, thinking):
    ids = [token for piece in pieces for token in piece]
    pushed, parser = stream(ids, thinking)
    deltas = [delta for step in pushed for delta in step]
    assert not any("<|" in delta.text + delta.name for delta in deltas)
    parsed = collect(deltas + parser.finish())
    assert parsed.finish_reason == (
        "tool_calls"
        if parser.ended and parsed.tool_calls
        else ("stop" if parser.ended else "length")
    )
    if not any(piece == ids_of("json") for piece in pieces):
        for call in parsed.tool_calls:
            call.parsed()


def test_string_arguments_stream_and_others_come_whole():
    text = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="string"<|sep|>one "two"\n<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="array"<|sep|>[1, 2]<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
    )
    deltas = [delta for step in stream(ids_of(text))[0] for delta in step]
    assert (deltas[0].kind, deltas[0].name, deltas[0].call_id) == ("call_start", "f", "f:0")
    assert deltas[-1].kind == "call_end"
    pieces = [delta.text for delta in deltas[1:-1]]
    assert "".join(pieces) == '{"a": "one \\"two\\"\\n", "b": [1, 2]}'
    first, last = pieces.index('{"a": "'), pieces.index('"')
    assert last - first > 3
    assert "[1, 2]" in pieces


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("string", "3", "3"),
        ("number", "3", 3),
        ("number", "1e2", 100.0),
        ("number", " -0.5\n", -0.5),
        ("number", "three", "three"),
        ("number", "NaN", "NaN"),
        ("number", "9" * 5000, "9" * 5000),
        ("boolean", "true", True),
        ("boolean", "True", "True"),
        ("null", "null", None),
        ("null", "", ""),
        ("object", '{"a": [1]}', {"a": [1]}),
        ("object", '{"a": ', '{"a": '),
        ("array", "[" * 100_000, "[" * 100_000),
        ("integer", "7", 7),
        ("", "seven", "seven"),
    ],
)
def test_arguments_are_typed_with_raw_text_as_fallback(kind, raw, value):
    (call,) = reply(
        f'<|open|>tools<|sep|><|open|>call tool="f"<|sep|>'
        f'<|open|>argument key="a" type="{kind}"<|sep|>{raw}<|close|>argument<|sep|>'
        f"<|close|>call<|sep|>"
    ).tool_calls
    assert call.parsed() == {"a": value}


def test_attributes_are_unescaped():
    (call,) = reply(
        '<|open|>call tool="a&amp;quot;&quot;"<|sep|><|open|>argument key="&lt;&amp;" type="null"'
        "<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>"
    ).tool_calls
    assert (call.name, call.parsed()) == ('a&quot;"', {"&lt;&": None})


def test_tools_may_follow_thinking_directly():
    for bridge in ("", "<|close|>think<|sep|>"):
        parsed = reply(
            f'hm{bridge}<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        )
        assert (parsed.reasoning, parsed.content) == ("hm", "")
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", "{}")]
        assert parsed.finish_reason == "tool_calls"


def test_closing_an_unopened_response_proves_the_text_was_the_answer():
    ids = ids_of("The answer<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    pushed, parser = stream(ids)
    kinds = [delta.kind for step in pushed for delta in step]
    assert kinds[-2:] == ["retract_reasoning", "content"] and set(kinds[:-2]) == {"reasoning"}
    parsed = parse_output(TOY, ids)
    assert (parsed.reasoning, parsed.content) == ("", "The answer")
    assert parser.reasoning_tokens == parsed.reasoning_tokens == 0


def test_a_response_close_after_thinking_ended_retracts_nothing():
    parsed = reply("hm<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>")
    assert (parsed.reasoning, parsed.content) == ("hm", "a")
    parsed = reply("hm<|close|>think<|sep|><|close|>response<|sep|>")
    assert (parsed.reasoning, parsed.content) == ("hm", "")
    parsed = reply('hm<|open|>call tool="f"<|sep|><|close|>call<|sep|><|close|>response<|sep|>')
    assert (parsed.reasoning, parsed.content) == ("hm", "")
    parsed = reply("hm<|open|>response<|sep|>a<|close|>response<|sep|><|close|>response<|sep|>")
    assert (parsed.reasoning, parsed.content) == ("hm", "a")


def test_text_after_thinking_counts_as_the_answer_but_spaces_do_not():
    assert reply("hm<|close|>think<|sep|>\n yes").content == "\n yes"
    assert reply("<|close|>think<|sep|>\n<|open|>response<|sep|>yes").content == "yes"
    assert reply("<|open|>response<|sep|>yes<|close|>response<|sep|> no").content == "yes"


def test_cut_inside_thinking_leaves_the_content_empty():
    parsed = reply("still thinking", reason="length")
    assert (parsed.content, parsed.finish_reason) == ("", "length")
    assert parsed.reasoning_tokens == len(TOY.encode("still thinking"))


def test_reasoning_tokens_count_text_and_no_markers():
    ids = ids_of(
        "one two 🙂<|close|>think<|sep|><|open|>response<|sep|>three<|close|>response<|sep|>"
    )
    assert parse_output(TOY, ids).reasoning_tokens == len(TOY.encode("one two 🙂"))
    assert parse_output(TOY, ids, thinking=False).reasoning_tokens == 0


def test_a_call_the_reply_stops_in_is_not_complete():
    done = '<|open|>call tool="f"<|sep|><|close|>call<|sep|>'
    open_call = '<|open|>call tool="g"<|sep|><|open|>argument key="a" type="string"<|sep|>x'
    parsed = reply(f"<|open|>tools<|sep|>{open_call}<|end_of_msg|>")
    assert (parsed.tool_calls, parsed.finish_reason) == ((), "stop")
    assert parsed.partial_call is not None and parsed.partial_call.arguments == '{"a": "x'
    parsed = reply(f"<|open|>tools<|sep|>{done}{open_call}", reason="length")
    assert [call.name for call in parsed.tool_calls] == ["f"]
    assert parsed.finish_reason == "length"


def test_a_call_ends_where_the_next_or_the_section_ends_it():
    head = '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="a" type="null"'
    for ending in ("<|close|>call<|sep|>", '<|open|>call tool="g"<|sep|>', "<|close|>tools<|sep|>"):
        parsed = reply(f"{head}<|sep|>null{ending}")
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("f", '{"a": null}')]


def test_an_argument_ends_where_the_next_begins():
    (call,) = reply(
        '<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>x'
        '<|open|>argument key="b" type="number"<|sep|>2<|close|>call<|sep|>'
    ).tool_calls
    assert call.parsed() == {"a": "x", "b": 2}


def test_a_call_left_for_another_channel_is_never_complete():
    parsed = reply(
        '<|open|>call tool="f"<|sep|><|open|>response<|sep|>a'
        '<|open|>call tool="g"<|sep|><|close|>call<|sep|>'
    )
    assert [(call.index, call.name) for call in parsed.tool_calls] == [(1, "g")]
    assert (parsed.content, parsed.partial_call) == ("a", None)


def test_a_call_without_name_is_dropped():
    parsed = reply(
        '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|open|>argument key="a"<|sep|>x'
        "<|close|>argument<|sep|><|close|>call<|sep|>"
        '<|open|>call tool="f"<|sep|><|close|>call<|sep|>'
    )
    assert [(call.index, call.name) for call in parsed.tool_calls] == [(0, "f")]
    assert (parsed.reasoning, parsed.content) == ("", "")


def test_a_call_uses_one_argument_form():
    argument = '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
    block = '<|open|>json type="object"<|sep|>{"b": 2}<|close|>json<|sep|>'
    for body, expected in ((argument + block, {"a": 1}), (block + argument, {"b": 2})):
        (call,) = reply(f'<|open|>call tool="f"<|sep|>{body}<|close|>call<|sep|>').tool_calls
        assert call.parsed() == expected
    (call,) = reply(
        '<|open|>call tool="f"<|sep|><|open|>json<|sep|> <|close|>json<|sep|><|close|>call<|sep|>'
    ).tool_calls
    assert call.parsed() == {}


def test_an_unfinished_character_is_left_out():
    smile = TOY.encode("🙂")
    assert len(smile) > 1
    parsed = parse_output(TOY, ids_of("a") + smile[:-1], thinking=False)
    assert parsed.content == "a"
    assert parse_output(TOY, ids_of("a") + smile, thinking=False).content == "a🙂"
    broken = smile[:-1] + ids_of("<|sep|>b")
    assert parse_output(TOY, broken, thinking=False).content == "b"


def test_nothing_after_the_end_is_read():
    for end in ("<|end_of_msg|>", "<|close|>message<|sep|>", '<|open|>message role="user"<|sep|>'):
        parsed = reply(f"a{end}b", thinking=False)
        assert (parsed.content, parsed.finish_reason) == ("a", "stop")
    assert reply("<|end_of_msg|>").finish_reason == "stop"
    assert reply("a[PAD]b", thinking=False).content == "ab"


def test_finish_speaks_once_and_knows_its_reasons():
    parser = OutputParser(TOY)
    with pytest.raises(ValueError, match="reason must be stop, length or None, not 'abort'"):
        parser.finish("abort")  # pyright: ignore[reportArgumentType]
    assert [delta.finish_reason for delta in parser.finish("stop")] == ["stop"]
    assert parser.finish("length") == []


def test_an_id_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="token id 846"):
        OutputParser(TOY).push(846)


def test_call_ids_are_the_callers_to_choose():
    text = '<|open|>call tool="f"<|sep|><|close|>call<|sep|>'
    parsed = parse_output(TOY, ids_of(text), call_id=lambda index, name: f"call_{index}_{name}")
    assert parsed.message()["tool_calls"][0] == {
        "id": "call_0_f",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({})},
    }


def test_kimi_linear_replies_are_plain_content(linear_tokenizer):
    ids = linear_tokenizer.encode_control("a<|open|>b<|im_middle|>c<|im_end|>d")
    parsed = parse_output(linear_tokenizer, ids)
    assert (parsed.content, parsed.reasoning) == ("a<|open|>bc", "")
    assert (parsed.finish_reason, parsed.reasoning_tokens) == ("stop", 0)
