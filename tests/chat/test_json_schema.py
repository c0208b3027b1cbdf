"""Schemas that cannot be followed are found, with the place; all other ones pass."""

import time
from typing import Any

import pytest

from k3jax.chat.json_schema import MAX_DEPTH, check_schema

TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "value": {"type": ["integer", "null"]}},
    "required": ["value"],
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        TREE,
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"$ref": "#/$defs/a%20b%2F%25", "$defs": {"a b/%": {"type": "string"}}},
        {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
        {"items": [{"type": "string"}], "additionalProperties": False},
        {"$ref": "https://example.com/schema"},
        {"colour": {"type": "strng"}, "enum": [1]},
        {"properties": {"type": {"type": "string"}, "$ref": {"type": "string"}}},
        {"$ref": "#/x", "x": {"anyOf": 5}},
        {"$ref": "#/x", "x": {"anyOf": {"a": 1}}},
        nested(MAX_DEPTH),
    ],
)
def test_schemas_pass(schema: Any):
    check_schema(schema, "s")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ([], "s must be a schema, not list"),
        ({"type": "strng"}, "s.type 'strng' is none of string, number"),
        ({"type": ["string", "strng"]}, "s.type 'strng'"),
        ({"type": {"a": 1}}, "s.type {'a': 1} is none of"),
        ({"properties": {"a": {"type": "int"}}}, r"s.properties.a.type 'int'"),
        ({"properties": []}, "s.properties must be an object, not list"),
        ({"properties": {"a": 3}}, "s.properties.a must be a schema, not int"),
        ({"items": {"anyOf": []}}, "s.items.anyOf must be a list of schemas that is not empty"),
        ({"allOf": [{}, {"type": "x"}]}, r"s.allOf\[1\].type 'x'"),
        ({"required": "a"}, "s.required must be a list of names"),
        ({"enum": []}, "s.enum must be a list that is not empty"),
        ({"$ref": "#"}, "s refers to itself"),
        ({"$ref": 3}, r"s.\$ref must be text"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "s refers to itself"),
        ({"anyOf": [{"$ref": "#"}]}, "s refers to itself"),
        ({"items": {"$ref": "#/$defs/b"}}, r"s.items.\$ref '#/\$defs/b' leads nowhere"),
        ({"$ref": "#/x", "x": 3}, r"s.\$ref '#/x' must lead to a schema, not int"),
        ({"$ref": "#/title/0", "title": "ab"}, "leads nowhere"),
        ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}, "leads nowhere"),
        ({"$ref": "#/x", "x": {"$ref": "#/y"}, "y": {"$ref": "#/x"}}, "s refers to itself"),
        (nested(MAX_DEPTH + 2), "nested deeper than 128"),
    ],
)
def test_what_is_wrong_is_named(schema: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        check_schema(schema, "s")


def test_a_long_chain_of_references_is_followed_once():
    links = 4000
    chain = {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(links)}
    start = time.perf_counter()
    check_schema({"$defs": {**chain, str(links): {"type": "string"}}}, "s")
    assert time.perf_counter() - start < 5  # minutes when every link follows all that come after it
