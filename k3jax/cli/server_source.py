"""Continues prompts with a running service."""

from __future__ import annotations

from collections.abc import Iterator

from k3jax.cli.conversation import TokenSource
from k3jax.engine.request import FinishReason, SamplingParams
from k3jax.text_model import Prompt
from serving.client import Client


def server_source(client: Client) -> TokenSource:
    """The service's model; the id that stopped it comes last, with its reason."""

    def source(
        prompt: Prompt, sampling: SamplingParams
    ) -> Iterator[tuple[int, FinishReason | None]]:
        generation = client.generate(prompt, sampling)
        for token in generation:
            yield token, None
        if generation.stop_id is not None:
            yield generation.stop_id, FinishReason.STOP

    return source
