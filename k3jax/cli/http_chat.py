"""Asks an OpenAI-compatible HTTP service for replies, streamed, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from k3jax.chat import Delta, ParsedOutput, collect

TIMEOUT_SECONDS = 300.0

Show = Callable[[Sequence[Delta]], None]


@dataclass
class HttpTurn:
    """A reply and its cost. `first` and `seconds` are measured from the sending of the request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first: float = 0.0
    """Seconds until the first piece of the reply."""
    seconds: float = 0.0
    """Seconds until the last piece."""
    reply: ParsedOutput = field(default_factory=ParsedOutput)


class Ask(Protocol):
    """Continues a conversation, handing every delta to `show`; see `HttpChat.ask`."""

    def __call__(self, messages: Sequence[Any], show: Show, **options: Any) -> HttpTurn: ...  # noqa: D102


class HttpChat:
    """One model behind one service."""

    def __init__(self, url: str, model: str, *, key: str | None = None) -> None:
        """`url` is `http://HOST:PORT`, without the /v1."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, messages: Sequence[Any], show: Show, **options: Any) -> HttpTurn:
        """The reply to messages in OpenAI's form; `options` are further fields of the request.

        Raises ValueError for a request that is refused, ConnectionError for one that breaks off.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        turn, deltas = HttpTurn(), []
        start = time.perf_counter()
        for chunk in self._chunks(body):
            found = list(_deltas(chunk, deltas))
            if found:
                turn.seconds = time.perf_counter() - start
                turn.first = turn.first or turn.seconds
                deltas += found
                show(found)
            _read_usage(turn, chunk)
        turn.reply = collect(deltas)
        return turn

    def _chunks(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                text = response.read().decode(errors="replace")
                raise ValueError(f"the service refused the request ({response.status}): {text}")
            for line in response:
                name, _, data = line.decode().strip().partition(":")
                if name != "data":
                    continue  # a comment that keeps the connection open, or a blank line
                if data.strip() == "[DONE]":
                    return
                yield json.loads(data)
            raise ConnectionError("the reply broke off")
        finally:
            connection.close()


def _deltas(chunk: Mapping[str, Any], before: Sequence[Delta]) -> Iterator[Delta]:
    """What a chunk adds, in the words of the output parser."""
    if "error" in chunk:
        raise ConnectionError(f"the service failed: {chunk['error']}")
    for choice in chunk.get("choices", ()):
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            yield Delta("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            yield Delta("content", delta["content"])
        for call in delta.get("tool_calls") or ():
            index, function = call["index"], call["function"]
            if function.get("name"):
                yield Delta("call_start", index=index, name=function["name"], call_id=call["id"])
            if function.get("arguments"):
                yield Delta("call_arguments", function["arguments"], index=index)
            if _is_json(_arguments(before, index) + (function.get("arguments") or "")):
                yield Delta("call_end", index=index)
        if choice.get("finish_reason"):
            yield Delta("finish", finish_reason=choice["finish_reason"])


def _arguments(before: Sequence[Delta], index: int) -> str:
    """What has come so far of a call's arguments."""
    return "".join(d.text for d in before if d.kind == "call_arguments" and d.index == index)


def _is_json(text: str) -> bool:
    """A call is whole once its arguments are; nothing else in the stream says so."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _read_usage(turn: HttpTurn, chunk: Mapping[str, Any]) -> None:
    usage = chunk.get("usage")
    if usage:
        turn.prompt_tokens = usage["prompt_tokens"]
        turn.completion_tokens = usage["completion_tokens"]
        turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
