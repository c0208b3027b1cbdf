"""What `k3jax generate` is asked to do: prompts from options or JSON lines, checked beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from k3jax.chat import ChatOptions, thinking_from_openai
from k3jax.engine.request import MAX_SEED, SamplingParams, TokenConstraint, check_stop_ids
from k3jax.text_model import Prompt, TextModel

if TYPE_CHECKING:
    from k3jax.cli.constrained import FormatCompiler

_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_PROMPTS = ("prompt", "messages", "tokens")
_OPTIONS = ("tools", "tool_choice", "response_format", "thinking", "effort")


@dataclass(frozen=True)
class Job:
    """One prompt with its settings; `thinking` None means that the reply is plain text.

    `constraint` is the form that the reply must have.
    """

    id: Any
    prompt: Prompt
    sampling: SamplingParams
    thinking: bool | None
    constraint: TokenConstraint | None = None


@dataclass(frozen=True)
class JobMaker:
    """Makes jobs out of requests, with the command's options as defaults.

    Attributes:
        sampling: of requests that say nothing else; request n adds n to the seed.
        options: thinking and effort of requests that say nothing else.
        system: text of a system message before a plain prompt.
        raw: a plain prompt is continued as it is, without chat template.
    """

    model: TextModel
    sampling: SamplingParams
    options: ChatOptions
    system: str | None = None
    raw: bool = False

    def from_text(self, text: str, images: Iterable[str] = (), *, number: int = 0) -> Job:
        """A plain prompt, behind its images. Raises ValueError as `from_request`."""
        content = [{"type": "image", "image": path} for path in images]
        request = {"prompt": text}
        if content:
            if self.raw:
                raise ValueError("a raw prompt cannot have images; they need the chat template")
            _check_prompt_text(text)
            user = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
            request = {"messages": [*self._system(), user]}
        return self.from_request(request, number)

    def from_lines(self, lines: Iterable[bytes], name: str) -> list[Job]:
        """One job per line that is not blank.

        Raises ValueError that begins with `name:line:` for the first line that is no request, or
        that says that there is none.
        """
        jobs: list[Job] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = json.loads(line, parse_constant=_no_constant)
                jobs.append(self.from_request(request, len(jobs)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}:{number}: {error}") from None
        if not jobs:
            raise ValueError(f"{name}: no requests; expected one JSON object per line")
        return jobs

    def from_request(self, request: Any, number: int) -> Job:
        """A parsed line, the one with this number counted from 0.

        Raises ValueError naming the field that is unknown, missing or wrong.
        """
        if not isinstance(request, Mapping):
            raise ValueError(f"expected a JSON object, not {type(request).__name__}")
        unknown = sorted(request.keys() - {"id", *_PROMPTS, *_OPTIONS, *_SAMPLING})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}")
        given = [name for name in _PROMPTS if name in request]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of prompt, messages and tokens, not {given or 'none'}"
            )
        sampling = self._sampling(request, number)
        thinking: bool | None = None
        constraint = None
        if given[0] == "messages" or (given[0] == "prompt" and not self.raw):
            options = self._options(request)
            prompt = self.model.chat_prompt(self._messages(request), options)
            thinking = options.thinking
            if options.response_format is not None:
                constraint = self._formats.compile(options.response_format, prompt.tokens)
        else:
            for name in _OPTIONS:
                if name in request:
                    raise ValueError(f"{name} needs the chat template, which {given[0]} goes past")
            prompt = self._plain(request)
        check_stop_ids(sampling, vocab_size=self.model.config.vocab_size, name="stop_ids")
        return Job(request.get("id", number), prompt, sampling, thinking, constraint)

    @cached_property
    def _formats(self) -> FormatCompiler:
        from k3jax.cli.constrained import FormatCompiler

        return FormatCompiler(self.model)

    def _messages(self, request: Mapping[str, Any]) -> Any:
        if "messages" in request:
            return request["messages"]
        _check_prompt_text(request["prompt"])
        return [*self._system(), {"role": "user", "content": request["prompt"]}]

    def _system(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system is not None else []

    def _plain(self, request: Mapping[str, Any]) -> Prompt:
        if "prompt" in request:
            _check_prompt_text(request["prompt"])
            return self.model.text_prompt(request["prompt"])
        tokens = request["tokens"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError("tokens must be a list of token ids")
        return self.model.token_prompt(tokens)

    def _options(self, request: Mapping[str, Any]) -> ChatOptions:
        thinking, effort = request.get("thinking"), request.get("effort")
        if isinstance(thinking, bool):
            thinking = {"type": "enabled" if thinking else "disabled"}
        if not isinstance(thinking, Mapping | None):
            raise ValueError(f"thinking must be true, false or an object, not {thinking!r}")
        options = self.options
        if thinking is not None or effort is not None:
            on, level = thinking_from_openai(effort or options.effort, thinking)
            options = replace(options, thinking=on, effort=level)
        choice = request.get("tool_choice")
        if choice == "required" or isinstance(choice, Mapping):
            raise ValueError(
                f"tool_choice {choice!r} cannot be enforced here, where it is auto or none; "
                "`k3jax serve` enforces it"
            )
        return replace(
            options,
            tools=request.get("tools"),
            tool_choice=choice,
            response_format=request.get("response_format"),
        )

    def _sampling(self, request: Mapping[str, Any], number: int) -> SamplingParams:
        given = {name: request[name] for name in _SAMPLING if name in request}
        if isinstance(given.get("stop_ids"), list):
            given["stop_ids"] = tuple(given["stop_ids"])
        seed = (self.sampling.seed + number) % (MAX_SEED + 1)
        return replace(self.sampling, **{"seed": seed, **given})


def _check_prompt_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"prompt must be a string, not {type(text).__name__}")
    if not text.strip():
        raise ValueError("prompt is empty")


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
