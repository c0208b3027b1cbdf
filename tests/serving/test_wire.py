"""Requests from the wire: translated faithfully, or refused with the field's name."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax.engine.request import MAX_SEED, SamplingParams
from serving.wire import MAX_CHOICES, FieldError, Limits, to_request
from tests.serving.running import request

LIMITS = Limits(
    vocab_size=97,
    max_context=64,
    defaults=SamplingParams(temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.5),
)


def test_unset_fields_take_the_models_defaults_and_the_rest_of_the_context():
    incoming = to_request(request(*range(1, 12)), LIMITS)

    sampling = incoming.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.max_tokens == 64 - 11
    assert incoming.request.prompt == tuple(range(1, 12))
    assert incoming.request.n == 1


def test_zero_is_a_value_and_not_unset():
    sampling = to_request(
        request(temperature=0.0, top_k=0, max_new_tokens=0, sampling_seed=0), LIMITS
    ).request.sampling

    found = (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.seed)
    assert found == (0, 0, 0, 0)


def test_fields_arrive():
    message = request(
        request_id="r1",
        temperature=0.5,
        top_p=0.25,
        min_p=0.125,
        top_k=-1,
        presence_penalty=-1.5,
        frequency_penalty=0.75,
        repetition_penalty=1.25,
        max_new_tokens=7,
        sampling_seed=11,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        n=3,
        stop=["a", "bc"],
        no_stop_trim=True,
    )
    message.return_logprob, message.top_logprobs_num = True, 4
    message.sampling_params.custom_params.update({"priority": -2})

    incoming = to_request(message, LIMITS)

    assert incoming.request.id == "r1"
    assert (incoming.request.n, incoming.request.priority) == (3, -2)
    assert incoming.request.sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=0,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=-1.5,
        frequency_penalty=0.75,
        seed=11,
        stop_ids=(3, 4),
        ignore_eos=True,
        logprobs=4,
    )
    delivery = incoming.delivery
    assert (delivery.stream, delivery.keep_stop, delivery.logprobs) == (True, True, 4)
    assert delivery.stop == ("a", "bc")


def test_requests_without_seed_or_id_get_different_ones():
    first, second = (to_request(request(), LIMITS).request for _ in range(2))

    assert first.sampling.seed != second.sampling.seed
    assert first.id != second.id


def test_seed_of_64_bits_is_folded():
    seed = to_request(request(sampling_seed=2**64 - 1), LIMITS).request.sampling.seed

    assert seed == MAX_SEED


def test_token_limit_beyond_the_context_is_refused_with_what_is_left():
    with pytest.raises(FieldError, match="ask for at most 61") as refused:
        to_request(request(max_new_tokens=62), LIMITS)

    assert refused.value.field == "sampling_params.max_new_tokens"
    assert to_request(request(max_new_tokens=61), LIMITS).request.sampling.max_tokens == 61
    assert to_request(request(), LIMITS).request.sampling.max_tokens == 61


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling_params.temperature", {"temperature": -0.1}),
        ("sampling_params.temperature", {"temperature": math.nan}),
        ("sampling_params.top_p", {"top_p": 0.0}),
        ("sampling_params.top_p", {"top_p": 1.5}),
        ("sampling_params.top_k", {"top_k": -2}),
        ("sampling_params.min_p", {"min_p": math.inf}),
        ("sampling_params.presence_penalty", {"presence_penalty": 3.0}),
        ("sampling_params.frequency_penalty", {"frequency_penalty": -3.0}),
        ("sampling_params.repetition_penalty", {"repetition_penalty": 0.0}),
        ("sampling_params.stop_token_ids", {"stop_token_ids": [97]}),
        ("sampling_params.stop", {"stop": ["a", ""]}),
        ("sampling_params.stop", {"stop": ["a"] * 65}),
        ("sampling_params.n", {"n": MAX_CHOICES + 1}),
        ("sampling_params.logit_bias", {"logit_bias": {"5": 1.0}}),
        ("sampling_params.min_new_tokens", {"min_new_tokens": 1}),
        ("request_id", {"request_id": "x" * 257}),
        ("request_id", {"request_id": "a\nb"}),
    ],
)
def test_bad_value_is_refused_with_its_field(field: str, fields: dict[str, Any]):
    with pytest.raises(FieldError) as refused:
        to_request(request(**fields), LIMITS)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("top_logprobs_num", {"return_logprob": True, "top_logprobs_num": 21}),
        ("top_logprobs_num", {"return_logprob": True, "top_logprobs_num": -1}),
        ("logprob_start_len", {"return_logprob": True, "logprob_start_len": 0}),
        ("token_ids_logprob", {"token_ids_logprob": [1]}),
        ("data_parallel_rank", {"data_parallel_rank": 1}),
        ("encode_bootstrap_info", {"encode_bootstrap_info": pb.EncodeBootstrapInfo()}),
        ("kv_bootstrap_info", {"kv_bootstrap_info": pb.KvBootstrapInfo()}),
    ],
)
def test_what_is_not_offered_is_refused_with_its_field(field: str, fields: dict[str, Any]):
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2]), **fields)

    with pytest.raises(FieldError) as refused:
        to_request(message, LIMITS)

    assert refused.value.field == field


@pytest.mark.parametrize("prompt", [(97,), (1,) * 64, (2**32 - 1,)])
def test_prompt_that_cannot_be_run_is_refused(prompt: tuple[int, ...]):
    with pytest.raises(FieldError) as refused:
        to_request(request(*prompt), LIMITS)

    assert refused.value.field == "tokenized.input_ids"


def test_empty_prompt_is_refused():
    with pytest.raises(FieldError, match="empty"):
        to_request(pb.GenerateRequest(), LIMITS)


@pytest.mark.parametrize(
    "knobs",
    [
        {"speed": 1},
        {"priority": 0.5},
        {"priority": "high"},
        {"priority": math.inf},
        {"priority": math.nan},
    ],
)
def test_unknown_knob_is_refused_by_name(knobs: dict[str, Any]):
    message = request()
    message.sampling_params.custom_params.update(knobs)

    with pytest.raises(FieldError) as refused:
        to_request(message, LIMITS)

    assert refused.value.field == f"sampling_params.custom_params.{next(iter(knobs))}"


@given(st.binary(max_size=200))
def test_no_message_raises_anything_else(data: bytes):
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(data)
    except Exception:
        message.request_id = "unparsed"

    try:
        incoming = to_request(message, LIMITS)
    except FieldError:
        return
    assert incoming.request.prompt


NUMBERS = st.floats(width=32) | st.sampled_from([0.0, 1.0])


@given(
    scalars=st.fixed_dictionaries(
        {},
        optional={
            **{
                name: NUMBERS
                for name in (
                    "temperature",
                    "top_p",
                    "min_p",
                    "repetition_penalty",
                    "presence_penalty",
                    "frequency_penalty",
                )
            },
            "top_k": st.integers(-(2**31), 2**31 - 1),
            "max_new_tokens": st.integers(0, 2**32 - 1),
            "n": st.integers(0, 2**32 - 1),
            "sampling_seed": st.integers(0, 2**64 - 1),
            "stop": st.lists(st.text(max_size=3), max_size=3),
            "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3),
        },
    )
)
def test_any_sampling_fields_make_a_request_or_name_a_field(scalars: dict[str, Any]):
    try:
        incoming = to_request(request(**scalars), LIMITS)
    except FieldError as error:
        assert error.field.removeprefix("sampling_params.") in scalars
        return
    assert incoming.request.sampling.max_tokens <= 61
    assert 1 <= incoming.request.n <= MAX_CHOICES
