"""Choosing tokens: filters and penalties against NumPy in float64, draws against their softmax.

One shape and one jitted function serve every test, so that nothing compiles twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs, TokenHistory, penalize, sample, top_logprobs

ROWS, VOCAB = 8, 97

run_sample = jax.jit(sample)
run_penalize = jax.jit(penalize)


@jax.jit
def draw_many(logits, inputs, start):
    """64 consecutive draws of every row: `[64, row]`."""

    def one(step):
        return sample(logits, inputs.replace(generated=jnp.full((ROWS,), start + step, jnp.int32)))

    return jax.lax.map(one, jnp.arange(64))


def rows_of(*params: SamplingParams) -> SamplingInputs:
    """Inputs of `ROWS` rows: the given ones, then greedy ones."""
    padded = [*params, *[SamplingParams()] * (ROWS - len(params))]
    return SamplingInputs.pack(padded, [0] * ROWS)


def logits_of(seed: int, *, scale: float = 2.0, levels: int | None = None) -> np.ndarray:
    """Random logits; `levels` rounds them to few values, so that many tie."""
    logits = np.random.default_rng(seed).normal(0, scale, (ROWS, VOCAB))
    if levels is not None:
        logits = np.round(logits * levels / scale) * scale / levels
    return logits.astype(np.float32)


def drawn_tokens(logits, inputs, count: int) -> np.ndarray:
    """`[count, row]` tokens."""
    blocks = [draw_many(logits, inputs, jnp.int32(start)) for start in range(0, count, 64)]
    return np.concatenate([np.asarray(block) for block in blocks])[:count]


def kept_by_reference(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Which tokens of one row survive: min-p, then top-k, then top-p over what is left."""
    scaled = logits.astype(np.float64) / p.temperature
    kept = np.ones(VOCAB, bool)
    kept &= scaled >= scaled.max() + (np.log(p.min_p) if p.min_p else -np.inf)
    if p.top_k:
        edge = np.sort(np.where(kept, scaled, -np.inf))[::-1][min(p.top_k, VOCAB) - 1]
        ranked = np.sort(np.where(kept, scaled, -np.inf))[::-1][: p.top_k]
        kept &= scaled >= edge
    else:
        ranked = np.sort(scaled[kept])[::-1]
    if p.top_p < 1:
        probability = np.exp(ranked - ranked[0])
        probability /= probability.sum()
        before = np.cumsum(probability) - probability
        kept &= scaled >= ranked[max((before < p.top_p).sum(), 1) - 1]
    return kept


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1]),
    top_p=st.sampled_from([1e-12, 0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.1, 0.9]),
)
@settings(max_examples=40, deadline=None)
def test_only_tokens_that_pass_every_filter_are_drawn(seed, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(seed)
    drawn = drawn_tokens(logits, rows_of(*[params] * ROWS), 64)
    for row in range(ROWS):
        # Rounding may move a token at the edge of a filter; 1e-5 either way is allowed.
        loose = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=min(1.0, top_p * (1 + 1e-5)),
            min_p=min_p * (1 - 1e-5),
        )
        assert kept_by_reference(logits[row], loose)[drawn[:, row]].all()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_k": 12, "top_p": 0.8},
    ],
    ids=str,
)
def test_draws_are_distributed_as_the_filtered_softmax(change):
    params = SamplingParams(**{"temperature": 1.0, **change})
    logits = np.tile(logits_of(5)[:1], (ROWS, 1))
    rows = [SamplingParams(**{**vars(params), "seed": seed}) for seed in range(ROWS)]
    drawn = drawn_tokens(logits, rows_of(*rows), 1024).ravel()
    kept = kept_by_reference(logits[0], params)
    expected = np.where(kept, np.exp(logits[0].astype(np.float64) / params.temperature), 0)
    expected *= len(drawn) / expected.sum()
    observed = np.bincount(drawn, minlength=VOCAB)
    assert observed[~kept].sum() == 0
    common = expected >= 5
    chi2 = ((observed - expected) ** 2 / np.maximum(expected, 1e-9))[common].sum()
    freedom = max(common.sum() - 1, 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom), (chi2, freedom)


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    logits = logits_of(1, levels=2)
    np.testing.assert_array_equal(run_sample(logits, rows_of()), logits.argmax(-1))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-38},
        {"temperature": 5e-324},
        {"temperature": 1e-3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "top_p": 1e-7},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_settings_that_leave_one_token_are_greedy(params):
    logits = logits_of(2, scale=30.0) - 200.0
    drawn = drawn_tokens(logits, rows_of(*[SamplingParams(**params)] * ROWS), 64)
    np.testing.assert_array_equal(drawn, np.tile(logits.argmax(-1), (64, 1)))


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.02}, {"min_p": 1.0}], ids=str)
def test_tokens_that_tie_at_the_edge_of_a_filter_all_survive(params):
    logits = np.full((ROWS, VOCAB), -5.0, np.float32)
    tied = [3, 11, 50, 51, 96]
    logits[:, tied] = 2.0
    rows = [SamplingParams(temperature=1.0, seed=seed, **params) for seed in range(ROWS)]
    drawn = drawn_tokens(logits, rows_of(*rows), 64)
    assert set(drawn.ravel()) == set(tied)


def test_hottest_temperature_draws_evenly():
    rows = [SamplingParams(temperature=1e6, seed=seed) for seed in range(ROWS)]
    drawn = drawn_tokens(logits_of(3), rows_of(*rows), 640)
    assert np.bincount(drawn.ravel(), minlength=VOCAB).min() > 20  # 53 expected


def test_a_draw_depends_on_its_own_row_alone():
    logits = logits_of(4)
    mine = SamplingParams(temperature=1.0, top_p=0.9, seed=2**40 + 17)
    others = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=2, seed=9),
        SamplingParams(temperature=1.3, min_p=0.1, seed=1),
    ]
    alone = drawn_tokens(logits, rows_of(mine), 64)[:, 0]
    for place in (1, 3, 7):
        moved = logits_of(100 + place)
        moved[place] = logits[0]
        rows = [others[i % 3] for i in range(ROWS)]
        rows[place] = mine
        np.testing.assert_array_equal(drawn_tokens(moved, rows_of(*rows), 64)[:, place], alone)


def test_seeds_and_positions_give_independent_draws():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1, 5, 6, 7]
    drawn = drawn_tokens(
        logits, rows_of(*[SamplingParams(temperature=1.0, seed=s) for s in seeds]), 64
    )
    for row in range(ROWS):
        assert len(set(drawn[:, row])) > 30, "one seed repeats itself"
        for other in range(row):
            assert (drawn[:, row] == drawn[:, other]).sum() < 10, "two seeds draw alike"


def reference_penalties(logits, prompt, output, p: SamplingParams) -> np.ndarray:
    """One row, token by token, in float64."""
    result = logits.astype(np.float64)
    for token in range(VOCAB):
        count = output.count(token)
        if count or token in prompt:
            factor = p.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        if count:
            result[token] -= p.presence_penalty
        result[token] -= p.frequency_penalty * count
    return result


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_penalties_equal_their_definition(seed):
    rng = np.random.default_rng(seed)
    rows = [
        SamplingParams(
            repetition_penalty=float(rng.choice([1.0, 0.5, 1.3])),
            presence_penalty=float(rng.choice([0.0, -2.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 1.1, -0.4])),
        )
        for _ in range(ROWS)
    ]
    prompts = [rng.integers(0, VOCAB, rng.integers(0, 30)).tolist() for _ in rows]
    outputs = [rng.integers(0, VOCAB // 4, rng.integers(0, 30)).tolist() for _ in rows]
    history = TokenHistory.init(ROWS, VOCAB)
    seen, counts = np.array(history.prompt), np.array(history.output)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        seen[row, prompt] = True
        np.add.at(counts[row], output, 1)
    logits = logits_of(seed % 1000)
    found = np.asarray(run_penalize(logits, rows_of(*rows), seen, counts))
    expected = [
        reference_penalties(*row) for row in zip(logits, prompts, outputs, rows, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_row_without_penalties_keeps_its_logits_bit_for_bit():
    logits = logits_of(8)
    counts = np.full((ROWS, VOCAB), 3, np.int32)
    found = run_penalize(logits, rows_of(), counts > 0, counts)
    np.testing.assert_array_equal(found, logits)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_whole_softmax(count):
    logits = logits_of(9)
    chosen = np.arange(ROWS, dtype=np.int32)
    run = jax.jit(partial(top_logprobs, count=count))
    own, ids, values = (np.asarray(x) for x in run(logits, chosen))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    np.testing.assert_allclose(own, expected[np.arange(ROWS), chosen], rtol=1e-5)
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, -1), rtol=1e-5)
