"""Constraints: what is sampled under a mask has the asked form, whatever the model prefers."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from k3jax.chat import parse_output
from serving.constraints import ConstraintCompiler, GrammarConstraint, GrammarFailed
from serving.grammar_trial import try_grammar
from serving.wire import ConstraintKind, ConstraintText, FieldError
from tests.serving.running import nano

TOKENIZER = nano().text.tokenizer
EOS = nano().text.config.eos_token_ids
THINK = TOKENIZER.encode_control("<|open|>think<|sep|>")
RESPONSE = TOKENIZER.encode_control("<|open|>response<|sep|>")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def argument(key: str, kind: str, value: dict[str, Any]) -> dict[str, Any]:
    begin = const(f'<|open|>argument key="{key}" type="{kind}"<|sep|>')
    elements = [begin, value, const("<|close|>argument<|sep|>")]
    return {"type": "sequence", "elements": elements}


def call(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    parts = [
        const(f'<|open|>call tool="{name}" index="'),
        {"type": "regex", "pattern": "[1-9][0-9]*"},
        const('"<|sep|>'),
        {"type": "sequence", "elements": list(arguments)},
        const("<|close|>call<|sep|>"),
    ]
    return {"type": "sequence", "elements": parts}


TEXT = {"type": "any_text", "excludes": ["<|close|>", "<|open|>", "<|sep|>"]}
DAYS = argument("days", "number", {"type": "json_schema", "json_schema": {"type": "integer"}})
CALLS = {
    "type": "plus",
    "content": {
        "type": "or",
        "elements": [
            call(
                "weather", argument("city", "string", TEXT), {"type": "optional", "content": DAYS}
            ),
            call("say &quot;é&quot;", argument("x&amp;", "string", TEXT)),
        ],
    },
}


def tag(content: dict[str, Any] = CALLS) -> str:
    """As the gateway sends it for tool_choice required."""
    tools = {"content": content, "end": "<|close|>tools<|sep|>"}
    begins = ["", "<|close|>think<|sep|>", "<|close|>response<|sep|>"]
    tags = [{"begin": f"{begin}<|open|>tools<|sep|>", **tools} for begin in begins]
    return json.dumps({"format": {"type": "triggered_tags", "tags": tags, "at_least_one": True}})


def compiled(
    kind: ConstraintKind, text: str, prompt: Sequence[int] = RESPONSE
) -> GrammarConstraint:
    async def compile_one() -> GrammarConstraint:
        compiler = ConstraintCompiler(TOKENIZER, EOS)
        try:
            return await compiler.compile(ConstraintText(kind, text), prompt)
        finally:
            compiler.close()

    return asyncio.run(compile_one())


def allowed(constraint: GrammarConstraint) -> set[int]:
    bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def sample(constraint: GrammarConstraint, seed: int) -> list[int]:
    """Draw at random under the mask, closing what can be closed once it has become long."""
    rng = random.Random(seed)
    ids: list[int] = []
    closers = {TOKENIZER.encode(text)[0] for text in '"}],'}
    while not ids or ids[-1] not in EOS:
        assert len(ids) < 600
        choice = allowed(constraint)
        specials = {token for token in choice if TOKENIZER.is_special(token)}
        if len(ids) > 30 and (specials or choice & closers):
            choice = specials or choice & closers
        ids.append(rng.choice(sorted(choice)))
        constraint.accept(ids[-1])
    return ids


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt", [THINK, RESPONSE], ids=["think", "response"])
def test_json_of_a_schema_lands_in_the_response(prompt: list[int], seed: int):
    ids = sample(compiled("json_schema", json.dumps(PERSON), prompt), seed)

    reply = parse_output(TOKENIZER, ids, thinking=prompt is THINK)
    value = json.loads(reply.content)

    assert set(value) == {"name", "age"}
    assert isinstance(value["age"], int)
    assert ids[-1] in EOS


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt", [THINK, RESPONSE], ids=["think", "response"])
def test_structural_tag_forces_calls_with_the_declared_arguments(prompt: list[int], seed: int):
    ids = sample(compiled("structural_tag", tag(), prompt), seed)

    reply = parse_output(TOKENIZER, ids, thinking=prompt is THINK)

    assert reply.tool_calls
    for tool_call in reply.tool_calls:
        arguments = tool_call.parsed()
        if tool_call.name == 'say "é"':
            assert set(arguments) == {"x&"}
        else:
            assert tool_call.name == "weather"
            assert isinstance(arguments["city"], str)
            assert isinstance(arguments.get("days", 0), int)


def test_regex_holds_for_plain_completions_too():
    ids = sample(compiled("regex", "a/[0-9]{2}", prompt=TOKENIZER.encode("say it:")), 1)

    text = TOKENIZER.decode(ids, skip_special=True)

    assert text.startswith("a/")
    assert text[2:].isdigit() and len(text) == 4


def test_grammar_in_ebnf_is_followed():
    ids = sample(compiled("ebnf_grammar", 'root ::= "yes" | "no" ws\nws ::= "!"'), 3)

    assert parse_output(TOKENIZER, ids, thinking=False).content in ("yes", "no!")


def test_mask_has_one_bit_for_each_id_in_whole_words():
    constraint = compiled("regex", "x")

    assert len(constraint.mask()) == 4 * -(-TOKENIZER.vocab_size // 32)
    assert max(allowed(constraint)) < TOKENIZER.vocab_size


def test_fork_starts_again_and_leaves_the_other_alone():
    constraint = compiled("regex", "ab")
    first = allowed(constraint)
    constraint.accept(TOKENIZER.encode("a")[0])
    second = allowed(constraint)

    fork = constraint.fork()

    assert allowed(fork) == first != second
    assert allowed(constraint) == second


def test_token_outside_the_grammar_is_an_error():
    constraint = compiled("regex", "ab")

    with pytest.raises(GrammarFailed):
        constraint.accept(TOKENIZER.encode("z")[0])
    with pytest.raises(GrammarFailed):
        constraint.mask()


def test_after_its_end_only_end_ids_are_allowed():
    constraint = compiled("regex", "x", prompt=TOKENIZER.encode("say it:"))

    for token in (*TOKENIZER.encode("x"), EOS[0], EOS[0]):
        assert token in allowed(constraint)
        constraint.accept(token)

    assert allowed(constraint) == set(EOS)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"type": "object", "properties": {"a": {"dependentRequired": {}}}}, "dependentRequired"),
    ],
)
def test_unsupported_keyword_is_named(schema: dict[str, Any], keyword: str):
    with pytest.raises(FieldError, match=keyword) as refused:
        compiled("json_schema", json.dumps(schema))

    assert refused.value.field == "sampling_params.json_schema"


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", "{", "no JSON"),
        ("json_schema", "[1]", "expected a JSON schema, not list"),
        ("json_schema", '{"$ref": "#"}', "schema refers to itself"),
        ("json_schema", '{"properties": {"a": {"type": "strng"}}}', "a.type 'strng' is none of"),
        (
            "structural_tag",
            tag(argument("x", "string", {"type": "json_schema", "json_schema": {"type": "strng"}})),
            "type 'strng' is none of",
        ),
        ("json_schema", "[" * 100_000, "no JSON"),
        ("regex", "(", r"^sampling_params.regex: invalid regex .*: unclosed group$"),
        ("ebnf_grammar", "root ::= (", "no grammar"),
        ("structural_tag", "{}", "triggered_tags"),
        ("structural_tag", tag({"type": "odd"}), r"content: the type 'odd'"),
        ("structural_tag", tag({"type": "or", "elements": []}), r"elements is empty"),
        ("structural_tag", tag({"type": "const_string"}), r"value is no text"),
        ("regex", "a" * (1 << 21), "at most"),
    ],
)
def test_malformed_constraint_is_refused_with_its_field(
    kind: ConstraintKind, text: str, problem: str
):
    with pytest.raises(FieldError, match=problem) as refused:
        compiled(kind, text)

    assert refused.value.field == f"sampling_params.{kind}"


def test_marker_names_in_a_schema_stay_text():
    schema = {"enum": ["<|close|>response<|sep|>"]}

    ids = sample(compiled("json_schema", json.dumps(schema)), 1)

    assert json.loads(parse_output(TOKENIZER, ids, thinking=False).content) == schema["enum"][0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "json_schema",
            json.dumps(
                {
                    "$ref": "#/$defs/0",
                    "$defs": {
                        **{
                            str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}, {}]}
                            for n in range(3000)
                        },
                        "3000": {"type": "string"},
                    },
                }
            ),
        ),
        (
            "ebnf",
            "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(20000)) + 'r20000: "a"',
        ),
    ],
)
def test_chains_of_references_and_rules_do_not_end_the_process(kind: ConstraintKind, text: str):
    compiler = ConstraintCompiler(TOKENIZER, EOS)
    assert any(compiler.compile_now(ConstraintText(kind, text), ()).mask())


BOMB = "(a|b)?" * 10_000  # minutes of processor time
BOMBS: list[tuple[ConstraintKind, str]] = [
    ("regex", BOMB),
    ("ebnf_grammar", f"start: <|open|> <[{TOKENIZER.vocab_size - 1}]> A\nA: /{BOMB}/"),
]


def test_constraints_that_take_too_long_are_refused_and_hold_up_nobody():
    async def compile_all() -> list[Any]:
        compiler = ConstraintCompiler(TOKENIZER, EOS, max_seconds=2)
        bombs = [
            asyncio.create_task(compiler.compile(ConstraintText(kind, text), RESPONSE))
            for kind, text in BOMBS
        ]
        await asyncio.sleep(0.2)
        small = json.dumps({**PERSON, "description": "x" * 5000})
        await compiler.compile(ConstraintText("json_schema", small), RESPONSE)
        assert not any(bomb.done() for bomb in bombs)
        found = await asyncio.gather(*bombs, return_exceptions=True)
        compiler.close()
        return found

    for refused in asyncio.run(compile_all()):
        assert isinstance(refused, FieldError)
        assert "it takes more than 2 s to compile" in str(refused)


def test_trial_that_could_not_be_made_is_not_called_a_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with code 1: it said nothing"):
        try_grammar("x" * 4000, {}, 256, max_seconds=1)
