"""Translates the gateway's structural tags for K3's tool calls into llguidance's Lark.

The gateway sends one when a call must be made: alternatives that begin where a reply may turn to
its tools, all with the same content. Here the content becomes rules, and around it goes the whole
reply as K3 writes it: thinking, a response, the calls, the end of the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from k3jax.chat.json_schema import check_schema
from serving.turns import Channel

_MARKER = re.compile(r"<\|(?:open|close|sep|end_of_msg)\|>")

_TOOLS = "<|open|>tools<|sep|>"
_TOOLS_END = "<|close|>tools<|sep|>"

_RESPONSE = '<|open|> "response" <|sep|> TEXT <|close|> "response" <|sep|>'
_BEFORE_TOOLS: Mapping[Channel | None, str] = {
    "think": f'TEXT (<|close|> "think" <|sep|> ({_RESPONSE})?)?',
    "response": 'TEXT (<|close|> "response" <|sep|>)?',
    None: "TEXT",
}

MAX_DEPTH = 64


def tag_to_lark(tag: object, channel: Channel | None) -> str:
    """The grammar of a reply that ends in the calls of a tag. Raises ValueError naming a node."""
    content = _tools_content(tag)
    rules = _Rules()
    body = rules.of(content, "format.tags[0].content", 0)
    return "\n".join(
        [
            "%llguidance {}",
            f'start: {_BEFORE_TOOLS[channel]} tools <|close|> "message" <|sep|>',
            f"tools: {_const(_TOOLS)} {body} {_const(_TOOLS_END)}",
            *rules.lines,
            "TEXT: /(.|\\n)*/",
            "",
        ]
    )


def _tools_content(tag: object) -> Mapping[str, Any]:
    """The content of the tag's alternatives, once it is sure that they agree."""
    form = tag.get("format") if isinstance(tag, Mapping) else None
    if not isinstance(form, Mapping) or form.get("type") != "triggered_tags":
        raise ValueError("format: expected the type triggered_tags")
    tags = form.get("tags")
    if not isinstance(tags, Sequence) or not tags:
        raise ValueError("format.tags: expected a list that is not empty")
    for index, entry in enumerate(tags):
        where = f"format.tags[{index}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), Mapping):
            raise ValueError(f"{where}: expected an object with begin, content and end")
        if not str(entry.get("begin")).endswith(_TOOLS) or entry.get("end") != _TOOLS_END:
            raise ValueError(f"{where}: expected to begin with {_TOOLS} and end with {_TOOLS_END}")
        if entry["content"] != tags[0]["content"]:
            raise ValueError(f"{where}.content differs from that of format.tags[0]")
    return tags[0]["content"]


class _Rules:
    """Writes nodes as Lark expressions; a JSON schema becomes a rule of its own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._nodes: Mapping[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "sequence": self._sequence,
            "or": self._or,
            "plus": self._repeated("+"),
            "star": self._repeated("*"),
            "optional": self._repeated("?"),
            "const_string": lambda node, where, depth: _const(_text(node, "value", where)),
            "regex": lambda node, where, depth: f"/{regex_to_lark(_text(node, 'pattern', where))}/",
            "any_text": lambda node, where, depth: _any_text(node, where),
            "json_schema": self._json_schema,
        }

    def of(self, node: object, where: str, depth: int) -> str:
        """The expression of a node. Raises ValueError naming one that is unknown or malformed."""
        kind = node.get("type") if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping) or not isinstance(kind, str) or kind not in self._nodes:
            raise ValueError(f"{where}: the type {kind!r} is none of {', '.join(self._nodes)}")
        if depth > MAX_DEPTH:
            raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} nodes")
        return self._nodes[kind](node, where, depth + 1)

    def _sequence(self, node: Mapping[str, Any], where: str, depth: int) -> str:
        parts = self._elements(node, where, depth)
        return f"({' '.join(parts)})" if parts else '""'

    def _or(self, node: Mapping[str, Any], where: str, depth: int) -> str:
        parts = self._elements(node, where, depth)
        if not parts:
            raise ValueError(f"{where}.elements is empty")
        return f"({' | '.join(parts)})"

    def _elements(self, node: Mapping[str, Any], where: str, depth: int) -> list[str]:
        elements = node.get("elements")
        if not isinstance(elements, list):
            raise ValueError(f"{where}.elements is no list")
        return [self.of(e, f"{where}.elements[{i}]", depth) for i, e in enumerate(elements)]

    def _repeated(self, sign: str) -> Callable[[Mapping[str, Any], str, int], str]:
        def write(node: Mapping[str, Any], where: str, depth: int) -> str:
            return f"({self.of(node.get('content'), f'{where}.content', depth)}){sign}"

        return write

    def _json_schema(self, node: Mapping[str, Any], where: str, depth: int) -> str:
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise ValueError(f"{where}.json_schema is no JSON schema")
        check_schema(schema, f"{where}.json_schema")
        name = f"json_{len(self.lines)}"
        self.lines.append(f"{name}: %json {json.dumps(schema)}")
        return name


def _const(text: str) -> str:
    """Markers as special tokens, the text between them as strings."""
    parts: list[str] = []
    end = 0
    for marker in _MARKER.finditer(text):
        parts.extend(_quoted(text[end : marker.start()]))
        parts.append(marker[0])
        end = marker.end()
    parts.extend(_quoted(text[end:]))
    return " ".join(parts) or '""'


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []


def _any_text(node: Mapping[str, Any], where: str) -> str:
    """Text without the excluded pieces; it cannot hold markers in any case.

    Of a longer piece that is no marker its first character is excluded, which is stricter.
    """
    excludes = node.get("excludes", [])
    if not isinstance(excludes, list) or not all(isinstance(e, str) and e for e in excludes):
        raise ValueError(f"{where}.excludes is no list of texts")
    characters = {text[0] for text in excludes if not _MARKER.fullmatch(text)}
    if not characters:
        return "/(.|\\n)*/"
    return f"/[^{''.join(rf'\x{{{ord(c):x}}}' for c in sorted(characters))}]*/"


def _text(node: Mapping[str, Any], key: str, where: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{where}.{key} is no text")
    return value
