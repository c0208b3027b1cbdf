"""The whole forward pass: released reference values, and the laws of state over spans."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.config import K3Config
from k3jax.model import backbone, params
from k3jax.state import DecodeState, Spans
from k3jax.weights.hf import load
from scripts.compare_logits import compare
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY, tiny_config

PAGE = 4
PAGES = 12


@pytest.mark.parametrize("folder", [K3_TINY, KIMI_LINEAR_TINY], ids=lambda path: path.name)
def test_logits_layers_decode_and_states_match_the_released_model(folder):
    config = K3Config.from_hf(folder)
    with np.load(folder / "text.npz") as archive:
        expected = {name: archive[name] for name in archive.files}
    results = compare(load(folder, config, progress=False), config, expected)
    assert len(results) == 6
    assert all(result.ok for result in results), results


def test_bfloat16_agrees_as_often_as_the_released_bfloat16_run():
    config = K3Config.from_hf(K3_TINY)
    weights = load(K3_TINY, config, dtype=jnp.bfloat16, progress=False)
    with np.load(K3_TINY / "text.npz") as archive:
        tokens, exact = archive["input_ids"], archive["logits"]
        released = archive["logits_hf_bf16"]
    found = jax.jit(backbone.forward_logits, static_argnums=1)(weights, config, tokens)
    assert found.dtype == jnp.bfloat16
    agreement = np.mean(np.argmax(np.asarray(found, np.float32), -1) == exact.argmax(-1))
    own = np.mean(released.argmax(-1) == exact.argmax(-1))
    assert agreement >= own - 0.1


@pytest.fixture(scope="module")
def tiny():
    config = tiny_config()
    return config, params.init(config, jax.random.key(7))


@partial(jax.jit, static_argnames="config")
def run_span(weights, config, tokens, spans, state):
    hidden, _, state = backbone.forward(
        weights, config, backbone.embed(weights, tokens), spans, state
    )
    return backbone.logits(weights, hidden), state


def poisoned_state(config):
    """Pools full of NaN: whatever a fresh sequence reads before writing shows."""
    state = DecodeState.init(config, num_slots=5, num_pages=PAGES + 3, page_size=PAGE)
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state)


def run_partition(weights, config, tokens, lengths, read_other=False):
    """Logits of one sequence computed in the given spans, and the state that is left."""
    state = poisoned_state(config)
    table = np.random.default_rng(3).permutation(PAGES)[None].astype(np.int32)
    outputs, position, slot = [], 0, -1
    for length in lengths:
        width = 1 if length == 1 else 8 if length <= 8 else 48
        padded = np.full((1, width), 3, np.int32)
        padded[0, :length] = tokens[position : position + length]
        write = (slot + 1) % 5 if read_other else 2
        spans = Spans(
            lengths=np.array([length], np.int32),
            starts=np.array([position], np.int32),
            read_slots=np.array([slot], np.int32),
            write_slots=np.array([write], np.int32),
            page_table=table,
        )
        logits, state = run_span(weights, config, padded, spans, state)
        outputs.append(np.asarray(logits)[0, :length])
        position, slot = position + length, write
    left = [np.asarray(pool)[slot] for pool in jax.tree.leaves(state.recurrent)]
    cached = [np.asarray(pool)[table[0]].reshape(-1, pool.shape[-1]) for pool in state.latent.pages]
    return np.concatenate(outputs), left + [rows[:position] for rows in cached]


@given(data=st.data(), length=st.sampled_from([1, 2, 17, 31, 48]), other=st.booleans())
@settings(max_examples=12, deadline=None)
def test_any_partition_of_a_prompt_gives_the_same_logits_and_state(tiny, data, length, other):
    config, weights = tiny
    tokens = np.random.default_rng(length).integers(0, config.vocab_size, length)
    spans, remaining = [], length
    while remaining:
        spans.append(data.draw(st.integers(1, remaining), label="span"))
        remaining -= spans[-1]
    expected, expected_state = run_partition(weights, config, tokens, [length])
    found, state = run_partition(weights, config, tokens, spans, read_other=other)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-4)
    for a, b in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


def test_padding_rows_and_tokens_change_nothing(tiny):
    config, weights = tiny
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 8)).astype(np.int32)
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    state = poisoned_state(config)
    spans = Spans(
        lengths=np.array([5, 0, 8], np.int32),
        starts=np.zeros(3, np.int32),
        read_slots=np.full(3, -1, np.int32),
        write_slots=np.array([0, 1, 3], np.int32),
        page_table=table,
    )
    logits, after = run_span(weights, config, tokens, spans, state)
    alone = backbone.forward_logits(weights, config, tokens[:1, :5])
    np.testing.assert_allclose(logits[0, :5], alone[0], atol=2e-5, rtol=1e-4)
    for pool in jax.tree.leaves(after.recurrent):
        assert np.isnan(pool[1]).all() and np.isnan(pool[2]).all(), "padding wrote a slot"
        assert not np.isnan(pool[0]).any() and not np.isnan(pool[3]).any()
    for pool in after.latent.pages:
        assert np.isnan(pool[4:8]).all(), "a padding row wrote a page"
        assert np.isnan(pool[1, 1:]).all(), "a padding token wrote a page"


def test_a_changed_token_changes_nothing_before_it(tiny):
    config, weights = tiny
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (1, 37)).astype(np.int32)
    changed = tokens.copy()
    changed[0, 23] = (changed[0, 23] + 1) % config.vocab_size
    run = jax.jit(backbone.forward_logits, static_argnums=1)
    before, after = run(weights, config, tokens), run(weights, config, changed)
    # Not bit for bit: the experts' product takes its form from the fullest expert of all tokens.
    np.testing.assert_allclose(before[:, :23], after[:, :23], atol=1e-5)
    assert np.abs(before[:, 23:] - after[:, 23:]).max(-1).min() > 1e-4


def test_a_state_is_remembered_over_the_whole_sequence(tiny):
    """The gates are slow enough that other tests of this file could see a lost state."""
    config, weights = tiny
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (1, 48)).astype(np.int32)
    changed = tokens.copy()
    changed[0, 0] = (changed[0, 0] + 1) % config.vocab_size
    run = jax.jit(backbone.forward_logits, static_argnums=1)
    gap = np.abs(run(weights, config, tokens) - run(weights, config, changed))
    assert gap[0, -1].max() > 1e-3
