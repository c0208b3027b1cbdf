"""Writes replies for people: thinking dim, calls marked, colour only where it can be seen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from k3jax.chat import Delta

# What a model writes must not move the cursor or change the terminal.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160))}
_VISIBLE = {code: char for code, char in _CONTROLS.items() if code not in (9, 10)}


@dataclass(frozen=True)
class Style:
    """Escape codes around text, or none."""

    colour: bool

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Colour on a terminal that has it, unless NO_COLOR is set to anything."""
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(wanted and stream.isatty())

    def dim(self, text: str) -> str:
        """For what is not the answer."""
        return self._wrap("2", text)

    def bold(self, text: str) -> str:
        """For headings and prompts."""
        return self._wrap("1", text)

    def call(self, text: str) -> str:
        """For tool calls."""
        return self._wrap("36", text)

    def error(self, text: str) -> str:
        """For failures."""
        return self._wrap("31", text)

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


def visible(text: str) -> str:
    """The text with control characters, except tab and newline, replaced."""
    return text.translate(_VISIBLE)


class ReplyPrinter:
    """Prints the deltas of one reply as they come, every channel on lines of its own."""

    def __init__(self, out: TextIO, style: Style) -> None:
        self._out, self._style = out, style
        self._channel = ""
        self._line_open = False

    def show(self, deltas: Iterable[Delta]) -> None:
        """Print and flush."""
        for delta in deltas:
            match delta.kind:
                case "reasoning":
                    self._enter("reasoning", "thinking: ")
                    self._write(self._style.dim(visible(delta.text)))
                case "content":
                    self._enter("content", "")
                    self._write(visible(delta.text))
                case "call_start":
                    self._enter(f"call {delta.index}", "")
                    self._write(self._style.call(f"→ {visible(delta.name)} "))
                case "call_arguments":
                    self._write(self._style.call(visible(delta.text)))
                case "retract_reasoning":
                    self.note("(that was the answer)")
        self._out.flush()

    def note(self, text: str) -> None:
        """A line that the model did not write."""
        self.end()
        self._out.write(self._style.dim(text) + "\n")
        self._out.flush()

    def end(self) -> None:
        """Close the open line."""
        if self._line_open:
            self._out.write("\n")
        self._channel, self._line_open = "", False

    def _enter(self, channel: str, label: str) -> None:
        if channel != self._channel:
            self.end()
            self._channel = channel
            self._write(self._style.dim(label))

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._line_open = not text.endswith("\n")


def rate(tokens: int, seconds: float) -> str:
    """Tokens per second in three digits; a dash where there is nothing to divide."""
    if not tokens or seconds <= 0:
        return "– tokens/s"
    value = tokens / seconds
    return f"{value:.0f} tokens/s" if value >= 100 else f"{value:.3g} tokens/s"
