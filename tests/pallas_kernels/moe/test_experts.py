"""Routed experts equal the sum over each row's chosen gated MLPs, in every form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.quant import dequantize, quantize
from pallas_kernels.moe import experts, experts_dense


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def problem(rows: int, choices: int, count: int, width: int, latent: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, latent))
    indices = np.stack([rng.permutation(count)[:choices] for _ in range(rows)])
    weights = rng.uniform(0.1, 1, size=(rows, choices))
    gate_up = rng.normal(size=(count, 2 * width, latent)) / np.sqrt(latent)
    down = rng.normal(size=(count, latent, width)) / np.sqrt(width)
    floats = [jnp.asarray(a, jnp.float32) for a in (x, weights, gate_up, down)]
    return floats[0], jnp.asarray(indices, jnp.int32), *floats[1:]


def by_hand(x, indices, weights, gate_up, down) -> np.ndarray:
    x, weights, gate_up, down = (np.asarray(a, np.float64) for a in (x, weights, gate_up, down))
    total = np.zeros_like(x)
    for row, chosen in enumerate(np.asarray(indices)):
        for choice, expert in enumerate(chosen):
            gate, up = np.split(gate_up[expert] @ x[row], 2)
            hidden = gate / (1 + np.exp(-gate)) * up
            total[row] += weights[row, choice] * (down[expert] @ hidden)
    return total


def near(actual: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


SHAPES = [  # rows, choices, experts, width, latent
    (1, 1, 1, 32, 32),
    (1, 4, 32, 32, 64),
    (3, 2, 7, 64, 32),
    (5, 3, 11, 32, 96),
    (8, 4, 32, 32, 64),
    (13, 4, 32, 32, 64),
    (16, 16, 61, 32, 32),
    (67, 4, 32, 32, 64),
    (131, 2, 5, 32, 32),
    (512, 4, 32, 32, 32),
    (4, 3, 9, 5, 14),  # outputs that divide into no blocks, or blocks into no runs
    (20, 4, 40, 9, 20),
    (20, 4, 40, 6, 21),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_the_sum_by_hand(shape: tuple[int, ...]):
    args = problem(*shape)
    near(jax.jit(experts, static_argnums=5)(*args, activation), by_hand(*args))


@pytest.mark.parametrize(("width", "latent"), [(128, 256), (125, 250), (126, 252), (250, 500)])
def test_few_rows_copy_no_weights(width: int, latent: int):
    args = problem(16, 4, 60, width, latent)
    options = {"xla_cpu_enable_fast_math": True}
    compiled = jax.jit(experts, static_argnums=5, compiler_options=options).lower(*args, activation)
    memory = compiled.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 3 * width * latent * 4  # of one expert


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[8]])
def test_dense_experts_equal_the_sum_by_hand(shape: tuple[int, ...]):
    args = problem(*shape)
    near(jax.jit(experts_dense, static_argnums=5)(*args, activation), by_hand(*args))


@pytest.mark.parametrize("rows", [1, 5, 16, 131])
@pytest.mark.parametrize("chosen", ["one expert for all", "one expert twice"])
def test_skewed_and_repeated_choices_count_fully(rows: int, chosen: str):
    x, indices, weights, gate_up, down = problem(rows, 2, 11, 32, 32)
    indices = jnp.full_like(indices, 7) if chosen == "one expert twice" else indices.at[:, 0].set(7)
    args = x, indices, weights, gate_up, down
    near(jax.jit(experts, static_argnums=5)(*args, activation), by_hand(*args))


@pytest.mark.parametrize("form", ["mxfp4", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 13, 67, 257])
def test_packed_experts_equal_dequantised_experts(rows: int, form: str):
    x, indices, weights, gate_up, down = problem(rows, 4, 16, 32, 64)
    packed = [quantize(w, form) for w in (gate_up, down)]
    got = jax.jit(experts, static_argnums=5)(
        x, indices, weights, packed[0].pair, packed[1].pair, activation
    )
    expected = by_hand(x, indices, weights, *map(dequantize, packed))
    bound = 2e-5 if form == "mxfp4" else 3e-2
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize("rows", [2, 7, 16, 130])
def test_padding_rows_change_nothing_and_stay_zero(rows: int):
    x, indices, weights, gate_up, down = problem(rows, 2, 11, 32, 32)
    valid = jnp.arange(rows) % 3 != 1
    x_poisoned = jnp.where(valid[:, None], x, jnp.nan)
    weights_poisoned = jnp.where(valid[:, None], weights, jnp.nan)
    run: Callable[..., jax.Array] = jax.jit(experts, static_argnums=5)
    got = run(
        x_poisoned, indices.at[1].set(-5), weights_poisoned, gate_up, down, activation, valid=valid
    )
    near(got, by_hand(x, indices, jnp.where(valid[:, None], weights, 0), gate_up, down))
    assert (got[~valid] == 0).all()


def test_experts_keep_the_dtype_of_rows_and_sum_in_float32():
    x, indices, weights, gate_up, down = problem(5, 2, 7, 32, 32)
    half = [a.astype(jnp.bfloat16) for a in (x, gate_up, down)]
    got = experts(half[0], indices, weights, half[1], half[2], activation)
    expected = by_hand(half[0], indices, weights, half[1], half[2])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [3, 67])
def test_gradients_equal_those_of_the_dense_sum(rows: int):
    x, indices, weights, gate_up, down = problem(rows, 2, 5, 32, 32)
    cotangent = problem(rows, 2, 5, 32, 32, seed=1)[0]

    def loss(form: Callable[..., jax.Array], *floats: jax.Array) -> jax.Array:
        x, weights, gate_up, down = floats
        return (form(x, indices, weights, gate_up, down, activation) * cotangent).sum()

    grads = [
        jax.jit(jax.grad(lambda *a, form=form: loss(form, *a), argnums=(0, 1, 2, 3)))(
            x, weights, gate_up, down
        )
        for form in (experts, experts_dense)
    ]
    for got, expected in zip(*grads, strict=True):
        near(got, np.asarray(expected))


def test_mismatched_shapes_are_refused():
    x, indices, weights, gate_up, down = problem(3, 2, 5, 32, 32)
    with pytest.raises(ValueError, match="down"):
        experts(x, indices, weights, gate_up, down[:4], activation)
    with pytest.raises(ValueError, match="width 32"):
        experts(x[:, :16], indices, weights, gate_up, down, activation)
    with pytest.raises(ValueError, match="indices"):
        experts(x, indices[:2], weights, gate_up, down, activation)
