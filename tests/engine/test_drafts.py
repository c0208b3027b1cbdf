"""`generate` gives the same tokens with any drafts as without."""

import numpy as np
import pytest

import k3jax
from k3jax.engine.drafts import prompt_lookup
from k3jax.engine.request import SamplingParams
from tests.random_weights import random_weights, two_layer_config

SETTINGS = [
    SamplingParams(max_tokens=21),
    SamplingParams(max_tokens=13, temperature=1.2, top_p=0.9, seed=5),
    SamplingParams(max_tokens=17, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=0),
]
PROMPTS = [[5, 6, 7], [8], list(range(30, 50)), [9, 9], [1]]


@pytest.fixture(scope="module")
def model():
    config = two_layer_config()
    return random_weights(config), config


@pytest.fixture(scope="module")
def plain(model):
    return k3jax.generate(*model, PROMPTS, SETTINGS)


class Oracle:
    """Knows what comes, and says it with some tokens wrong; notes how much it was asked."""

    def __init__(self, completions, wrong):
        self.known = [[*p, *c.tokens] for p, c in zip(PROMPTS, completions, strict=True)]
        self.rng, self.wrong, self.calls = np.random.default_rng(1), wrong, 0

    def __call__(self, tokens, limit):
        self.calls += 1
        (whole,) = [known for known in self.known if known[: len(tokens)] == list(tokens)]
        ahead = whole[len(tokens) : len(tokens) + limit]
        ahead = ahead[: self.rng.integers(len(ahead) + 1)] if self.wrong else ahead
        return [(t + 1) % 97 if self.rng.random() < self.wrong else t for t in ahead]


@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_drafts_change_nothing_but_the_number_of_steps(model, plain, wrong):
    oracle = Oracle(plain, wrong)
    assert k3jax.generate(*model, PROMPTS, SETTINGS, draft=oracle) == plain
    if not wrong:
        # 20, 12 and 16 tokens after the first, 8 a step; the last token of a row needs no draft.
        assert oracle.calls == 3 + 2 + 2


def test_a_stop_inside_right_drafts_ends_the_row(model, plain):
    stop = plain[0].tokens[5]
    setting = SamplingParams(max_tokens=21, stop_ids=(stop,))
    [want] = k3jax.generate(*model, PROMPTS[:1], setting)
    [got] = k3jax.generate(*model, PROMPTS[:1], setting, draft=Oracle(plain, 0.0))
    assert got == want
    assert got.tokens[-1] == stop


def test_prompt_lookup_continues_the_latest_like_passage():
    text = [1, 2, 3, 4, 9, 3, 4, 7, 8, 3, 4]
    assert prompt_lookup(text, 3) == [7, 8, 3]
    assert prompt_lookup([1, 2, 3, 4, 5, 2, 4, 5, 6, 2, 3, 4, 5], 2) == [2, 4]
    assert prompt_lookup([1, 2, 3], 7) == []
    assert prompt_lookup([1, 1, 1, 1, 1], 7) == [1]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ([1] * 8, "the draft for prompt 0 has 8 tokens, at most 7"),
        ([1, 97], r"the draft for prompt 0 holds 97; the vocabulary is 0\.\.96"),
    ],
)
def test_a_bad_draft_is_named(model, draft, message):
    with pytest.raises(ValueError, match=message):
        k3jax.generate(*model, PROMPTS[:1], SETTINGS[0], draft=lambda tokens, limit: draft)


def test_drafts_and_log_probabilities_exclude_each_other(model):
    setting = SamplingParams(max_tokens=2, logprobs=1)
    with pytest.raises(ValueError, match="prompt 0 asks for log-probabilities"):
        k3jax.generate(*model, PROMPTS[:1], setting, draft=prompt_lookup)
