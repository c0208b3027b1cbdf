"""The fused decoding kernel equals the equations, writes only what it should, and has no races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementation import Implementation
from pallas_kernels.kda import reference
from pallas_kernels.kda.mixer_step import StepInputs, StepPools, StepWeights, kda_mixer_step
from tests.pallas_kernels.interpreter import no_races
from tests.pallas_kernels.kda.oracle import relative_error

EPS = 1e-5
XLA, INTERPRET = Implementation.XLA, Implementation.INTERPRET


def arguments(seed, rows=3, heads=2, key=64, slots=7, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    channels = 3 * heads * key

    def normal(*shape, scale=1.0, to=dtype):
        return jnp.asarray(scale * rng.standard_normal(shape), to)

    inputs = StepInputs(
        normal(rows, channels),
        normal(rows, heads, key, scale=4.0),
        normal(rows, heads, scale=2.0),
        normal(rows, heads, key),
    )
    weights = StepWeights(
        normal(channels, 4, scale=0.5, to=jnp.float32),
        normal(heads, scale=0.5, to=jnp.float32),
        normal(heads, key, to=jnp.float32),
        normal(key, to=jnp.float32),
    )
    pools = StepPools(normal(slots, heads, key, key, to=jnp.float32), normal(slots, 3, channels))
    return inputs, weights, pools


@functools.partial(jax.jit, static_argnames=("lower_bound", "implementation"))
def step(inputs, weights, pools, read, write, lower_bound, implementation):
    return kda_mixer_step(
        inputs, weights, pools, read, write,
        lower_bound=lower_bound, eps=EPS, implementation=implementation,
    )  # fmt: skip


def expected(inputs, weights, pools, read, lower_bound):
    fresh = jnp.asarray(read < 0)
    state = jnp.where(fresh[:, None, None, None], 0, pools.states[read])
    window = jnp.where(fresh[:, None, None], 0, pools.windows[read])
    return jax.jit(functools.partial(reference.kda_mixer_step, lower_bound=lower_bound, eps=EPS))(
        *inputs, *weights, state, window
    )


def as_slots(*slots):
    return np.array(slots, np.int32)


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
@pytest.mark.parametrize(("key", "lower_bound"), [(64, -5.0), (128, None)])
def test_a_step_equals_the_equations(runs, lower_bound, key):
    inputs, weights, pools = arguments(key, heads=1 + (key == 64), key=key)
    read, write = as_slots(4, -1, 2), as_slots(4, 0, 6)
    want_out, want_state, want_window = expected(inputs, weights, pools, read, lower_bound)
    out, new = step(inputs, weights, pools, read, write, lower_bound, runs)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(new.states[write], want_state) < 2e-6
    np.testing.assert_array_equal(new.windows[write], want_window)
    others = np.setdiff1d(np.arange(7), write)
    np.testing.assert_array_equal(new.states[others], pools.states[others])
    np.testing.assert_array_equal(new.windows[others], pools.windows[others])


def test_the_kernel_rounds_bfloat16_activations_where_xla_does():
    inputs, weights, pools = arguments(2, dtype=jnp.bfloat16)
    read, write = as_slots(0, 1, 2), as_slots(3, 1, 5)
    want_out, want = step(inputs, weights, pools, read, write, -5.0, XLA)
    out, new = step(inputs, weights, pools, read, write, -5.0, INTERPRET)
    assert out.dtype == jnp.bfloat16 and new.windows.dtype == jnp.bfloat16
    # A convolution's sum on the edge between two bfloat16 numbers may go to either.
    assert relative_error(out.astype(np.float32), want_out.astype(np.float32)) < 2**-7
    assert relative_error(new.states, want.states) < 2**-9
    np.testing.assert_array_equal(new.windows.astype(np.float32), want.windows.astype(np.float32))


@pytest.mark.parametrize("nowhere", [-1, 7])
def test_padding_rows_write_nothing_whatever_they_hold(nowhere):
    inputs, weights, pools = arguments(3)
    read, write = as_slots(-1, 4, 1), as_slots(nowhere, 4, nowhere)
    want_out, want_state, _ = expected(inputs, weights, pools, read, -5.0)
    poisoned = StepInputs(*(x.at[::2].set(jnp.nan) for x in inputs))
    out, new = step(poisoned, weights, pools, read, write, -5.0, INTERPRET)
    assert relative_error(out[1], want_out[1]) < 2e-6
    assert relative_error(new.states[4], want_state[1]) < 2e-6
    others = np.array([0, 1, 2, 3, 5, 6])
    np.testing.assert_array_equal(new.states[others], pools.states[others])
    np.testing.assert_array_equal(new.windows[others], pools.windows[others])


def test_a_fresh_row_ignores_what_the_pools_hold():
    inputs, weights, _ = arguments(4, rows=1)
    nan = StepPools(jnp.full((2, 2, 64, 64), jnp.nan), jnp.full((2, 3, 384), jnp.nan))
    read, write = as_slots(-3), as_slots(0)
    want_out, want_state, _ = expected(inputs, weights, nan, read, -5.0)
    out, new = step(inputs, weights, nan, read, write, -5.0, INTERPRET)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(new.states[:1], want_state) < 2e-6


def test_the_kernel_has_no_races():
    inputs, weights, pools = arguments(5)
    with no_races():
        jax.block_until_ready(
            step(inputs, weights, pools, as_slots(0, 1, -1), as_slots(0, 3, 2), -5.0, INTERPRET)
        )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("projected", (3, 383), "projected has shape"),
        ("gate", (3, 2, 32), "gate has shape"),
        ("beta", (2, 2), "beta has shape"),
    ],
)
def test_a_wrong_input_is_named(name, shape, message):
    inputs, weights, pools = arguments(6)
    inputs = inputs._replace(**{name: jnp.zeros(shape)})
    with pytest.raises(ValueError, match=message):
        step(inputs, weights, pools, as_slots(0, 1, 2), as_slots(0, 1, 2), -5.0, XLA)
