"""Every form of a product equals the plain dot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import decode_mxfp4, linear, linear_int8, linear_mxfp4
from pallas_kernels.linear.linear_xla import side_by_side

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 19, 23, 24, 25, 29, 31, 32, 33, 61, 131]
SIZES = [(1, 1), (3, 7), (32, 64), (37, 129), (257, 96), (44, 7168)]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("rows", ROWS)
def test_linear_equals_the_dot(rows: int):
    for out, width in SIZES:
        x, w = normal(rows, width), normal(out, width, seed=1)
        expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        got = jax.jit(linear)(x, w)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_leading_axes_are_rows():
    x, w = normal(2, 3, 5, 32), normal(7, 32, seed=1)
    np.testing.assert_allclose(linear(x, w), x @ w.T, atol=1e-5)
    np.testing.assert_allclose(linear(x[0, 0, 0], w), w @ x[0, 0, 0], atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 131])
def test_bfloat16_is_summed_in_float32_and_rounded_once(rows: int):
    x, w = normal(rows, 256).astype(jnp.bfloat16), normal(37, 256, seed=1).astype(jnp.bfloat16)
    got = jax.jit(linear)(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("out", [37, 40])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 64])
def test_gradients_are_those_of_the_dot(rows: int, out: int):
    x, w, cotangent = normal(rows, 64), normal(out, 64, seed=1), normal(rows, out, seed=2)
    _, pull = jax.vjp(jax.jit(linear), x, w)
    dx, dw = pull(cotangent)
    np.testing.assert_allclose(dx, cotangent @ w, atol=1e-4)
    np.testing.assert_allclose(dw, cotangent.T @ x, atol=1e-4)


PACKED_SIZES = [(1, 1), (3, 7), (37, 129), (64, 1024), (6, 1031), (44, 7168)]


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 8, 9, 16, 17, 73])
def test_int8_product_is_that_of_the_decoded_weight(rows: int):
    """Numbers of rows on both sides of each bound, odd outputs, odd widths."""
    rng = np.random.default_rng(rows)
    for out, width in PACKED_SIZES:
        values = rng.integers(-128, 128, (out, width)).astype(np.int8)
        scales = rng.uniform(0.5, 2, out).astype(np.float32)
        x = rng.normal(size=(rows, width)).astype(np.float32)
        wanted = x.astype(np.float64) @ (values * scales[:, None].astype(np.float64)).T
        found = jax.jit(linear_int8)(x, values, scales)
        error = np.abs(found - wanted).max()
        assert error <= 1e-5 * np.abs(wanted).max(), (out, width)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9, 73])
def test_mxfp4_product_is_that_of_the_decoded_weight(rows: int):
    rng = np.random.default_rng(rows)
    for out, width in [(1, 32), (3, 64), (37, 96), (44, 1056)]:
        values = rng.integers(0, 256, (out, width // 2)).astype(np.uint8)
        scales = rng.integers(120, 134, (out, width // 32)).astype(np.uint8)
        x = rng.normal(size=(rows, width)).astype(np.float32)
        wanted = x.astype(np.float64) @ np.asarray(decode_mxfp4(values, scales), np.float64).T
        found = jax.jit(linear_mxfp4)(x, values, scales)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("width", [48, 1024, 2048])
@pytest.mark.parametrize("rows", [1, 4, 8, 9])
def test_nan_stays_in_its_row_of_an_int8_product(rows: int, width: int):
    values, scales = jnp.full((5, width), 3, jnp.int8), jnp.ones(5)
    x = normal(rows, width).at[-1, -1].set(jnp.nan)
    found = jax.jit(linear_int8)(x, values, scales)
    assert jnp.isnan(found[-1]).all()
    assert jnp.isfinite(found[:-1]).all()


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("width", [1, 1024, 2048])
def test_the_largest_int8_sum_is_exact(rows: int, width: int):
    values, scales = jnp.full((7, width), -128, jnp.int8), jnp.ones(7)
    found = jax.jit(linear_int8)(jnp.ones((rows, width)), values, scales)
    np.testing.assert_array_equal(found, -128.0 * width)


def test_no_rows_give_no_rows():
    values, scales = jnp.ones((7, 64), jnp.int8), jnp.ones(7)
    assert jax.jit(linear_int8)(jnp.ones((2, 0, 64)), values, scales).shape == (2, 0, 7)


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="31"):
        linear(normal(2, 31), normal(3, 32))
    with pytest.raises(ValueError, match="two axes"):
        linear(normal(2, 32), normal(2, 3, 32))
    with pytest.raises(ValueError, match="scale"):
        linear_mxfp4(normal(2, 64), jnp.zeros((3, 32), jnp.uint8), jnp.zeros((3, 1), jnp.uint8))
    with pytest.raises(ValueError, match="scales"):
        linear_int8(normal(2, 64), jnp.zeros((3, 64), jnp.int8), jnp.zeros((2,)))


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_few_rows_can_be_batched_and_differentiated_twice(rows: int):
    x, w = normal(3, rows, 64), normal(40, 64, seed=1)
    np.testing.assert_allclose(jax.vmap(linear, (0, None))(x, w), x @ w.T, atol=1e-4)

    def energy(x: jax.Array) -> jax.Array:
        return (linear(x, w) ** 2).sum()

    curvature = jax.jvp(jax.grad(energy), (x[0],), (x[1],))[1]
    np.testing.assert_allclose(curvature, 2 * x[1] @ w.T @ w, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11, 16])
def test_sums_side_by_side_read_a_part_of_a_batched_weight(rows: int):
    x, w = normal(3, rows, 48), normal(3, 50, 48, seed=1)
    got = jax.jit(lambda x, w: side_by_side(x, w[:, 13:]))(x, w)
    np.testing.assert_allclose(got, jnp.einsum("bri,boi->bro", x, w[:, 13:]), atol=1e-5)
