"""Decoding steps equal the recurrence, and the pooled form touches only the slots it is given."""

import re

import jax
import numpy as np
import pytest

from pallas_kernels import kda
from tests.pallas_kernels.kda.oracle import kda_inputs, recurrence, relative_error

decode = jax.jit(kda.kda_decode, donate_argnames="state_pool")


def one_token(seed, rows, heads=3, key_dim=16, value_dim=24, gate="mixed"):
    *tokens, state = kda_inputs(
        np.random.default_rng(seed), rows, 1, heads, key_dim, value_dim, gate
    )
    return [x[:, 0] for x in tokens], state


@pytest.mark.parametrize("gate", ["mixed", "unbounded", "slow"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_step_equals_the_recurrence(rows, gate):
    token, state = one_token(rows, rows, gate=gate)
    want_out, want_state = recurrence(*(x[:, None] for x in token), state)
    out, new_state = jax.jit(kda.kda_step)(*token, state)
    assert relative_error(out, want_out[:, 0]) < 1e-6
    assert relative_error(new_state, want_state) < 1e-6


def test_steps_equal_a_chunk():
    *tokens, state = kda_inputs(np.random.default_rng(1), 2, 33, 2, 16, 16)
    want_out, want_state = jax.jit(kda.kda_chunk)(*tokens, state)
    step = jax.jit(kda.kda_step)
    outs = []
    for t in range(33):
        out, state = step(*(x[:, t] for x in tokens), state)
        outs.append(out)
    assert relative_error(np.stack(outs, axis=1), want_out) < 2e-6
    assert relative_error(state, want_state) < 2e-6


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_pooled_decode_reads_and_writes_the_slots_named(rows):
    rng = np.random.default_rng(rows)
    token, _ = one_token(100 + rows, rows)
    pool = rng.standard_normal((2 * rows + 3, 3, 16, 24)).astype(np.float32)
    slots = rng.permutation(len(pool))
    read, write = slots[:rows], np.concatenate([slots[:1], slots[rows + 1 : 2 * rows]])
    want_out, want_state = recurrence(*(x[:, None] for x in token), pool[read])
    out, new_pool = decode(*token, jax.numpy.asarray(pool), read, write)
    assert relative_error(out, want_out[:, 0]) < 1e-6
    assert relative_error(new_pool[write], want_state) < 1e-6
    others = np.setdiff1d(slots, write)
    np.testing.assert_array_equal(new_pool[others], pool[others])


def test_a_negative_read_slot_is_a_zero_state():
    token, _ = one_token(2, 3)
    pool = jax.numpy.full((4, 3, 16, 24), np.nan)
    want_out, want_state = kda.kda_step(*token, np.zeros((3, 3, 16, 24), np.float32))
    out, new_pool = decode(*token, pool, np.array([-1, -1, -7]), np.array([3, 0, 1]))
    assert relative_error(out, want_out) < 1e-6
    assert relative_error(new_pool[np.array([3, 0, 1])], want_state) < 1e-6


@pytest.mark.parametrize("nowhere", [-1, -4, 4, 999])
def test_a_padding_row_writes_nothing(nowhere):
    token, _ = one_token(3, 4)
    pool = np.random.default_rng(3).standard_normal((4, 3, 16, 24)).astype(np.float32)
    for x in token:
        x[::2] = np.nan
    read, write = np.array([-1, 2, 3, 0]), np.array([nowhere, 2, nowhere, 0])
    for order in (slice(None), slice(None, None, -1)):
        rows = [x[order] for x in token]
        _, new_pool = decode(*rows, jax.numpy.asarray(pool), read[order], write[order])
        np.testing.assert_array_equal(new_pool[np.array([1, 3])], pool[np.array([1, 3])])
        _, want = recurrence(*(x[1::2, None] for x in token), pool[np.array([2, 0])])
        assert relative_error(new_pool[np.array([2, 0])], want) < 1e-6


def test_a_row_does_not_depend_on_its_neighbours():
    token, _ = one_token(4, 5)
    pool = np.random.default_rng(4).standard_normal((7, 3, 16, 24)).astype(np.float32)
    slots = np.arange(5)
    out, new_pool = decode(*token, jax.numpy.asarray(pool), slots, slots)
    for x in (*token, pool):
        x[0] = np.nan
    other_out, other_pool = decode(*token, jax.numpy.asarray(pool), slots, slots)
    np.testing.assert_array_equal(other_out[1:], out[1:])
    np.testing.assert_array_equal(other_pool[1:], new_pool[1:])


@pytest.mark.parametrize("order", ["own", "one swapped", "shifted"])
@pytest.mark.parametrize(("rows", "key_dim"), [(1, 16), (2, 12), (5, 32), (8, 7)])
def test_a_pool_of_as_many_slots_as_rows(rows, key_dim, order):
    rng = np.random.default_rng(rows)
    token, _ = one_token(200 + rows, rows, key_dim=key_dim)
    pool = rng.standard_normal((rows, 3, key_dim, 24)).astype(np.float32)
    slots = np.arange(rows)
    if order == "one swapped":
        slots[[0, -1]] = slots[[-1, 0]]
    read = write = np.roll(slots, order == "shifted")
    want_out, want_state = recurrence(*(x[:, None] for x in token), pool[read])
    out, new_pool = decode(*token, jax.numpy.asarray(pool), read, write)
    assert relative_error(out, want_out[:, 0]) < 1e-6
    assert relative_error(new_pool[write], want_state) < 1e-6


def test_rows_of_a_full_pool_that_are_fresh_dropped_or_both():
    token, _ = one_token(8, 6)
    pool = np.random.default_rng(8).standard_normal((6, 3, 16, 24)).astype(np.float32)
    read = np.array([0, -1, 2, -1, -5, 5])
    write = np.array([0, 1, -1, 6, -3, 5])
    pool[[1, 3]] = np.nan  # read by none
    for x in token:
        x[[3, 4]] = np.nan  # padding
    start = np.where((read < 0)[:, None, None, None], 0, pool)
    rows = [0, 1, 2, 5]
    want_out, want_state = recurrence(*(x[rows, None] for x in token), start[rows])
    out, new_pool = decode(*token, jax.numpy.asarray(pool), read, write)
    assert relative_error(out[np.array(rows)], want_out[:, 0]) < 1e-6
    assert relative_error(new_pool[np.array([0, 1, 5])], want_state[[0, 1, 3]]) < 1e-6
    untouched = np.array([2, 3, 4])
    np.testing.assert_array_equal(new_pool[untouched], pool[untouched])


@pytest.mark.parametrize("key_dim", [16, 33, 100, 127])
def test_a_full_pool_needs_little_room_beside_it(key_dim):
    token, _ = one_token(11, 16, heads=2, key_dim=key_dim, value_dim=64)
    pool = jax.ShapeDtypeStruct((16, 2, key_dim, 64), np.float32)
    own = jax.ShapeDtypeStruct((16,), np.int32)
    memory = decode.lower(*token, pool, own, own).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.5 * 16 * 2 * key_dim * 64 * 4


@pytest.mark.parametrize(("heads", "value_dim"), [(0, 4), (1, 0)])
def test_empty_heads_and_values_give_empty_results(heads, value_dim):
    token, _ = one_token(12, 2, heads=heads, key_dim=16, value_dim=value_dim)
    pool, own = jax.numpy.zeros((2, heads, 16, value_dim)), np.arange(2)
    out, new_pool = decode(*token, pool, own, own)
    assert (out.shape, new_pool.shape) == ((2, heads, value_dim), (2, heads, 16, value_dim))


@pytest.mark.parametrize("slots", [0, 3])
def test_no_rows_leave_the_pool_alone(slots):
    token, _ = one_token(9, 0)
    pool = np.random.default_rng(9).standard_normal((slots, 3, 16, 24)).astype(np.float32)
    nobody = np.zeros(0, np.int32)
    out, new_pool = decode(*token, jax.numpy.asarray(pool), nobody, nobody)
    assert out.shape == (0, 3, 24)
    np.testing.assert_array_equal(new_pool, pool)


@pytest.mark.parametrize("slots", [3, 5])
def test_slots_may_be_constants_of_a_traced_loop(slots):
    token, _ = one_token(10, 3)
    pool = np.random.default_rng(10).standard_normal((slots, 3, 16, 24)).astype(np.float32)
    own = np.arange(3)

    def again(pool, _):
        out, pool = kda.kda_decode(*token, pool, own, own)
        return pool, out

    new_pool, outs = jax.lax.scan(again, pool, None, length=4)
    repeated = [np.repeat(x[:, None], 4, axis=1) for x in token]
    want_out, want_state = recurrence(*repeated, pool[:3])
    assert relative_error(np.moveaxis(outs, 0, 1), want_out) < 2e-6
    assert relative_error(new_pool[:3], want_state) < 2e-6


@pytest.mark.parametrize(("rows", "slots"), [(1, 97), (4, 97), (16, 97), (1, 1), (16, 16)])
def test_the_donated_pool_is_updated_in_place(rows, slots):
    token, _ = one_token(5, rows, heads=2, key_dim=16, value_dim=16)
    shape = (slots, 2, 16, 16)
    pool = jax.ShapeDtypeStruct(shape, np.float32)
    address = jax.ShapeDtypeStruct((rows,), np.int32)
    compiled = decode.lower(*token, pool, address, address).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert "input_output_alias={ {1}: (5, {}" in text
    assert not re.search(rf"= f32\[{slots},2,16,16\]\S* copy\(", text)
    assert memory.temp_size_in_bytes < max(slots, 4) * 2 * 16 * 16 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read_slots": np.zeros(3, np.int32)}, r"read_slots is int32\(3,\)"),
        ({"write_slots": np.zeros(2, np.float32)}, r"write_slots is float32\(2,\)"),
        ({"state_pool": np.zeros((4, 3, 24, 16), np.float32)}, "state_pool has shape"),
        ({"state_pool": np.zeros((4, 3, 16, 24), np.float16)}, "state_pool is float16"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    token, _ = one_token(6, 2)
    arguments = {
        "state_pool": np.zeros((4, 3, 16, 24), np.float32),
        "read_slots": np.zeros(2, np.int32),
        "write_slots": np.zeros(2, np.int32),
    }
    with pytest.raises(ValueError, match=message):
        kda.kda_decode(*token, **(arguments | change))
