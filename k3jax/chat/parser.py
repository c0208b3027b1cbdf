"""Reads a model's reply token by token into reasoning, content and tool calls.

Markers are recognised by id, never by searching text: `<|open|>tag attributes<|sep|>` and
`<|close|>tag<|sep|>`. A marker is held back until its `<|sep|>`, so no part of one is ever emitted.
"""

import codecs
import re
from collections.abc import Callable, Iterable
from typing import Literal

from k3jax.chat.call_arguments import ArgumentsWriter
from k3jax.chat.deltas import Delta, FinishReason, ParsedOutput, collect
from k3jax.chat.encoder import chat_format
from k3jax.chat.segments import unescape
from k3jax.chat.tokenizer import Tokenizer

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')

_Place = Literal["think", "response", "between", "tools", "call", "element", "after"]


def default_call_id(index: int, name: str) -> str:
    """`name:index`, unique within one reply and the same however the reply is split."""
    return f"{name}:{index}"


class OutputParser:
    """Incremental parser of one reply.

    The deltas depend on the ids alone, so the joined stream and the one-shot parse agree. What is
    unusual is read like this:

    - `<|close|>response<|sep|>` in a turn that began in thinking and never left it: the text so far
      was the answer. `retract_reasoning` is emitted, then the whole text as content, and
      `reasoning_tokens` is 0. A client that cannot retract shows the text in both places.
    - Tools may follow thinking directly; opening a channel leaves the one before.
    - Text after thinking and before any response counts as content (spaces alone do not).
    - A call is complete when it, the tools element or, by opening the next call, the model ends
      it. A call that the reply ends in is partial: no `call_end`.
    - Unknown markers, calls without a name and other special tokens are dropped. The bytes of an
      unfinished character are dropped; bytes that are not UTF-8 become U+FFFD.
    - Whatever follows `<|close|>message<|sep|>`, a new message, or an eos id is ignored.

    Replies of Kimi-Linear checkpoints have no channels: all text is content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = True,
        call_id: Callable[[int, str], str] = default_call_id,
    ) -> None:
        """Start at the end of a prompt.

        Args:
            tokenizer: names the markers and the eos ids.
            thinking: the prompt opened the thinking channel (`ChatOptions.thinking`).
            call_id: makes the id of a call from its index and name.
        """
        xtml = chat_format(tokenizer) == "xtml"
        marker = tokenizer.special_ids.get if xtml else {}.get
        self._open, self._close, self._sep = map(marker, ("<|open|>", "<|close|>", "<|sep|>"))
        self._tokenizer = tokenizer
        self._call_id = call_id
        self._place: _Place = "think" if thinking and xtml else "response"
        self._unclosed_thought: list[str] | None = [] if self._place == "think" else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._header: bytearray | None = None
        self._header_opens = False
        self._answered = self._place == "response"
        self._spaces = ""
        self._arguments: ArgumentsWriter | None = None
        self._calls_started = 0
        self._calls_complete = 0
        self._finished = False
        self.reasoning_tokens = 0
        """Text tokens of the thinking channel so far."""
        self.ended = False
        """The reply said that it is complete: an eos id or the end of the message."""

    def push(self, token: int) -> list[Delta]:
        """Read one id.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        if self.ended:
            return []
        if token in self._tokenizer.eos_ids:
            self.ended = True
            return []
        if self._tokenizer.is_special(token):
            return self._marker(token)
        text_bytes = self._tokenizer.token_bytes(token)
        if self._header is not None:
            self._header += text_bytes
            return []
        if self._place == "think":
            self.reasoning_tokens += 1
        text = self._decoder.decode(text_bytes)
        return self._text(text) if text else []

    def finish(self, reason: Literal["stop", "length"] | None = None) -> list[Delta]:
        """End the reply; the `finish` delta, once.

        Args:
            reason: why generation ended. `stop` becomes `tool_calls` if a call is complete. None
                means `stop` if the reply ended by itself, else `length`.

        Raises:
            ValueError: another reason.
        """
        if reason not in (None, "stop", "length"):
            raise ValueError(f"reason must be stop, length or None, not {reason!r}")
        if self._finished:
            return []
        self._finished = True
        reached_end = self.ended if reason is None else reason == "stop"
        why: FinishReason = "length"
        if reached_end:
            why = "tool_calls" if self._calls_complete else "stop"
        return [Delta("finish", finish_reason=why, reasoning_tokens=self.reasoning_tokens)]

    def _marker(self, token: int) -> list[Delta]:
        self._decoder.reset()
        if token in (self._open, self._close):
            self._header, self._header_opens = bytearray(), token == self._open
        elif token == self._sep and self._header is not None:
            header = self._header.decode("utf-8", "replace").strip()
            self._header = None
            tag, _, rest = header.partition(" ")
            if not self._header_opens:
                return self._on_close(tag)
            pairs = _ATTRIBUTE.findall(rest)
            return self._on_open(tag, {key: unescape(value) for key, value in pairs})
        return []

    def _on_open(self, tag: str, attributes: dict[str, str]) -> list[Delta]:
        match tag:
            case "think" | "response" | "tools":
                if tag != "think":
                    self._unclosed_thought = None
                self._answered = self._answered or tag == "response"
                self._arguments = None
                self._place = tag
            case "call":
                return self._end_call() + self._start_call(attributes.get("tool"))
            case "argument" | "json" if self._arguments is not None:
                text = self._arguments.close_element()
                if tag == "json":
                    text += self._arguments.open_json()
                else:
                    text += self._arguments.open_argument(
                        attributes.get("key"), attributes.get("type")
                    )
                self._place = "element"
                return self._argument_text(text)
            case "message":
                self.ended = True
        return []

    def _on_close(self, tag: str) -> list[Delta]:
        match tag:
            case "think" if self._place == "think":
                self._place, self._unclosed_thought = "between", None
            case "response" if self._place == "response":
                self._place = "between"
            case "response" if self._unclosed_thought is not None:
                return self._retract("".join(self._unclosed_thought))
            case "argument" | "json" if self._arguments is not None:
                self._place = "call"
                return self._argument_text(self._arguments.close_element())
            case "call" if self._place in ("call", "element"):
                return self._end_call()
            case "tools" if self._place in ("tools", "call", "element"):
                deltas = self._end_call()
                self._place = "between"
                return deltas
            case "message":
                self.ended = True
        return []

    def _text(self, text: str) -> list[Delta]:
        match self._place:
            case "think":
                if self._unclosed_thought is not None:
                    self._unclosed_thought.append(text)
                return [Delta("reasoning", text)]
            case "response":
                return [Delta("content", text)]
            case "between" if not self._answered:
                self._spaces += text
                if self._spaces.isspace():
                    return []
                text, self._spaces, self._place = self._spaces, "", "response"
                return [Delta("content", text)]
            case "element" if self._arguments is not None:
                return self._argument_text(self._arguments.text(text))
        return []

    def _retract(self, text: str) -> list[Delta]:
        self._place, self._unclosed_thought = "between", None
        self._answered = True
        self.reasoning_tokens = 0
        return [Delta("retract_reasoning"), *([Delta("content", text)] if text else [])]

    def _start_call(self, name: str | None) -> list[Delta]:
        self._unclosed_thought = None
        self._place = "call"
        if not name:
            return []
        index = self._calls_started
        self._calls_started += 1
        self._arguments = ArgumentsWriter()
        return [Delta("call_start", index=index, name=name, call_id=self._call_id(index, name))]

    def _end_call(self) -> list[Delta]:
        self._place = "tools"
        if self._arguments is None:
            return []
        deltas = self._argument_text(self._arguments.finish())
        self._arguments = None
        self._calls_complete += 1
        return [*deltas, Delta("call_end", index=self._calls_started - 1)]

    def _argument_text(self, text: str) -> list[Delta]:
        index = self._calls_started - 1
        return [Delta("call_arguments", text, index=index)] if text else []


def parse_output(
    tokenizer: Tokenizer,
    ids: Iterable[int],
    *,
    thinking: bool = True,
    reason: Literal["stop", "length"] | None = None,
    call_id: Callable[[int, str], str] = default_call_id,
) -> ParsedOutput:
    """Parse a whole reply: `OutputParser` over all its ids. Arguments as there."""
    parser = OutputParser(tokenizer, thinking, call_id)
    deltas = [delta for token in ids for delta in parser.push(token)]
    return collect(deltas + parser.finish(reason))
