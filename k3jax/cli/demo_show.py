"""Runs the demo's items one after the other and prints them as conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

from k3jax.chat import ChatOptions
from k3jax.cli.conversation import Conversation, TokenSource, Turn, tool_result
from k3jax.cli.demo_items import ITEMS, Item
from k3jax.cli.terminal import ReplyPrinter, Style, rate
from k3jax.text_model import TextModel

_MAX_TOKENS = 480
"""For every item, so that prompts of at most 544 tokens share one decode program."""

_SHOWN = 240
"""Characters of a question that are printed, besides its last sentence."""


class DemoShow:
    """Prints to `out`, or nothing if that is None."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._style = Style(False) if out is None else Style.of(out)
        self._printer = None if out is None else ReplyPrinter(out, self._style)

    def run(
        self, model: TextModel, source: TokenSource, clock: Callable[[], float]
    ) -> list[dict[str, Any]]:
        """One report per item; `clock` gives seconds without those spent compiling."""
        return [
            self._item(number, item, model, source, clock) for number, item in enumerate(ITEMS, 1)
        ]

    def _item(
        self,
        number: int,
        item: Item,
        model: TextModel,
        source: TokenSource,
        clock: Callable[[], float],
    ) -> dict[str, Any]:
        options = ChatOptions(
            thinking=item.thinking,
            tools=list(item.tools) or None,
            response_format=item.response_format,
        )
        sampling = replace(model.sampling, temperature=0.0, max_tokens=_MAX_TOKENS)
        conversation = Conversation(model, source, sampling, options, clock=clock)
        self._line(self._style.bold(f"{number}. {item.title}"))
        turns = [self._ask(conversation, "user", {"role": "user", "content": item.question})]
        correct = item.call is None or item.accepts_call(turns[0].reply)
        if item.call is not None and turns[0].reply.tool_calls:
            result = tool_result(turns[0].reply.tool_calls[0], item.result)
            turns.append(self._ask(conversation, "tool", result))
        correct = correct and item.accepts(turns[-1].reply)
        report = _report(item, turns, correct)
        verdict = "right" if correct else f"expected {item.expected}"
        speed = rate(sum(len(turn.tokens) - 1 for turn in turns), report["decode_seconds"])
        read = f"{report['prompt_tokens']} prompt tokens read in {report['prefill_seconds']:.2f} s"
        made = f"{report['completion_tokens']} generated at {speed}"
        self._line(self._style.dim(f"[{verdict}; {read}, {made}]") + "\n")
        return report

    def _ask(self, conversation: Conversation, who: str, message: dict[str, Any]) -> Turn:
        text = message["content"]
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN].rpartition(' ')[0]} … {text.rpartition('. ')[2]}"
        self._line(self._style.dim(f"{who}: ") + text)
        if self._printer is None:
            return conversation.ask([message], lambda deltas: None)
        turn = conversation.ask([message], self._printer.show)
        self._printer.end()
        return turn

    def _line(self, text: str) -> None:
        if self._out is not None:
            print(text, file=self._out, flush=True)


def _report(item: Item, turns: list[Turn], correct: bool) -> dict[str, Any]:
    """Numbers over all turns; the texts are those of the last, the calls those of any."""
    decode = sum(turn.seconds - turn.first for turn in turns)
    steps = sum(max(len(turn.tokens) - 1, 0) for turn in turns)
    return {
        "title": item.title,
        "prompt": item.question,
        "reasoning": [turn.reply.reasoning for turn in turns],
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments}
            for turn in turns
            for call in turn.reply.tool_calls
        ],
        "content": turns[-1].reply.content,
        "expected": item.expected,
        "correct": correct,
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "completion_tokens": sum(len(turn.tokens) for turn in turns),
        "prefill_seconds": sum(turn.first for turn in turns),
        "decode_seconds": decode,
        "tokens_per_second": steps / decode if decode > 0 else None,
    }
