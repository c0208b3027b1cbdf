"""Verified tokens equal decoding steps, and replaying any number of them gives the steps' state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.implementation import Implementation
from pallas_kernels.kda import reference
from pallas_kernels.kda.verify import Trace, kda_replay, kda_verify
from tests.pallas_kernels.interpreter import no_races
from tests.pallas_kernels.kda.oracle import kda_inputs, relative_error

XLA, INTERPRET = Implementation.XLA, Implementation.INTERPRET
BOTH = pytest.mark.parametrize("runs", [XLA, INTERPRET])


@functools.partial(jax.jit, static_argnames="runs")
def verify(tokens, lengths, pool, read, runs):
    return kda_verify(*tokens, lengths, pool, read, implementation=runs)


@functools.partial(jax.jit, static_argnames="runs")
def replay(trace, counts, pool, read, write, runs):
    return kda_replay(trace, counts, pool, read, write, implementation=runs)


def arguments(seed, lengths, tokens, heads=2, key=64, gate="mixed", keys="random", slots=7):
    """Tokens whose padding is NaN, and a pool."""
    rng = np.random.default_rng(seed)
    *inputs, _ = kda_inputs(rng, len(lengths), tokens, heads, key, key, gate, keys)
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    for x in inputs:
        x[padding] = np.nan
    pool = rng.standard_normal((slots, heads, key, key)).astype(np.float32)
    return tuple(inputs), np.array(lengths, np.int32), pool


def as_slots(*slots):
    return np.array(slots, np.int32)


@BOTH
@pytest.mark.parametrize(
    ("gate", "keys", "key"),
    [("mixed", "random", 128), ("bound", "repeated", 64), ("slow", "repeated", 64)],
)
def test_outputs_and_writes_equal_the_equations(gate, keys, key, runs):
    inputs = arguments(key, (5, 1), 5, heads=1, key=key, gate=gate, keys=keys)
    read = as_slots(3, -1)
    want_out, want_writes = jax.jit(reference.kda_verify)(*inputs[0], *inputs[1:], read)
    out, trace = verify(*inputs, read, runs)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(trace.writes, want_writes) < 2e-6
    np.testing.assert_array_equal(trace.keys, inputs[0][1])
    np.testing.assert_array_equal(trace.log_decay, inputs[0][3])


@BOTH
@pytest.mark.parametrize("key", [64, 128])
def test_replay_equals_the_equations(key, runs):
    rng = np.random.default_rng(key)
    _, k, v, log_decay, _, _ = kda_inputs(rng, 3, 4, 1, key, key)
    trace = Trace(*(jnp.asarray(x) for x in (v, k, log_decay)))
    pool = rng.standard_normal((6, 1, key, key)).astype(np.float32)
    counts, read, write = as_slots(4, 0, 1), as_slots(1, 2, -1), as_slots(1, 4, 0)
    want = jax.jit(reference.kda_replay)(*trace, counts, pool, read, write)
    new = replay(trace, counts, pool, read, write, runs)
    for slot in write:
        assert relative_error(new[slot], want[slot]) < 1e-6
    np.testing.assert_array_equal(new[4], pool[2])
    np.testing.assert_array_equal(new[np.array([2, 3, 5])], pool[np.array([2, 3, 5])])


@pytest.mark.parametrize(("runs", "tokens"), [(XLA, 1), (XLA, 8), (INTERPRET, 3)])
@pytest.mark.parametrize("keys", ["random", "repeated"])
def test_accepting_some_tokens_leaves_the_state_of_as_many_steps(runs, tokens, keys):
    inputs, lengths, pool = arguments(tokens, (tokens,), tokens, keys=keys)
    outs, trace = verify(inputs, lengths, pool, as_slots(5), runs)
    state = jnp.asarray(pool[5:6])
    step = jax.jit(kda.kda_step)
    for accepted in range(tokens + 1):
        new = replay(trace, as_slots(accepted), pool, as_slots(5), as_slots(0), runs)
        assert relative_error(new[:1], state) < 2e-6
        np.testing.assert_array_equal(new[1:], pool[1:])
        if accepted < tokens:
            out, state = step(*(x[:, accepted] for x in inputs), state)
            assert relative_error(outs[:, accepted], out) < 2e-6


@BOTH
def test_replaying_in_two_parts_is_bit_for_bit_replaying_at_once(runs):
    inputs, lengths, pool = arguments(7, (5,), 5, heads=1)
    _, trace = verify(inputs, lengths, pool, as_slots(5), runs)
    whole = replay(trace, as_slots(5), pool, as_slots(5), as_slots(0), runs)
    first = replay(trace, as_slots(2), pool, as_slots(5), as_slots(1), runs)
    rest = Trace(*(jnp.roll(x, -2, axis=1) for x in trace))
    second = replay(rest, as_slots(3), first, as_slots(1), as_slots(1), runs)
    np.testing.assert_array_equal(second[1], whole[0])


@BOTH
def test_what_a_fresh_row_and_dropped_rows_meet_does_not_matter(runs):
    inputs, lengths, pool = arguments(8, (2, 0, 2), 2, heads=1)
    read, write = as_slots(-1, 1, 2), as_slots(0, 7, -1)
    want_out, want = verify(inputs, lengths, 0 * pool, read, runs)
    pool[...] = np.nan
    pool[2] = 0
    out, trace = verify(inputs, lengths, pool, read, runs)
    np.testing.assert_array_equal(out, want_out)
    np.testing.assert_array_equal(trace.writes, want.writes)
    np.testing.assert_array_equal(out[1], 0.0)
    new = replay(trace, as_slots(2, 0, 2), pool, read, write, runs)
    assert np.all(np.isfinite(new[0]))
    np.testing.assert_array_equal(new[1:], pool[1:])


def test_the_kernels_have_no_races():
    inputs, lengths, pool = arguments(9, (2, 1), 2)
    with no_races():
        out, trace = verify(inputs, lengths, pool, as_slots(0, 1), INTERPRET)
        new = replay(trace, lengths, pool, as_slots(0, 1), as_slots(0, 2), INTERPRET)
        jax.block_until_ready((out, new))


def test_the_donated_pool_is_updated_in_place():
    trace = Trace(*(np.zeros((2, 4, 2, 16), np.float32) for _ in range(3)))
    pool = jax.ShapeDtypeStruct((97, 2, 16, 16), np.float32)
    slots = as_slots(1, 2)
    compiled = (
        jax.jit(kda_replay, donate_argnums=2).lower(trace, slots, pool, slots, slots).compile()
    )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert "input_output_alias={ {}: (4, {}" in text
    assert memory.temp_size_in_bytes < 97 * 2 * 16 * 16 * 4


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (1, 3, 2, 8), r"q has shape \(1, 3, 2, 8\)"),
        (1, (1, 9, 2, 16), r"k has shape \(1, 9, 2, 16\); it must be \[B, 1 to 8, H, K\]"),
        (2, (1, 4, 2, 16), r"v has shape \(1, 4, 2, 16\)"),
        (4, (1, 3), r"beta has shape \(1, 3\)"),
        (5, (1,), r"lengths is float32\(1,\)"),
        (6, (3, 2, 8, 16), r"state_pool is float32\(3, 2, 8, 16\)"),
    ],
)
def test_a_wrong_argument_is_named(position, shape, message):
    tokens, lengths, pool = arguments(10, (3,), 3, key=16)
    given = [*tokens, lengths, pool, as_slots(0)]
    given[position] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        kda_verify(*given)
    trace = Trace(tokens[2], tokens[1], tokens[3])
    with pytest.raises(ValueError, match=r"counts is int32\(2,\)"):
        kda_replay(trace, as_slots(1, 2), jnp.asarray(pool), as_slots(0), as_slots(0))
