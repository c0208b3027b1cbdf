"""One conversation with a model: turns, their deltas as they come, and what each turn cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from k3jax.chat import ChatOptions, Delta, OutputParser, ParsedOutput, ToolCall, collect
from k3jax.cli.answers import finish
from k3jax.engine.generate import stream
from k3jax.engine.request import MAX_SEED, FinishReason, SamplingParams
from k3jax.model.params import K3Params
from k3jax.text_model import Prompt, TextModel
from pallas_kernels.implementation import KernelPlan

TokenSource = Callable[[Prompt, SamplingParams], Iterator[tuple[int, FinishReason | None]]]
"""Continues a prompt, as `k3jax.engine.generate.stream` does."""


def model_source(model: TextModel, params: K3Params, plan: KernelPlan | None = None) -> TokenSource:
    """The model itself."""

    def source(
        prompt: Prompt, sampling: SamplingParams
    ) -> Iterator[tuple[int, FinishReason | None]]:
        images = model.image_features(params, prompt)
        return stream(params, model.config, prompt.tokens, sampling, images=images, plan=plan)

    return source


@dataclass
class Turn:
    """A reply and its cost. `first` and `seconds` are measured from the start of the prompt."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    """Seconds until the first token."""
    seconds: float = 0.0
    """Seconds until the last token."""
    reply: ParsedOutput = field(default_factory=ParsedOutput)
    interrupted: bool = False


class Conversation:
    """Messages in OpenAI's form, extended by asking.

    A turn that fails (too long a prompt, a broken image) leaves the messages as they were. One
    that is interrupted by Ctrl-C keeps what had been said; a call that it was cut off in is lost.
    """

    def __init__(
        self,
        model: TextModel,
        source: TokenSource,
        sampling: SamplingParams,
        options: ChatOptions,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.source, self.sampling = model, source, sampling
        self.options = options
        self.messages: list[dict[str, Any]] = []
        self.turns = 0
        self._clock = clock

    def ask(
        self, messages: Sequence[dict[str, Any]], show: Callable[[Sequence[Delta]], None]
    ) -> Turn:
        """Append messages and generate the reply, handing every delta to `show`.

        Raises ValueError as `TextModel.chat_prompt`.
        """
        asked = [*self.messages, *messages]
        prompt = self.model.chat_prompt(asked, self.options)
        sampling = replace(self.sampling, seed=(self.sampling.seed + self.turns) % (MAX_SEED + 1))
        turn = self._reply(prompt, sampling, show)
        self.turns += 1
        self.messages = [*asked, turn.reply.message()]
        return turn

    def _reply(
        self, prompt: Prompt, sampling: SamplingParams, show: Callable[[Sequence[Delta]], None]
    ) -> Turn:
        parser = OutputParser(self.model.tokenizer, self.options.thinking)
        deltas: list[Delta] = []
        turn = Turn(len(prompt.tokens))

        def emit(new: Sequence[Delta]) -> None:
            deltas.extend(new)
            show(new)

        start = self._clock()
        why = FinishReason.LENGTH
        try:
            for token, reason in self.source(prompt, sampling):
                turn.seconds = self._clock() - start
                turn.first = turn.first if turn.tokens else turn.seconds
                turn.tokens.append(token)
                if reason is not None:
                    why = reason
                if reason is not FinishReason.STOP:
                    emit(parser.push(token))
        except KeyboardInterrupt:
            turn.interrupted = True
        emit(parser.finish(finish(why)))
        turn.reply = collect(deltas)
        return turn


def tool_result(call: ToolCall, content: str) -> dict[str, Any]:
    """The message that answers a call."""
    return {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": content}
