"""Verification gives the tokens of plain steps and the state that they leave."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepState
from k3jax.engine.verify import VerifyInputs, verify_step
from k3jax.state import DecodeState, Spans
from k3jax.weights.hf import load
from tests.engine.verifying import Rows, drafted
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY
from tests.random_weights import random_weights, two_layer_config

RIGHT = [0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 0]
"""Right drafts of each row; the last row is padding."""
LENGTHS = [8, 8, 5, 4, 8, 6, 7, 8, 1, 3, 0]
COUNTS = [n + 1 for n in RIGHT[:-1]] + [0]
GREEDY = SamplingParams()
KINDS = (
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.9, seed=2**40 + 1),
    SamplingParams(temperature=1.5, min_p=0.01, repetition_penalty=1.3, seed=3),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    GREEDY,
)


def golden(folder):
    config = K3Config.from_hf(folder)
    return load(folder, config, progress=False), config


def all_kda():
    config = replace(two_layer_config(), kda_layers=(0, 1), kda_num_heads=1)
    return random_weights(config, 3), config


def all_mla():
    config = replace(two_layer_config(), kda_layers=(), attn_res_block_size=None)
    return random_weights(config, 4), config


MODELS = {
    "k3-tiny": lambda: golden(K3_TINY),
    "kimi-linear-tiny": lambda: golden(KIMI_LINEAR_TINY),
    "all-kda": all_kda,
    "all-mla": all_mla,
}
SLOW = ("k3-tiny", "kimi-linear-tiny")


def rows_of(model, sampling=(GREEDY,)):
    """Rows with prompts of 1 to 7 tokens, settings taken in turn."""
    weights, config = model
    rng, count = np.random.default_rng(9), len(RIGHT)
    prompts = [rng.integers(0, config.vocab_size, 1 + n % 7).tolist() for n in range(count)]
    return Rows(weights, config, prompts, [sampling[n % len(sampling)] for n in range(count)])


@pytest.fixture(scope="module")
def tiny():
    config = two_layer_config()
    return random_weights(config), config


def assert_steps_state(rows, new, states, counts, before):
    """Slots written, and the pages of every sequence, are those of as many plain steps."""
    first = len(rows.prompts)
    for row, count in enumerate(counts):
        want = states[count].decode
        for pool, plain in zip(
            jax.tree.leaves(new.decode.recurrent), jax.tree.leaves(want.recurrent), strict=True
        ):
            expected = plain[row] if count else pool[first + row] * np.nan
            np.testing.assert_allclose(pool[first + row], expected, atol=2e-5, rtol=1e-4)
        known = len(rows.prompts[row]) + count
        for pool, plain in zip(new.decode.latent.pages, want.latent.pages, strict=True):
            mine, theirs = (
                np.asarray(x)[rows.table[row]].reshape(-1, x.shape[-1]) for x in (pool, plain)
            )
            np.testing.assert_allclose(mine[:known], theirs[:known], atol=2e-5, rtol=1e-4)
            assert np.isnan(mine[known + LENGTHS[row] - count :]).all(), "wrote past the drafts"
    for pool, old in zip(
        jax.tree.leaves(new.decode.recurrent), jax.tree.leaves(before.decode.recurrent), strict=True
    ):
        np.testing.assert_array_equal(pool[:first], old[:first])
        assert np.isnan(pool[2 * first]).all(), "wrote a slot that is nobody's"
    nobody = np.setdiff1d(np.arange(rows.table.size + 3), rows.table)
    for pool in new.decode.latent.pages:
        assert np.isnan(np.asarray(pool)[nobody]).all(), "wrote a page that is nobody's"


def check(rows, masks=None):
    first, state = rows.prefilled()
    tokens, states = rows.decoded(first, state, 8, masks)
    drafts = drafted(tokens, RIGHT, LENGTHS, rows.config.vocab_size)
    output, new = rows.verified(drafts, LENGTHS, state, write=len(RIGHT), masks=masks)
    np.testing.assert_array_equal(output.counts, COUNTS)
    for row, count in enumerate(COUNTS):
        np.testing.assert_array_equal(output.tokens[row, :count], tokens[row, 1 : count + 1])
        assert (output.tokens[row, count:] == -1).all()
        last = tokens[row, count] if count else state.last_tokens[row]
        assert new.last_tokens[row] == last
        np.testing.assert_array_equal(
            new.history.output[row], states[count].history.output[row], err_msg=f"row {row}"
        )
    assert_steps_state(rows, new, states, COUNTS, state)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MODELS]
)
def test_any_number_of_right_drafts_gives_the_tokens_and_state_of_as_many_steps(name):
    check(rows_of(MODELS[name]()))


def test_sampled_and_penalised_rows_get_the_tokens_of_plain_steps(tiny):
    check(rows_of(tiny, KINDS))


def test_masks_hold_place_by_place(tiny):
    rows = rows_of(tiny, KINDS)
    words = -(-rows.config.vocab_size // 32)
    rng = np.random.default_rng(2)
    masks = rng.integers(0, 2**32, (len(RIGHT), 8, words), np.uint32)
    masks[1] = 0xFFFFFFFF
    check(rows, masks)


def test_a_mask_that_allows_no_draft_leaves_one_token(tiny):
    rows = rows_of(tiny)
    first, state = rows.prefilled()
    tokens, _ = rows.decoded(first, state, 4)
    masks = np.repeat(rows.anything[:2, None], 4, 1)
    masks[0] = 0
    masks[0, 0, 0] = 1 << 7
    output, _ = rows.verified(tokens[:2, :4], [4, 4], state, write=2, masks=masks)
    assert output.tokens[:2, :5].tolist() == [[7, -1, -1, -1, -1], [*tokens[1, 1:5], -1]]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_stop_ends_the_row_and_nothing_behind_it_enters_the_state(tiny, place):
    rows = rows_of(tiny)
    first, state = rows.prefilled()
    tokens, states = rows.decoded(first, state, 4)
    stop = int(tokens[0, 1 + place])
    counts = [[*row[1:4], stop].index(stop) + 1 for row in tokens[:2]]
    stop_ids = {0: [stop], 1: [stop, 1]}
    output, new = rows.verified(
        tokens[:3, :4], [4, 4, 4], state, write=len(RIGHT), stop_ids=stop_ids
    )
    assert 1 not in tokens[1, 1:5]
    assert output.counts.tolist() == [*counts, 4, *[0] * (len(RIGHT) - 3)]
    assert output.tokens[0, counts[0] - 1] == stop
    for row, count in enumerate(counts):
        for pool, plain in zip(
            jax.tree.leaves(new.decode.recurrent),
            jax.tree.leaves(states[count].decode.recurrent),
            strict=True,
        ):
            np.testing.assert_allclose(pool[len(RIGHT) + row], plain[row], atol=2e-5, rtol=1e-4)


def test_latents_of_refused_drafts_are_never_seen(tiny):
    """Long refused drafts, then short right ones over the same pages: the plain tokens still."""
    rows = rows_of(tiny)
    first, state = rows.prefilled()
    tokens, _ = rows.decoded(first, state, 8)
    wrong = drafted(tokens, [0] * 3, [8] * 3, rows.config.vocab_size)
    _, new = rows.verified(wrong, [8] * 3, state, write=0)
    longer = rows._replace(prompts=[[*prompt, 0] for prompt in rows.prompts])
    output, _ = longer.verified(tokens[:3, 1:5], [4, 2, 4], new, write=0)
    for row, count in enumerate((4, 2, 4)):
        np.testing.assert_array_equal(output.tokens[row, :count], tokens[row, 2 : 2 + count])


@pytest.mark.parametrize("draft", [-1, 97, 2**31 - 1])
def test_a_draft_outside_the_vocabulary_is_never_right(tiny, draft):
    rows = rows_of(tiny)
    first, state = rows.prefilled()
    tokens, _ = rows.decoded(first, state, 1)
    output, _ = rows.verified(np.array([[first[0], draft]], np.int32), [2], state, write=1)
    assert output.tokens[0, :2].tolist() == [tokens[0, 1], -1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (2, 9)}, r"tokens have shape \(2, 9\); they must be \[row, 1 to 8\]"),
        ({"masks": (2, 4)}, r"masks have shape \(2, 4\).*want \(2, 3, 4\)"),
        ({"stop_ids": (1, 3)}, r"stop_ids have shape \(1, 3\); tokens have 2 rows"),
    ],
)
def test_an_input_of_another_shape_is_named(tiny, changes, message):
    ints = np.zeros(2, np.int32)
    inputs = VerifyInputs(
        tokens=np.zeros((2, 3), np.int32),
        spans=Spans(ints, ints, ints, ints, np.zeros((2, 1), np.int32)),
        lanes=ints,
        sampling=SamplingInputs.pack([GREEDY] * 2, [0, 0]),
    )
    inputs = inputs.replace(**{name: np.zeros(shape, np.int32) for name, shape in changes.items()})
    weights, config = tiny
    decode = DecodeState.init(config, num_slots=1, num_pages=1, page_size=4)
    with pytest.raises(ValueError, match=message):
        verify_step(weights, config, inputs, StepState(decode=decode))
