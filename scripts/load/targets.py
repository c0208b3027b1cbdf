"""Ways to have a conversation continued, each timed by token: gRPC, HTTP, and the engine itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from k3jax.chat import ChatOptions
from k3jax.engine.request import SamplingParams
from serving.client import Client

NO_THINKING = ChatOptions(thinking=False)


@dataclass
class Sample:
    """One request: when it was sent and when each piece came, in seconds, and what came."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue: float | None = None
    error: str = ""


class Target(Protocol):
    """Continues conversations by a fixed number of greedy tokens; called from many threads."""

    def run(self, messages: Sequence[dict[str, Any]], tokens: int) -> Sample:
        """One reply."""
        ...


class Native:
    """A worker's gRPC port."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._client = Client(address, token=token)
        self._model = self._client.model

    def run(self, messages: Sequence[dict[str, Any]], tokens: int) -> Sample:
        """One reply, with the server's queue time."""
        prompt = self._model.chat_prompt(messages, NO_THINKING)
        sample, ids = Sample(time.perf_counter()), []
        try:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            generation = self._client.generate(prompt, sampling)
            for token in generation:
                sample.arrivals.append(time.perf_counter())
                ids.append(token)
            sample.prompt_tokens = generation.prompt_tokens
            sample.cached_tokens = generation.cached_tokens
            sample.queue = generation.times.get("queue")
        except (ValueError, ConnectionError) as error:
            sample.error = str(error)
        sample.tokens, sample.text = len(ids), self._model.tokenizer.decode(ids, skip_special=True)
        return sample


class Http:
    """The gateway's OpenAI API. Needs the `openai` package."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        from openai import OpenAI

        self._api = OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=600)
        self._model = model

    def run(self, messages: Sequence[dict[str, Any]], tokens: int) -> Sample:
        """One reply. Pieces of several tokens count as one arrival; the usage counts tokens."""
        from openai import OpenAIError

        sample = Sample(time.perf_counter())
        options: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_completion_tokens": tokens,
            "temperature": 0,
            "reasoning_effort": "none",
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"ignore_eos": True},
        }
        try:
            for chunk in self._api.chat.completions.create(**options):
                delta = chunk.choices[0].delta.content if chunk.choices else None
                if delta:
                    sample.arrivals.append(time.perf_counter())
                    sample.text += delta
                if chunk.usage is not None:
                    sample.tokens = chunk.usage.completion_tokens
                    sample.prompt_tokens = chunk.usage.prompt_tokens
                    details = chunk.usage.prompt_tokens_details
                    sample.cached_tokens = (details.cached_tokens or 0) if details else 0
        except OpenAIError as error:
            sample.error = str(error)
        return sample
