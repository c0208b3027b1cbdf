"""Continues prompts with a running service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from k3jax.engine.request import FinishReason, SamplingParams
from k3jax.text_model import Prompt
from serving.client import Client


class ServerSource:
    """The service's model, as a `TokenSource`; the id that stopped it comes last, with its reason.

    `sampling.max_tokens` beyond what the service's context leaves is cut down to that.
    `cached_tokens` are those of the latest prompt that came from the prefix cache.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.cached_tokens = 0

    def __call__(  # noqa: D102
        self, prompt: Prompt, sampling: SamplingParams
    ) -> Iterator[tuple[int, FinishReason | None]]:
        self.cached_tokens = 0
        room = self._client.info.max_context_length - len(prompt.tokens)
        if 0 < room < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        generation = self._client.generate(prompt, sampling)
        for token in generation:
            yield token, None
        self.cached_tokens = generation.cached_tokens
        if generation.stop_id is not None:
            yield generation.stop_id, FinishReason.STOP
