"""Completes jobs whose replies must have a form, by the engine that serving uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from k3jax.cli.jobs import Job
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import Completion, FinishReason, Request, TokenConstraint, TokenEvent
from k3jax.model.params import K3Params
from k3jax.text_model import TextModel
from pallas_kernels.implementation import KernelPlan
from serving.constraints import ConstraintCompiler
from serving.wire import ConstraintText, FieldError


class FormatCompiler:
    """Makes constraints of `response_format`."""

    def __init__(self, model: TextModel) -> None:
        self._compiler = ConstraintCompiler(model.tokenizer, model.config.eos_token_ids)

    def compile(self, response_format: Any, prompt: Sequence[int]) -> TokenConstraint | None:
        """The constraint of a reply to `prompt`; None for free text.

        Raises ValueError naming the keyword that cannot be enforced.
        """
        wanted: Any = response_format
        if isinstance(response_format, str):
            wanted = {"type": response_format}
        if wanted["type"] == "text":
            return None
        schema: Any = {"type": "object"}
        if wanted["type"] == "json_schema":
            schema = wanted["json_schema"]["schema"]
        try:
            return self._compiler.compile_now(
                ConstraintText("json_schema", json.dumps(schema)), prompt
            )
        except FieldError as error:
            raise ValueError(f"response_format: {error.problem}") from None


class ConstrainedRunner:
    """An engine with room for so many of the jobs at once."""

    def __init__(
        self,
        params: K3Params,
        model: TextModel,
        jobs: Sequence[Job],
        batch: int,
        plan: KernelPlan | None,
    ) -> None:
        wanted = max(len(job.prompt.tokens) + job.sampling.max_tokens for job in jobs)
        config = EngineConfig(
            max_rows=min(batch, len(jobs)),
            max_context=min(model.config.max_context, max(2, wanted)),
            prefix_cache=False,
        )
        self._params, self._model = params, model
        self._engine = Engine(params, model.config, config, plan=plan)

    def complete(self, jobs: Sequence[Job]) -> list[Completion]:
        """The jobs' completions, in order. Raises ValueError for a form that was lost."""
        for number, job in enumerate(jobs):
            images = self._model.image_features(self._params, job.prompt)
            request = Request(str(number), job.prompt.tokens, job.sampling, images=images)
            self._engine.submit(replace(request, constraint=job.constraint))
        events: list[list[TokenEvent]] = [[] for _ in jobs]
        for event in self._engine.run():
            events[int(event.request_id)].append(event)
        return [_completion(found) for found in events]


def _completion(events: Sequence[TokenEvent]) -> Completion:
    last = events[-1]
    if last.finish_reason is FinishReason.ERROR:
        raise ValueError(last.error)
    assert last.finish_reason is not None
    found = [event for event in events if event.token is not None]
    logprobs = tuple(event.logprobs for event in found if event.logprobs is not None)
    return Completion(
        prompt_tokens=last.prompt_tokens,
        tokens=tuple(event.token for event in found if event.token is not None),
        finish_reason=last.finish_reason,
        logprobs=logprobs or None,
    )
