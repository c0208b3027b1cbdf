"""The chunked path equals the recurrence for every length, decay and key, and may be cut anywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from tests.pallas_kernels.kda.oracle import GATES, kda_inputs, recurrence, relative_error

chunk = jax.jit(kda.kda_chunk, static_argnames="chunk_size")


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 15, 16, 17, 31, 33, 37, 63, 64, 65, 101, 130])
def test_any_length_equals_the_recurrence(tokens):
    inputs = kda_inputs(np.random.default_rng(tokens), 2, tokens, 3, 16, 24)
    want_out, want_state = recurrence(*inputs)
    out, state = chunk(*inputs)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(state, want_state) < 2e-6


@pytest.mark.parametrize("chunk_size", [1, 2, 8, 16, 32, 64])
def test_any_chunk_size_equals_the_recurrence(chunk_size):
    inputs = kda_inputs(np.random.default_rng(5), 1, 67, 2, 16, 16)
    want_out, want_state = recurrence(*inputs)
    out, state = chunk(*inputs, chunk_size=chunk_size)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(state, want_state) < 2e-6


@pytest.mark.parametrize("keys", ["random", "repeated"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_any_decay_and_keys_equal_the_recurrence(gate, keys, chunk_size):
    inputs = kda_inputs(np.random.default_rng(6), 1, 130, 2, 64, 32, gate, keys)
    want_out, want_state = recurrence(*inputs)
    out, state = chunk(*inputs, chunk_size=chunk_size)
    assert relative_error(out, want_out) < 3e-6
    assert relative_error(state, want_state) < 3e-6


def test_decays_of_every_size_meet_in_one_sequence():
    rng = np.random.default_rng(7)
    parts = [kda_inputs(rng, 1, 29, 2, 32, 32, gate) for gate in GATES]
    inputs = [np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)][:5]
    want_out, want_state = recurrence(*inputs, parts[0][5])
    out, state = chunk(*inputs, parts[0][5])
    assert relative_error(out, want_out) < 3e-6
    assert relative_error(state, want_state) < 3e-6


@pytest.mark.parametrize("cuts", [(1,), (37,), (64,), (3, 4, 64, 90), (32, 64, 96)])
def test_any_partition_gives_the_same_outputs_and_state(cuts):
    *tokens, state = kda_inputs(np.random.default_rng(8), 2, 97, 3, 16, 16)
    whole_out, whole_state = chunk(*tokens, state)
    pieces = []
    for start, end in zip((0, *cuts), (*cuts, 97), strict=True):
        piece = [x[:, start:end] for x in tokens]
        out, state = chunk(*piece, state)
        pieces.append(out)
    assert relative_error(np.concatenate(pieces, axis=1), whole_out) < 2e-6
    assert relative_error(state, whole_state) < 2e-6


def test_no_initial_state_means_zeros():
    *tokens, state = kda_inputs(np.random.default_rng(9), 1, 21, 2, 16, 8)
    for got, want in zip(chunk(*tokens), chunk(*tokens, np.zeros_like(state)), strict=True):
        np.testing.assert_array_equal(got, want)


def masked(tokens, keep):
    """What a caller does to the tokens outside ``keep`` [B, T]: everything zero."""
    return [np.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0.0) for x in tokens]


def test_a_masked_row_keeps_its_state_bit_for_bit():
    *tokens, state = kda_inputs(np.random.default_rng(10), 3, 53, 2, 16, 16)
    keep = np.ones((3, 53), bool)
    keep[1] = False
    _, new_state = chunk(*masked(tokens, keep), state)
    np.testing.assert_array_equal(new_state[1], state[1])
    assert np.all(np.asarray(new_state[0]) != state[0])


@pytest.mark.parametrize("length", [1, 31, 32, 45])
def test_masked_tokens_change_neither_state_nor_outputs(length):
    *tokens, state = kda_inputs(np.random.default_rng(11), 2, 67, 2, 16, 16, "slow")
    keep = np.broadcast_to(np.arange(67) < length, (2, 67))
    out, padded_state = chunk(*masked(tokens, keep), state)
    want_out, want_state = recurrence(*(x[:, :length] for x in tokens), state)
    assert relative_error(padded_state, want_state) < 2e-6
    assert relative_error(out[:, :length], want_out) < 2e-6


def test_masked_tokens_in_front_and_between_are_skipped():
    *tokens, state = kda_inputs(np.random.default_rng(12), 1, 50, 2, 16, 16)
    keep = np.random.default_rng(13).random((1, 50)) < 0.4
    _, got = chunk(*masked(tokens, keep), state)
    _, want = recurrence(*(x[:, keep[0]] for x in tokens), state)
    assert relative_error(got, want) < 2e-6


def test_a_row_does_not_depend_on_its_neighbours():
    inputs = kda_inputs(np.random.default_rng(14), 3, 41, 2, 16, 16)
    poisoned = [x.copy() for x in inputs]
    for x in poisoned:
        x[0] = np.nan
    for got, want in zip(chunk(*poisoned), chunk(*inputs), strict=True):
        np.testing.assert_array_equal(got[1:], want[1:])


def test_outputs_do_not_depend_on_later_tokens():
    *tokens, state = kda_inputs(np.random.default_rng(15), 1, 70, 2, 16, 16)
    out, _ = chunk(*tokens, state)
    *changed, _ = kda_inputs(np.random.default_rng(16), 1, 70, 2, 16, 16)
    later = [
        np.concatenate([x[:, :44], y[:, 44:]], axis=1) for x, y in zip(tokens, changed, strict=True)
    ]
    np.testing.assert_array_equal(chunk(*later, state)[0][:, :44], out[:, :44])


@pytest.mark.parametrize("gate", ["mixed", "unbounded", "slow"])
def test_gradients_equal_those_of_the_recurrence(gate):
    inputs = kda_inputs(np.random.default_rng(17), 2, 45, 2, 16, 8, gate)
    weights = np.random.default_rng(18).standard_normal((2, 45, 2, 8)).astype(np.float32)

    def loss(operator, *arrays):
        out, state = operator(*arrays)
        return jnp.sum(out * weights) + jnp.sum(state * state)

    grad = [
        jax.jit(jax.grad(partial(loss, operator), argnums=tuple(range(6))))(*inputs)
        for operator in (kda.kda_chunk, kda.kda_recurrent)
    ]
    for got, want in zip(*grad, strict=True):
        assert relative_error(got, want) < 2e-5


def test_gradients_stay_finite_under_the_strongest_decay():
    inputs = kda_inputs(np.random.default_rng(19), 1, 45, 2, 16, 16, "frozen", "repeated")
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(kda.kda_chunk(*a)[0]), argnums=range(6)))(*inputs)
    assert all(np.all(np.isfinite(g)) for g in grads)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (1, 9, 2, 15), r"q has shape \(1, 9, 2, 15\)"),
        (1, (9, 2, 16), r"k has shape \(9, 2, 16\)"),
        (2, (1, 8, 2, 16), r"v has shape \(1, 8, 2, 16\)"),
        (3, (1, 9, 2, 1), r"log_decay has shape \(1, 9, 2, 1\)"),
        (4, (1, 9), r"beta has shape \(1, 9\)"),
        (5, (1, 2, 16, 15), r"initial_state has shape \(1, 2, 16, 15\)"),
    ],
)
def test_a_wrong_shape_is_named(position, shape, message):
    inputs = list(kda_inputs(np.random.default_rng(20), 1, 9, 2, 16, 16))
    inputs[position] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        kda.kda_chunk(*inputs)


def test_a_narrow_state_and_an_odd_chunk_are_refused():
    *tokens, state = kda_inputs(np.random.default_rng(21), 1, 9, 2, 16, 16)
    with pytest.raises(ValueError, match="initial_state is bfloat16"):
        kda.kda_chunk(*tokens, jnp.asarray(state, jnp.bfloat16))
    with pytest.raises(ValueError, match="chunk_size is 24"):
        kda.kda_chunk(*tokens, state, chunk_size=24)
