"""Replies that a fake engine gives: written out as text, chosen by the last user message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3jax.chat.tokenizer import Tokenizer
from k3jax.engine.request import Request
from serving.turns import open_channel

END = "<|close|>message<|sep|><|end_of_msg|>"


def response(text: str) -> str:
    """A reply that only answers."""
    return f"{text}<|close|>response<|sep|>{END}"


def argument(key: str, value: str, kind: str = "string") -> str:
    """One argument of a call."""
    head = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
    return f"{head}{value}<|close|>argument<|sep|>"


def call(name: str, *arguments: str, index: int = 1) -> str:
    """One call."""
    head = f'<|open|>call tool="{name}" index="{index}"<|sep|>'
    return f"{head}{''.join(arguments)}<|close|>call<|sep|>"


def tools(*calls: str, text: str = "") -> str:
    """A reply that calls."""
    return (
        f"{text}<|close|>response<|sep|><|open|>tools<|sep|>{''.join(calls)}"
        f"<|close|>tools<|sep|>{END}"
    )


class Replies:
    """Answers from a table of last user messages; thinking goes first where a prompt opens it.

    `seen` holds the requests, latest last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: Mapping[str, str],
        *,
        thought: str = "Let me think.",
        default: str = "Hello.",
    ) -> None:
        self._tokenizer, self._table = tokenizer, table
        self._thought, self._default = thought, default
        self.seen: list[Request] = []

    def __call__(self, request: Request, choice: int) -> Sequence[int]:
        """The ids of a reply."""
        self.seen.append(request)
        prompt = self._tokenizer.decode(request.prompt)
        last = prompt.rsplit('role="user"<|sep|>', 1)[-1].partition("<|close|>")[0]
        reply = self._table.get(last, response(self._default))
        if open_channel(self._tokenizer, request.prompt) == "think":
            reply = f"{self._thought}<|close|>think<|sep|><|open|>response<|sep|>{reply}"
        return self._tokenizer.encode_control(reply)

    @property
    def prompt(self) -> str:
        """The latest prompt as text, markers written out."""
        return self._tokenizer.decode(self.seen[-1].prompt)
