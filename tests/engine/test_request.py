"""What a caller may ask for: every field is checked when the request is made."""

import numpy as np
import pytest

from k3jax.engine.request import MAX_SEED, SamplingParams, check_prompt, check_stop_ids


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", "7"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", None),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e300),
        ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 1.0),
        ("stop_ids", (3, -1)),
        ("stop_ids", (3.0,)),
        ("stop_ids", [3]),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
    ],
)
def test_value_out_of_range_is_an_error_that_names_the_field(field, bad):
    with pytest.raises(ValueError, match=f"^{field} = .+, expected "):
        SamplingParams(**{field: bad})


def test_error_shows_value_and_rule():
    with pytest.raises(ValueError, match=r"^top_p = 1\.5, expected in \(0, 1\]$"):
        SamplingParams(top_p=1.5)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 0, "temperature": 0, "top_k": 0, "min_p": 0.0, "seed": 0, "logprobs": 0},
        {"temperature": 1e6, "top_k": 2**31 - 1, "top_p": 1, "min_p": 1, "seed": MAX_SEED},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-6},
        {"top_k": np.int64(5), "temperature": np.float32(0.5), "stop_ids": (np.int32(4),)},
        {"logprobs": 20, "max_tokens": 10**9},
    ],
)
def test_values_at_the_limits_are_accepted(limits):
    SamplingParams(**limits)


@pytest.mark.parametrize(
    ("change", "penalized"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 0.5}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_only_penalties_need_token_counts(change, penalized):
    assert SamplingParams(**change).penalized is penalized


def prompt_error(prompt) -> str:
    with pytest.raises(ValueError) as error:
        check_prompt(prompt, vocab_size=97, max_context=8, name="line 3")
    return str(error.value)


def test_prompt_that_cannot_run_is_an_error_that_says_why():
    assert prompt_error([]) == "line 3 is empty; it needs at least one token"
    assert prompt_error([1] * 8).startswith("line 3 has 8 tokens, but the model's context is 8")
    assert prompt_error([1, 97]) == (
        "line 3: token id 97 at position 1 is outside the vocabulary 0..96"
    )
    assert "token id -1 at position 0" in prompt_error([-1])


def test_longest_prompt_leaves_room_for_one_token():
    check_prompt([0, 96] * 3 + [5], vocab_size=97, max_context=8, name="prompt")


def test_stop_id_outside_the_vocabulary_is_an_error():
    check_stop_ids(SamplingParams(stop_ids=(96,)), vocab_size=97, name="prompt 0")
    with pytest.raises(
        ValueError, match=r"^prompt 0: stop id 97 is outside the vocabulary 0\.\.96$"
    ):
        check_stop_ids(SamplingParams(stop_ids=(5, 97)), vocab_size=97, name="prompt 0")
