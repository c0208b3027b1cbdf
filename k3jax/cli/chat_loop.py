"""The terminal side of a conversation: reads lines and commands, prints replies and their cost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

from k3jax.cli.conversation import Conversation, Turn, tool_result
from k3jax.cli.terminal import ReplyPrinter, Style, rate

HELP = """\
/help            this list
/reset           forget the conversation
/system TEXT     start again with this system message; without TEXT, with none
/think on|off    whether to think before answering
/effort LEVEL    how much to think: low, high or max
/image PATH      show an image with the next message
/exit            leave"""


class ChatLoop:
    """A conversation over stdin, `out` for what is said and `log` for what it cost.

    On a terminal an error is shown and the conversation goes on; piped input ends with it, so that
    a script notices (ValueError, OSError).
    """

    def __init__(
        self,
        conversation: Conversation,
        *,
        compiling: Callable[[], float] = lambda: 0.0,
        cached: Callable[[], int] | None = None,
        system: str | None = None,
        out: TextIO | None = None,
        log: TextIO | None = None,
    ) -> None:
        """`compiling` gives the seconds that the process has spent compiling so far, `cached` how
        many tokens of the latest prompt came from a prefix cache; None where there is none."""
        self._conversation = conversation
        self._compiling, self._cached = compiling, cached
        self._out, self._log = out or sys.stdout, log or sys.stderr
        self._style, self._log_style = Style.of(self._out), Style.of(self._log)
        self._printer = ReplyPrinter(self._out, self._style)
        self._interactive = sys.stdin.isatty()
        self._images: list[str] = []
        self._start(system)

    def run(self) -> None:
        """Until the end of the input, /exit, or Ctrl-C at the prompt."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives `input` editing and history
            self._printer.note("/help shows the commands, Ctrl-D leaves")
        while (line := self._read("> ")) is not None:
            line = line.strip()
            if line == "/exit":
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._say(line)
            except (ValueError, OSError) as error:
                self._printer.end()
                if not self._interactive:
                    raise
                print(self._style.error(f"error: {error}"), file=self._out)

    def _start(self, system: str | None) -> None:
        """Begin an empty conversation."""
        self._conversation.messages = [{"role": "system", "content": system}] if system else []
        self._images = []

    def _read(self, prompt: str) -> str | None:
        """A line; None at the end of the input or for Ctrl-C."""
        try:
            return input(prompt if self._interactive else "")
        except (EOFError, KeyboardInterrupt):
            if self._interactive:
                print(file=self._out)
            return None

    def _say(self, text: str) -> None:
        content: Any = text
        if self._images:
            content = [{"type": "image", "image": path} for path in self._images]
            content.append({"type": "text", "text": text})
            self._images = []
        turn = self._turn([{"role": "user", "content": content}])
        while turn.reply.tool_calls and not turn.interrupted:
            results = []
            for call in turn.reply.tool_calls:
                result = self._read(f"result of {call.name}: ")
                if result is None:
                    return
                results.append(tool_result(call, result))
            turn = self._turn(results)

    def _turn(self, messages: list[dict[str, Any]]) -> Turn:
        compiled = self._compiling()
        turn = self._conversation.ask(messages, self._printer.show)
        self._printer.end()
        if turn.interrupted:
            self._printer.note("(stopped)")
        elif turn.reply.finish_reason == "length":
            self._printer.note(f"(cut off after {len(turn.tokens)} tokens)")
        cached = None if self._cached is None else self._cached()
        cost = summary(turn, self._compiling() - compiled, cached)
        print(self._log_style.dim(cost), file=self._log, flush=True)
        return turn

    def _command(self, line: str) -> None:
        name, _, value = line.partition(" ")
        value = value.strip()
        options = self._conversation.options
        match name, value:
            case "/help", "":
                print(HELP, file=self._out)
            case "/reset", "":
                first = self._conversation.messages[:1]
                self._start(next((m["content"] for m in first if m["role"] == "system"), None))
            case "/system", _:
                self._start(value or None)
            case "/think", "on" | "off":
                effort = options.effort or "max"
                options = replace(options, thinking=value == "on", effort=effort)
            case "/effort", "low" | "high" | "max":
                options = replace(options, thinking=True, effort=value)
            case "/image", path if path:
                self._add_image(path)
            case _:
                raise ValueError(f"unknown command {line!r}; /help shows the commands")
        self._conversation.options = options

    def _add_image(self, path: str) -> None:
        processor = self._conversation.model.image_processor
        if processor is None:
            raise ValueError("this model has no vision tower, so it cannot see images")
        image = processor.process(path)
        self._images.append(path)
        size = f"{image.width}x{image.height}, {image.num_tokens} tokens"
        self._printer.note(f"(shown with the next message: {path}, {size})")


def summary(turn: Turn, compiling: float, cached: int | None = None) -> str:
    """What a turn cost; its own times are without the seconds spent compiling."""
    of_them = "" if cached is None else f" ({cached} cached)"
    parts = [f"{turn.prompt_tokens} prompt tokens{of_them}", f"{len(turn.tokens)} generated"]
    if turn.tokens:
        parts.append(f"first after {turn.first:.2f} s")
    if len(turn.tokens) > 1:
        parts.append(rate(len(turn.tokens) - 1, turn.seconds - turn.first))
    if compiling >= 0.1:
        parts.append(f"{compiling:.1f} s compiling")
    return f"[{', '.join(parts)}]"
