"""Scheduler messages into the engine's requests, refusing by field name what it cannot do."""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax.engine.request import MAX_SEED, Request, SamplingParams, check_prompt

ConstraintKind = Literal["regex", "json_schema", "ebnf_grammar", "structural_tag"]

MAX_CHOICES = 128
MAX_REQUEST_ID = 256
MAX_STOP_STRINGS = 64


class FieldError(ValueError):
    """A request that cannot be run as it is; `field` is its path in the message."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class ConstraintText:
    """Structured output as it was asked for, not compiled yet."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True)
class Delivery:
    """How the answer is written, which the engine need not know.

    Attributes:
        stream: send tokens as they come; otherwise only the end of each choice.
        keep_stop: the id that stopped a choice stays in its output.
        logprobs: report log-probabilities, with this many alternatives; None reports none.
        stop: texts that end a choice, not part of its output.
    """

    stream: bool
    keep_stop: bool = False
    logprobs: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a model allows, and what it does when not told."""

    vocab_size: int
    max_context: int
    defaults: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Incoming:
    """A checked request; its constraint is still text, and its images still pixels."""

    request: Request
    delivery: Delivery
    constraint: ConstraintText | None = None


def to_request(message: pb.GenerateRequest, limits: Limits) -> Incoming:
    """Check a message and put it into the engine's words.

    Unset sampling fields take the model's defaults, an unset seed is drawn, an unset token limit
    is what the context leaves, and an empty request id is made up. Raises FieldError for a value
    out of range and for everything that this service does not offer.
    """
    _refuse_unsupported(message)
    prompt = tuple(message.tokenized.input_ids)
    _check("tokenized.input_ids", _check_prompt, prompt, limits)
    params = message.sampling_params
    logprobs = _logprobs(message)
    delivery = Delivery(
        stream=message.stream,
        keep_stop=params.no_stop_trim,
        logprobs=logprobs,
        stop=_stop_strings(params.stop),
    )
    request = Request(
        id=_request_id(message.request_id),
        prompt=prompt,
        sampling=_sampling(params, logprobs, limits, len(prompt)),
        n=_choices(params.n),
        priority=_priority(params),
    )
    return Incoming(request, delivery, _constraint(params))


def _request_id(text: str) -> str:
    if len(text) > MAX_REQUEST_ID or not text.isprintable():
        raise FieldError("request_id", f"expected at most {MAX_REQUEST_ID} printable characters")
    return text or f"k3jax-{uuid.uuid4().hex}"


def _refuse_unsupported(message: pb.GenerateRequest) -> None:
    params = message.sampling_params
    unsupported = (
        ("sampling_params.logit_bias", bool(params.logit_bias), "biases are not applied"),
        ("sampling_params.min_new_tokens", params.min_new_tokens > 0, "no minimum can be set"),
        ("token_ids_logprob", bool(message.token_ids_logprob), "only the likeliest are reported"),
        (
            "logprob_start_len",
            message.return_logprob
            and message.HasField("logprob_start_len")
            and 0 <= message.logprob_start_len < len(message.tokenized.input_ids),
            "log-probabilities of prompt tokens are not reported",
        ),
        (
            "encode_bootstrap_info",
            message.HasField("encode_bootstrap_info"),
            "there are no separate encode workers",
        ),
        (
            "kv_bootstrap_info",
            message.HasField("kv_bootstrap_info"),
            "prefill and decode run in one worker",
        ),
        ("data_parallel_rank", message.data_parallel_rank > 0, "there is one rank, 0"),
    )
    for name, found, problem in unsupported:
        if found:
            raise FieldError(name, f"not supported: {problem}")


_SCALARS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _sampling(
    params: pb.SamplingParams, logprobs: int | None, limits: Limits, prompt_tokens: int
) -> SamplingParams:
    given: dict[str, tuple[str, object]] = {
        name: (name, getattr(params, name)) for name in _SCALARS if params.HasField(name)
    }
    if params.HasField("top_k"):
        given["top_k"] = ("top_k", 0 if params.top_k == -1 else params.top_k)  # -1: all, as 0
    room = limits.max_context - prompt_tokens
    wanted = params.max_new_tokens if params.HasField("max_new_tokens") else room
    if wanted > room:
        raise FieldError(
            "sampling_params.max_new_tokens",
            f"{wanted} tokens after a prompt of {prompt_tokens} are more than the context of "
            f"{limits.max_context} holds; ask for at most {room}, or leave it out",
        )
    given["max_tokens"] = ("max_new_tokens", wanted)
    seed = params.sampling_seed if params.HasField("sampling_seed") else secrets.randbits(63)
    given["seed"] = ("sampling_seed", seed & MAX_SEED)
    given["stop_ids"] = ("stop_token_ids", tuple(params.stop_token_ids))
    given["ignore_eos"] = ("ignore_eos", params.ignore_eos)
    given["logprobs"] = ("top_logprobs_num", logprobs)
    for name, (wire_name, value) in given.items():
        where = wire_name if name == "logprobs" else f"sampling_params.{wire_name}"
        _check(where, SamplingParams, **{name: value})
    for token in params.stop_token_ids:
        if token >= limits.vocab_size:
            raise FieldError(
                "sampling_params.stop_token_ids",
                f"{token} is outside the vocabulary 0..{limits.vocab_size - 1}",
            )
    fields = {name: getattr(limits.defaults, name) for name in (*_SCALARS, "top_k")}
    return SamplingParams(**{**fields, **{name: value for name, (_, value) in given.items()}})


def _logprobs(message: pb.GenerateRequest) -> int | None:
    if not message.return_logprob:
        return None
    if message.top_logprobs_num < 0:
        raise FieldError("top_logprobs_num", f"{message.top_logprobs_num} is negative")
    return message.top_logprobs_num


def _choices(n: int) -> int:
    if n > MAX_CHOICES:
        raise FieldError("sampling_params.n", f"{n} choices, expected at most {MAX_CHOICES}")
    return n or 1


def _priority(params: pb.SamplingParams) -> int:
    """Of the knobs that have no field of their own there is one: `priority`, smaller first."""
    custom = dict(params.custom_params.items()) if params.HasField("custom_params") else {}
    value = custom.pop("priority", 0)
    for name in custom:
        raise FieldError(f"sampling_params.custom_params.{name}", "unknown; there is only priority")
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value != int(value)
    ):
        raise FieldError("sampling_params.custom_params.priority", f"{value!r} is no whole number")
    return int(value)


def _stop_strings(texts: Iterable[str]) -> tuple[str, ...]:
    stop = tuple(texts)
    if len(stop) > MAX_STOP_STRINGS or not all(stop):
        raise FieldError(
            "sampling_params.stop", f"expected at most {MAX_STOP_STRINGS} texts, none of them empty"
        )
    return stop


def _constraint(params: pb.SamplingParams) -> ConstraintText | None:
    kind = params.WhichOneof("constraint")
    return None if kind is None else ConstraintText(kind, getattr(params, kind))


def _check_prompt(prompt: tuple[int, ...], limits: Limits) -> None:
    check_prompt(
        prompt, vocab_size=limits.vocab_size, max_context=limits.max_context, name="prompt"
    )


def _check(where: str, check: object, *args: object, **kwargs: object) -> None:
    """Run a check of the library, whose words then explain the message's field."""
    assert callable(check)
    try:
        check(*args, **kwargs)
    except (ValueError, OverflowError) as error:
        raise FieldError(where, str(error)) from None
