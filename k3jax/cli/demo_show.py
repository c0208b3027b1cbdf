"""Puts the demo's items to a service one after the other and prints them as conversations."""

from __future__ import annotations

from typing import Any, TextIO

from k3jax.cli.conversation import tool_result
from k3jax.cli.demo_items import ITEMS, Item
from k3jax.cli.http_chat import Ask, HttpTurn
from k3jax.cli.terminal import ReplyPrinter, Style, rate

_MAX_TOKENS = 256

_SHOWN = 240
"""Characters of a question that are printed, besides its last sentence."""


class DemoShow:
    """Prints to `out`, or nothing if that is None."""

    def __init__(self, out: TextIO | None, ask: Ask) -> None:
        self._out, self._service = out, ask
        self._style = Style(False) if out is None else Style.of(out)
        self._printer = None if out is None else ReplyPrinter(out, self._style)

    def run(self) -> list[dict[str, Any]]:
        """One report per item."""
        return [self._item(number, item) for number, item in enumerate(ITEMS, 1)]

    def _item(self, number: int, item: Item) -> dict[str, Any]:
        self._line(self._style.bold(f"{number}. {item.title}"))
        messages: list[dict[str, Any]] = []
        turns = [self._ask(item, messages, "user", {"role": "user", "content": item.question})]
        correct = item.call is None or item.accepts_call(turns[0].reply)
        if item.call is not None and turns[0].reply.tool_calls:
            result = tool_result(turns[0].reply.tool_calls[0], item.result)
            turns.append(self._ask(item, messages, "tool", result))
        correct = correct and item.accepts(turns[-1].reply)
        if item.follow_up is not None:
            question, expected = item.follow_up
            turns.append(self._ask(item, messages, "user", {"role": "user", "content": question}))
            correct = correct and item.accepts(turns[-1].reply, expected)
            correct = correct and turns[-1].cached_tokens > 0
        verdict = "right" if correct else f"wrong: expected {item.wanted}"
        self._line(self._style.dim(f"[{verdict}]") + "\n")
        return _report(item, turns, correct)

    def _ask(
        self, item: Item, messages: list[dict[str, Any]], who: str, message: dict[str, Any]
    ) -> HttpTurn:
        """Append a message and the reply to it."""
        text = message["content"]
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN].rpartition(' ')[0]} … {text.rpartition('. ')[2]}"
        self._line(self._style.dim(f"{who}: ") + text)
        options: dict[str, Any] = {"temperature": 0, "max_completion_tokens": _MAX_TOKENS}
        if not item.thinking:
            options["reasoning_effort"] = "none"
        if item.tools:
            options["tools"] = item.tools
        if item.response_format is not None:
            options["response_format"] = item.response_format
        messages.append(message)
        printer = self._printer
        show = (lambda deltas: None) if printer is None else printer.show
        turn = self._service(messages, show, **options)
        messages.append(turn.reply.message())
        if printer is not None:
            printer.end()
        self._line(self._style.dim(_cost(turn)))
        return turn

    def _line(self, text: str) -> None:
        if self._out is not None:
            print(text, file=self._out, flush=True)


def _cost(turn: HttpTurn) -> str:
    speed = rate(turn.completion_tokens - 1, turn.seconds - turn.first)
    return (
        f"  {turn.prompt_tokens} prompt tokens, {turn.cached_tokens} of them cached; first token "
        f"after {turn.first * 1e3:.0f} ms, {turn.completion_tokens} at {speed}"
    )


def _report(item: Item, turns: list[HttpTurn], correct: bool) -> dict[str, Any]:
    """What was said and what it cost, by turn."""
    return {
        "title": item.title,
        "prompt": item.question,
        "expected": item.wanted,
        "correct": correct,
        "turns": [
            {
                "reasoning": turn.reply.reasoning,
                "content": turn.reply.content,
                "tool_calls": [
                    {"name": call.name, "arguments": call.arguments}
                    for call in turn.reply.tool_calls
                ],
                "prompt_tokens": turn.prompt_tokens,
                "cached_tokens": turn.cached_tokens,
                "completion_tokens": turn.completion_tokens,
                "first_token_seconds": turn.first,
                "seconds": turn.seconds,
            }
            for turn in turns
        ],
    }
