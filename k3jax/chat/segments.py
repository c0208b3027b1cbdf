"""Segments, the unit of chat encoding: a text and whether marker names in it are markers.

The ids of a prompt are the concatenation of each segment's own encoding, so text in a plain
segment can neither become a marker nor merge with its neighbours (encoding_k3.py).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from k3jax.chat.tokenizer import Tokenizer


class Segment(NamedTuple):
    """One piece of a prompt. `control` text is written by this program, never by a user."""

    text: str
    control: bool


def plain(text: object) -> list[Segment]:
    """Untrusted or ordinary text; nothing when empty."""
    shown = str(text)
    return [Segment(shown, False)] if shown else []


def control(text: str) -> list[Segment]:
    """Marker text; nothing when empty."""
    return [Segment(text, True)] if text else []


def open_tag(tag: str, attributes: Sequence[tuple[str, object]] = ()) -> list[Segment]:
    """`<|open|>tag key="value"…<|sep|>`: four plain segments per attribute, the value escaped."""
    segments = [*control("<|open|>"), *plain(tag)]
    for key, value in attributes:
        segments += [*plain(f" {key}"), *plain('="'), *plain(escape(value)), *plain('"')]
    return segments + control("<|sep|>")


def close_tag(tag: str) -> list[Segment]:
    """`<|close|>tag<|sep|>`."""
    return [*control("<|close|>"), *plain(tag), *control("<|sep|>")]


def end_of_message() -> list[Segment]:
    """`<|end_of_msg|>`, which closes every message."""
    return control("<|end_of_msg|>")


def escape(value: object) -> str:
    """An attribute value: `&` and `"` become entities, `<` and `>` stay."""
    return str(value).replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Concatenate the ids of each segment encoded on its own."""
    ids: list[int] = []
    for text, is_control in segments:
        ids.extend(tokenizer.encode_control(text) if is_control else tokenizer.encode(text))
    return ids
