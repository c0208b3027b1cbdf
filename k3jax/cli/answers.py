"""Runs jobs, and writes their answers as JSON or for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from k3jax.chat import Delta, OutputParser, ParsedOutput, collect
from k3jax.cli.jobs import Job
from k3jax.cli.terminal import ReplyPrinter, Style, visible
from k3jax.engine.generate import generate
from k3jax.engine.request import Completion, FinishReason, TokenLogprobs
from k3jax.model.params import K3Params
from k3jax.text_model import TextModel
from pallas_kernels.implementation import KernelPlan


@dataclass(frozen=True)
class Answer:
    """A job's completion, and what it says; `deltas` is empty for plain text."""

    job: Job
    completion: Completion
    deltas: tuple[Delta, ...]
    parsed: ParsedOutput


class BatchRunner:
    """Completes the jobs of one command, some at a time."""

    def __init__(
        self,
        params: K3Params,
        model: TextModel,
        jobs: Sequence[Job],
        batch: int,
        plan: KernelPlan | None = None,
    ) -> None:
        """`jobs` are all that will be run, at most `batch` of them together."""
        self._params, self._model, self._plan = params, model, plan
        self._constrained = None
        if any(job.constraint is not None for job in jobs):
            from k3jax.cli.constrained import ConstrainedRunner

            self._constrained = ConstrainedRunner(params, model, jobs, batch, plan)

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        """Complete some jobs together."""
        if self._constrained is not None and any(job.constraint is not None for job in jobs):
            completions = self._constrained.complete(jobs)
        else:
            completions = generate(
                self._params,
                self._model.config,
                [job.prompt.tokens for job in jobs],
                [job.sampling for job in jobs],
                images=[self._model.image_features(self._params, job.prompt) for job in jobs],
                plan=self._plan,
            )
        return [read(self._model, *pair) for pair in zip(jobs, completions, strict=True)]


def read(model: TextModel, job: Job, completion: Completion) -> Answer:
    """Parse a completion; the id that stopped it is no part of the text."""
    tokens = completion.tokens
    reason = finish(completion.finish_reason)
    if reason == "stop":
        tokens = tokens[:-1]
    if job.thinking is None:
        text = model.tokenizer.decode(tokens)
        return Answer(job, completion, (), ParsedOutput(content=text, finish_reason=reason))
    parser = OutputParser(model.tokenizer, job.thinking)
    deltas = [delta for token in tokens for delta in parser.push(token)]
    deltas += parser.finish(reason)
    return Answer(job, completion, tuple(deltas), collect(deltas))


def finish(reason: FinishReason) -> Literal["stop", "length"]:
    """The engine's reason in the parser's words."""
    return "stop" if reason is FinishReason.STOP else "length"


def to_json(model: TextModel, answer: Answer) -> dict[str, Any]:
    """One object: id, reasoning, content, tool_calls, finish_reason, usage, token_ids, logprobs.

    A call that the answer was cut off in is not among the calls. `logprobs` is there when asked
    for; its top holds the likeliest alternatives.
    """
    parsed, completion = answer.parsed, answer.completion
    result: dict[str, Any] = {
        "id": answer.job.id,
        "reasoning": parsed.reasoning,
        "content": parsed.content,
        "tool_calls": parsed.message().get("tool_calls", []),
        "finish_reason": parsed.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.tokens),
            "reasoning_tokens": parsed.reasoning_tokens,
        },
        "token_ids": list(completion.tokens),
    }
    if completion.logprobs is not None:
        pairs = zip(completion.tokens, completion.logprobs, strict=True)
        result["logprobs"] = [_logprobs(model, token, found) for token, found in pairs]
    return result


def show(answer: Answer, out: TextIO, style: Style) -> None:
    """Print an answer, and why it ended if not by itself."""
    if answer.job.thinking is None:
        text = visible(answer.parsed.content)
        out.write(text if text.endswith("\n") else f"{text}\n")
    printer = ReplyPrinter(out, style)
    printer.show(answer.deltas)
    printer.end()
    if answer.parsed.finish_reason == "length":
        printer.note(f"(cut off after {len(answer.completion.tokens)} tokens)")


def _logprobs(model: TextModel, token: int, found: TokenLogprobs) -> dict[str, Any]:
    return {
        **_entry(model, token, found.chosen),
        "top": [_entry(model, *pair) for pair in found.top],
    }


def _entry(model: TextModel, token: int, logprob: float) -> dict[str, Any]:
    return {"token_id": token, "token": model.tokenizer.decode([token]), "logprob": logprob}


def totals(answers: Sequence[Answer]) -> tuple[int, int]:
    """Prompt and generated tokens."""
    completions = [answer.completion for answer in answers]
    return (
        sum(completion.prompt_tokens for completion in completions),
        sum(len(completion.tokens) for completion in completions),
    )


def batches(jobs: Sequence[Job], size: int) -> Iterator[Sequence[Job]]:
    """Consecutive runs of at most `size` jobs."""
    for start in range(0, len(jobs), size):
        yield jobs[start : start + size]
