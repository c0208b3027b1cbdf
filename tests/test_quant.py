"""QuantArray stands for the same numbers as the weight it came from."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.quant import QuantArray, dequantize, fake_quantize, matmul, quantize

GOLDEN = Path(__file__).parent / "golden" / "components" / "mxfp4.npz"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def weight(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("part", ["", "2"])
def test_released_packing_decodes_to_the_golden_weight(part: str):
    golden = np.load(GOLDEN)
    w = QuantArray(
        jnp.asarray(golden["packed" + part]), jnp.asarray(golden["scale" + part]), format="mxfp4"
    )
    assert w.shape == golden["weight" + part].shape
    np.testing.assert_array_equal(dequantize(w), golden["weight" + part])


@pytest.mark.parametrize("scale", [0, 1, 2, 127, 251, 252, 253, 254])
def test_every_scale_decodes_as_float32_represents_it(scale: int):
    codes = np.arange(16, dtype=np.uint8)
    packed = np.tile(codes[::2] | (codes[1::2] << 4), 2)[None]
    w = QuantArray(jnp.asarray(packed), jnp.full((1, 1), scale, jnp.uint8), format="mxfp4")
    with np.errstate(over="ignore"):
        magnitude = np.ldexp(E2M1.astype(np.float64), scale - 127).astype(np.float32)
    expected = np.tile(np.concatenate([magnitude, -magnitude]), 2)[None]
    np.testing.assert_array_equal(np.asarray(dequantize(w)).view(np.int32), expected.view(np.int32))


def test_scale_255_is_not_a_number():
    w = QuantArray(jnp.zeros((1, 16), jnp.uint8), jnp.full((1, 1), 255, jnp.uint8), format="mxfp4")
    assert np.isnan(dequantize(w)).all()


def test_mxfp4_rounds_to_the_nearest_number_ties_to_even():
    grid = np.linspace(0, 6, 32, dtype=np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    block = np.concatenate([ties, -ties, grid[14:]])[None]
    even = np.array([0, 1, 1, 2, 2, 4, 4], np.float32)
    got = np.asarray(dequantize(quantize(jnp.asarray(block), "mxfp4")))[0]
    np.testing.assert_array_equal(got[:14], np.concatenate([even, -even]))
    nearest = (
        np.abs(got[14:, None] - grid[14:, None]) <= np.abs(E2M1 - grid[14:, None]).min(1)[:, None]
    )
    assert nearest.all()


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(1.0, 125), (1.7499999, 125), (1.75, 126), (1.9999, 126), (2.0, 126), (6.0, 127), (0.0, 0)],
)
def test_mxfp4_scale_follows_the_largest_magnitude(largest: float, scale: int):
    w = jnp.zeros((1, 32)).at[0, 5].set(-largest)
    assert int(quantize(w, "mxfp4").scales[0, 0]) == scale


@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1.0, 1e20, 3e38])
def test_quantising_twice_changes_nothing(magnitude: float):
    w = weight(3, 5, 64) * magnitude
    once = dequantize(quantize(w, "mxfp4"))
    np.testing.assert_array_equal(once, dequantize(quantize(once, "mxfp4")))


def test_mxfp4_is_exact_in_bfloat16():
    w = quantize(weight(7, 96).astype(jnp.bfloat16), "mxfp4")
    exact = dequantize(w.replace(dtype=jnp.dtype("float32")))
    np.testing.assert_array_equal(dequantize(w).astype(jnp.float32), exact)


@pytest.mark.parametrize(("form", "bound"), [("mxfp4", 0.13), ("int8", 0.011)])
def test_quantised_weight_is_close_to_the_weight(form: str, bound: float):
    w = weight(3, 17, 128)
    error = jnp.linalg.norm(dequantize(quantize(w, form)) - w) / jnp.linalg.norm(w)
    assert error < bound


@pytest.mark.parametrize("form", ["mxfp4", "int8"])
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (13,), (129,)])
def test_matmul_equals_the_dequantised_product(form: str, rows: tuple[int, ...]):
    w, x = quantize(weight(37, 96), form), weight(*rows, 96, seed=1)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(w), np.float64).T
    bound = 1e-5 if form == "mxfp4" else 2e-2
    np.testing.assert_allclose(matmul(x, w), expected, rtol=0, atol=bound * np.abs(expected).max())


def test_size_and_bytes_count_the_packed_weight():
    w = quantize(weight(5, 7, 64), "mxfp4")
    assert (w.shape, w.size, w.nbytes) == ((5, 7, 64), 5 * 7 * 64, 5 * 7 * (32 + 2))


def test_quantisation_survives_tracing_and_tree_maps():
    w = weight(7, 64)
    outside, inside = quantize(w, "mxfp4"), jax.jit(lambda w: quantize(w, "mxfp4"))(w)
    assert jax.tree.structure(outside) == jax.tree.structure(inside)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), outside, inside))


def test_fake_quantisation_passes_the_gradient_through():
    w, cotangent = weight(3, 64), weight(3, 64, seed=2)
    value, pull = jax.vjp(lambda w: fake_quantize(w, "mxfp4"), w)
    np.testing.assert_array_equal(value, dequantize(quantize(w, "mxfp4")))
    np.testing.assert_array_equal(pull(cotangent)[0], cotangent)


def test_unknown_formats_and_ragged_inputs_are_refused():
    with pytest.raises(ValueError, match="int5"):
        quantize(weight(3, 64), "int5")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="48"):
        quantize(weight(3, 48), "mxfp4")
