"""The step between sublayers equals its equations, in every form, and rows do not meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementation import Implementation
from pallas_kernels.residual import residual_mix
from pallas_kernels.residual.reference import residual_mix_reference
from tests.pallas_kernels.interpreter import no_races

EPS = 1e-5
XLA, INTERPRET = Implementation.XLA, Implementation.INTERPRET


def arguments(seed, rows=3, width=256, bank=2, dtype=jnp.float32, adds=True, mixes=True):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    values = [normal(rows, width, scale=3.0) for _ in range(bank + 1)]
    y = normal(rows, width) if adds else None
    mix = (normal(width), normal(width, scale=0.3)) if mixes else None
    return values[:-1], values[-1], y, mix, normal(width)


@functools.partial(jax.jit, static_argnames="runs")
def run(bank, x, y, mix, weight, runs):
    return residual_mix(bank, x, y, mix, weight, EPS, implementation=runs)


def expected(bank, x, y, mix, weight):
    return residual_mix_reference(bank, x, y, *(mix or (None, None)), weight, EPS)


def near(got, want, bound):
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.abs(one - other).max() <= bound * np.abs(other).max()


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
@pytest.mark.parametrize(
    ("rows", "width", "bank"), [(1, 128, 0), (3, 1024, 1), (5, 384, 4), (2, 256, 8)]
)
@pytest.mark.parametrize("adds", [True, False])
def test_a_step_between_sublayers_equals_the_equations(rows, width, bank, adds, runs):
    given = arguments(rows, rows, width, bank, adds=adds)
    near(run(*given, runs), expected(*given), 3e-6)


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
def test_without_attention_residuals_it_is_the_norm_of_the_sum(runs):
    given = arguments(7, bank=0, mixes=False)
    near(run(*given, runs), expected(*given), 3e-6)


def test_the_kernel_rounds_bfloat16_where_xla_does():
    given = arguments(8, rows=7, width=512, bank=3, dtype=jnp.bfloat16)
    got, want = run(*given, INTERPRET), run(*given, XLA)
    assert got[0].dtype == got[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(np.asarray(pair[0], np.float32) for pair in (got, want)))
    # Mixture, norm and product are rounded one after another; at an edge each may go to either.
    near(got[1:], want[1:], 2**-6)
    near(got, expected(*given), 2**-6)


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
def test_poisoned_padding_rows_leave_the_others_alone(runs):
    bank, x, y, mix, weight = arguments(9, rows=5)
    assert y is not None
    want = run(bank, x, y, mix, weight, runs)
    poisoned = [v.at[1::2].set(jnp.nan) for v in bank]
    got = run(poisoned, x.at[1::2].set(jnp.inf), y.at[1::2].set(jnp.nan), mix, weight, runs)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one[::2], other[::2])


def test_scores_far_apart_do_not_overflow():
    bank, x, y, mix, weight = arguments(10)
    assert mix is not None
    steep = mix[0] * 50, mix[1] * 50
    near(run(bank, x, y, steep, weight, INTERPRET), expected(bank, x, y, steep, weight), 1e-4)


def test_the_kernel_has_no_races():
    with no_races():
        jax.block_until_ready(run(*arguments(11), INTERPRET))


def test_wrong_shapes_are_named():
    bank, x, y, mix, weight = arguments(12)
    assert y is not None
    with pytest.raises(ValueError, match=r"bank\[1\] is"):
        residual_mix([bank[0], x[:, :1]], x, y, mix, weight, EPS)
    with pytest.raises(ValueError, match="y is bfloat16"):
        residual_mix(bank, x, y.astype(jnp.bfloat16), mix, weight, EPS)
    with pytest.raises(ValueError, match="weight has shape"):
        residual_mix(bank, x, y, mix, weight[:3], EPS)


def test_gradients_of_the_xla_form_are_the_equations():
    bank, x, y, mix, weight = arguments(3, rows=4, width=24, bank=3)
    cotangents = arguments(4, rows=4, width=24, bank=1)[0][0], x

    def gradients(function):
        _, pull = jax.vjp(
            lambda *given: function(list(given[:3]), *given[3:]), *bank, x, y, mix, weight
        )
        return jax.tree.leaves(pull(cotangents))

    got = gradients(lambda *given: run(*given, XLA))
    near(got, gradients(expected), 1e-4)
