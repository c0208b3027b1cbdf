"""The chunked path equals the recurrence for all lengths, decays and keys, however it is cut."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.kda import chunk_xla
from tests.pallas_kernels.kda.oracle import GATES, kda_inputs, recurrence, relative_error

chunk = jax.jit(kda.kda_chunk, static_argnames=("chunk_size", "log_decay_bound"))


def masked(tokens, keep):
    """What a caller does to the tokens outside ``keep`` [B, T]: everything zero."""
    return [np.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0.0) for x in tokens]


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 37, 130])
def test_any_length_equals_the_recurrence(tokens, bound):
    inputs = kda_inputs(np.random.default_rng(tokens), 2, tokens, 3, 16, 24)
    want_out, want_state = recurrence(*inputs)
    out, state = chunk(*inputs, log_decay_bound=bound)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(state, want_state) < 2e-6


def test_every_length_to_130_equals_the_recurrence_when_the_rest_is_masked():
    *tokens, state = kda_inputs(np.random.default_rng(4), 1, 130, 2, 16, 16, keys="repeated")
    want_out, _ = recurrence(*tokens, state)
    want_state = state
    for length in range(1, 131):
        keep = np.arange(130)[None] < length
        out, got = chunk(*masked(tokens, keep), state, log_decay_bound=-5.0)
        _, want_state = recurrence(*(x[:, length - 1 : length] for x in tokens), want_state)
        assert relative_error(out[:, :length], want_out[:, :length]) < 2e-6
        assert relative_error(got, want_state) < 2e-6


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("chunk_size", [1, 2, 8, 16, 32, 64])
def test_any_chunk_size_equals_the_recurrence(chunk_size, bound):
    inputs = kda_inputs(np.random.default_rng(5), 1, 67, 2, 16, 16)
    want_out, want_state = recurrence(*inputs)
    out, state = chunk(*inputs, chunk_size=chunk_size, log_decay_bound=bound)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(state, want_state) < 2e-6


@pytest.mark.parametrize("keys", ["random", "repeated"])
@pytest.mark.parametrize(
    ("gate", "bound"),
    [(gate, None) for gate in GATES] + [("mixed", -5.0), ("bound", -5.0), ("slow", -5.0)],
)
def test_any_decay_and_keys_equal_the_recurrence(gate, keys, bound):
    inputs = kda_inputs(np.random.default_rng(6), 1, 130, 2, 64, 32, gate, keys)
    want_out, want_state = recurrence(*inputs)
    for chunk_size in (16, 64) if bound is None else (16,):
        out, state = chunk(*inputs, chunk_size=chunk_size, log_decay_bound=bound)
        assert relative_error(out, want_out) < 3e-6
        assert relative_error(state, want_state) < 3e-6


@pytest.mark.parametrize("rows", [1, 5, 6])
@pytest.mark.parametrize("block_elements", [1, 1000, 5000])
def test_cutting_the_work_into_blocks_changes_nothing(rows, block_elements):
    inputs = kda_inputs(np.random.default_rng(7), rows, 53, 2, 16, 24)
    cut, whole = (
        partial(chunk_xla.kda_chunk, chunk_size=8, log_decay_bound=-5.0, block_elements=n)
        for n in (block_elements, 10**9)
    )
    for got, want in zip(jax.jit(cut)(*inputs), jax.jit(whole)(*inputs), strict=True):
        assert relative_error(got, want) < 1e-6


def test_no_tokens_keep_the_state():
    *tokens, state = kda_inputs(np.random.default_rng(8), 2, 0, 2, 16, 24)
    out, new_state = kda.kda_chunk(*tokens, state)
    assert out.shape == (2, 0, 2, 24)
    np.testing.assert_array_equal(new_state, state)


def test_the_operator_maps_over_a_new_axis():
    inputs = kda_inputs(np.random.default_rng(9), 6, 19, 2, 16, 16)
    split = [x.reshape(2, 3, *x.shape[1:]) for x in inputs]
    for got, want in zip(jax.jit(jax.vmap(kda.kda_chunk))(*split), chunk(*inputs), strict=True):
        assert relative_error(np.reshape(got, want.shape), want) < 1e-6


def test_decays_of_every_size_meet_in_one_sequence():
    rng = np.random.default_rng(7)
    parts = [kda_inputs(rng, 1, 29, 2, 32, 32, gate) for gate in GATES]
    inputs = [np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)][:5]
    want_out, want_state = recurrence(*inputs, parts[0][5])
    out, state = chunk(*inputs, parts[0][5])
    assert relative_error(out, want_out) < 3e-6
    assert relative_error(state, want_state) < 3e-6


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("cuts", [(1,), (37,), (16, 64), (3, 4, 64, 90)])
def test_any_partition_gives_the_same_outputs_and_state(cuts, bound):
    *tokens, state = kda_inputs(np.random.default_rng(8), 2, 97, 3, 16, 16)
    whole_out, whole_state = chunk(*tokens, state, log_decay_bound=bound)
    pieces = []
    for start, end in zip((0, *cuts), (*cuts, 97), strict=True):
        piece = [x[:, start:end] for x in tokens]
        out, state = chunk(*piece, state, log_decay_bound=bound)
        pieces.append(out)
    assert relative_error(np.concatenate(pieces, axis=1), whole_out) < 2e-6
    assert relative_error(state, whole_state) < 2e-6


def test_no_initial_state_means_zeros():
    *tokens, state = kda_inputs(np.random.default_rng(9), 1, 21, 2, 16, 8)
    for got, want in zip(chunk(*tokens), chunk(*tokens, np.zeros_like(state)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_masked_row_keeps_its_state_bit_for_bit(bound):
    *tokens, state = kda_inputs(np.random.default_rng(10), 3, 53, 2, 16, 16)
    keep = np.ones((3, 53), bool)
    keep[1] = False
    _, new_state = chunk(*masked(tokens, keep), state, log_decay_bound=bound)
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


@pytest.mark.parametrize(
    ("gate", "bound", "block_elements"),
    [("mixed", -5.0, 10**9), ("slow", -5.0, 1), ("unbounded", None, 10**9), ("mixed", None, 2000)],
)
def test_gradients_equal_those_of_the_recurrence(gate, bound, block_elements):
    inputs = kda_inputs(np.random.default_rng(17), 2, 45, 2, 16, 8, gate)
    weights = np.random.default_rng(18).standard_normal((2, 45, 2, 8)).astype(np.float32)
    chunked = partial(
        chunk_xla.kda_chunk, chunk_size=16, log_decay_bound=bound, block_elements=block_elements
    )

    def loss(operator, *arrays):
        out, state = operator(*arrays)
        return jnp.sum(out * weights) + jnp.sum(state * state)

    grad = [
        jax.jit(jax.grad(partial(loss, operator), argnums=tuple(range(6))))(*inputs)
        for operator in (chunked, kda.kda_recurrent)
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


def test_a_narrow_state_and_meaningless_settings_are_refused():
    *tokens, state = kda_inputs(np.random.default_rng(21), 1, 9, 2, 16, 16)
    with pytest.raises(ValueError, match="initial_state is bfloat16"):
        kda.kda_chunk(*tokens, jnp.asarray(state, jnp.bfloat16))
    with pytest.raises(ValueError, match="chunk_size is 24"):
        kda.kda_chunk(*tokens, state, chunk_size=24)
    for bound in (5.0, -np.inf, np.nan):
        with pytest.raises(ValueError, match="log_decay_bound is"):
            kda.kda_chunk(*tokens, state, log_decay_bound=bound)
