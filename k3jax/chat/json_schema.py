"""Finds what is wrong with a JSON schema before anybody tries to follow it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")

_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_INDEX = re.compile("[0-9]{1,9}")

MAX_DEPTH = 128


def check_schema(schema: Any, where: str) -> None:
    """Raise ValueError naming the place: an unknown type, a part that is no schema, or a `$ref`
    that leads nowhere or only to itself.

    Keywords that JSON Schema does not know are let through, as it says. References to other
    documents are left to whoever enforces the schema.
    """
    sound: set[int] = set()
    for node, at in _nodes(schema, where, 0):
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise ValueError(f"{at} must be a schema, not {type(node).__name__}")
        _check_type(node.get("type"), f"{at}.type")
        _check_names(node.get("required"), f"{at}.required")
        if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
            raise ValueError(f"{at}.enum must be a list that is not empty")
        _check_reference(node, schema, at, sound)


def _nodes(node: Any, at: str, depth: int) -> Iterator[tuple[Any, str]]:
    """A schema and those inside it, with their places."""
    yield node, at
    if depth > MAX_DEPTH:
        raise ValueError(f"{at} is nested deeper than {MAX_DEPTH} schemas")
    if not isinstance(node, Mapping):
        return
    for key in _ONE:
        # A list of items is the old spelling of prefixItems.
        if key in node and not (key == "items" and isinstance(node[key], list)):
            yield from _nodes(node[key], f"{at}.{key}", depth + 1)
    for key in (*_MANY, "items"):
        if key not in node or (key == "items" and not isinstance(node[key], list)):
            continue
        if not isinstance(node[key], list) or not node[key]:
            raise ValueError(f"{at}.{key} must be a list of schemas that is not empty")
        for index, inner in enumerate(node[key]):
            yield from _nodes(inner, f"{at}.{key}[{index}]", depth + 1)
    for key in _NAMED:
        if key not in node:
            continue
        if not isinstance(node[key], Mapping):
            raise ValueError(f"{at}.{key} must be an object, not {type(node[key]).__name__}")
        for name, inner in node[key].items():
            yield from _nodes(inner, f"{at}.{key}.{name}", depth + 1)


def _check_type(value: Any, where: str) -> None:
    if value is None:
        return
    for name in value if isinstance(value, list) else [value]:
        if name not in TYPES:
            raise ValueError(f"{where} {name!r} is none of {', '.join(TYPES)}")


def _check_names(value: Any, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where} must be a list of names")


def _check_reference(node: Mapping[str, Any], root: Any, at: str, sound: set[int]) -> None:
    """Follow references, and compositions of one part, until something is said about a value.

    `sound` are the ids of schemas that are known to end so, and gets those passed on the way.
    """
    seen: set[int] = set()
    current: Any = node
    while isinstance(current, Mapping) and id(current) not in sound:
        if id(current) in seen:
            raise ValueError(f"{at} refers to itself and says nothing about a value")
        seen.add(id(current))
        reference = current.get("$ref")
        if reference is None:
            lone = [current[k] for k in ("anyOf", "oneOf", "allOf") if k in current]
            if len(lone) != 1 or not isinstance(lone[0], list) or len(lone[0]) != 1:
                break
            current = lone[0][0]
            continue
        if not isinstance(reference, str):
            raise ValueError(f"{at}.$ref must be text, not {type(reference).__name__}")
        if not reference.startswith("#"):
            break
        current = _resolve(root, reference, at)
        if not isinstance(current, Mapping | bool):
            kind = type(current).__name__
            raise ValueError(f"{at}.$ref {reference!r} must lead to a schema, not {kind}")
    sound |= seen


def _resolve(root: Any, reference: str, at: str) -> Any:
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            raise ValueError(f"{at}.$ref {reference!r} leads nowhere")
    return found
