"""Finds the texts that end an answer, in what a reader of the answer sees."""

from __future__ import annotations

from collections.abc import Sequence

from k3jax.chat import OutputParser, TokenStream
from k3jax.chat.tokenizer import Tokenizer
from serving.turns import open_channel


class StopStrings:
    """Watches one choice.

    In a chat turn only the response counts: neither thinking nor calls nor the names of markers.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], texts: Sequence[str]) -> None:
        channel = open_channel(tokenizer, prompt)
        self._parser = OutputParser(tokenizer, channel == "think") if channel else None
        self._plain = TokenStream(tokenizer, skip_special=True)
        self._texts = texts
        self._keep = max(map(len, texts)) - 1
        self._tail = ""

    def push(self, token: int) -> str | None:
        """The text that this id completed, the leftmost one if several."""
        seen = self._tail + self._visible(token)
        self._tail = seen[len(seen) - self._keep :] if self._keep else ""
        found = [(seen.find(text), text) for text in self._texts if text in seen]
        return min(found)[1] if found else None

    def _visible(self, token: int) -> str:
        if self._parser is None:
            return self._plain.push(token)
        deltas = self._parser.push(token)
        return "".join(delta.text for delta in deltas if delta.kind == "content")
