"""The reference operators equal the released model's, evaluated in float64."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.kda import reference
from tests.pallas_kernels.kda.oracle import kda_inputs, recurrence, relative_error, sigmoid

GOLDEN = Path(__file__).parents[2] / "golden" / "components"


@pytest.mark.parametrize("gate", ["mixed", "unbounded"])
def test_recurrence_equals_float64(gate):
    inputs = kda_inputs(np.random.default_rng(1), 2, 19, 3, 16, 24, gate)
    want_out, want_state = recurrence(*inputs)
    out, state = jax.jit(kda.kda_recurrent)(*inputs)
    assert relative_error(out, want_out) < 2e-6
    assert relative_error(state, want_state) < 2e-6


@pytest.mark.parametrize("case", ["short", "init", "step", "long"])
@pytest.mark.parametrize("operator", [kda.kda_recurrent, kda.kda_chunk])
def test_operator_equals_released_model(case, operator):
    with np.load(GOLDEN / "kda_op.npz") as golden:
        g = {name[len(case) + 1 :]: golden[name] for name in golden if name.startswith(case + "_")}
    q = kda.l2_norm(g["q"]) * g["q"].shape[-1] ** -0.5
    initial = jnp.asarray(g["init"]) if "init" in g else None
    out, state = jax.jit(operator)(q, kda.l2_norm(g["k"]), g["v"], g["g"], g["beta"], initial)
    assert relative_error(out, g["o"]) < 1e-5
    assert relative_error(state, g["state"]) < 1e-5


@pytest.mark.parametrize(
    ("name", "lower_bound"),
    [("softplus", None), ("lower_bound_m5", -5.0), ("lower_bound_m3", -3.0)],
)
def test_gate_equals_released_model(name, lower_bound):
    with np.load(GOLDEN / "kda_gate.npz") as golden:
        x, a_log, want = golden["x"], golden["A_log"], golden[name]
        dt_bias = golden["dt_bias"].reshape(x.shape[-2:])
    got = kda.log_decay_gate(x, a_log, dt_bias, lower_bound)
    assert relative_error(got, want) < 1e-6
    assert np.all(np.asarray(got) <= 0.0)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("convolve", [reference.short_conv, kda.causal_conv])
def test_convolution_equals_released_model(tokens, convolve):
    with np.load(GOLDEN / "conv.npz") as golden:
        weight = golden["weight"][:, 0]
        g = {
            n.removeprefix(f"t{tokens}_"): golden[n] for n in golden if n.startswith(f"t{tokens}_")
        }
    lengths = np.full(2, tokens)
    cached = g["cache"].transpose(0, 2, 1)[:, 1:]
    for window, suffix in ((cached, ""), (np.zeros_like(cached), "_fresh")):
        y, new_window = convolve(g["x"], window, weight, lengths)
        assert relative_error(y, g["y" + suffix]) < 1e-6
        want = g["cache_out" if suffix == "" else "cache_fresh"].transpose(0, 2, 1)[:, 1:]
        np.testing.assert_array_equal(new_window, want)


def test_l2_norm_adds_eps_to_the_sum_of_squares():
    x = np.random.default_rng(2).standard_normal((5, 3, 7)).astype(np.float32) * 1e-3
    want = x / np.sqrt(np.sum(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6)
    assert relative_error(kda.l2_norm(x), want) < 1e-6
    np.testing.assert_array_equal(kda.l2_norm(jnp.zeros((2, 7))), 0.0)


def test_gated_rms_norm_normalises_before_the_gate():
    rng = np.random.default_rng(3)
    x, gate = (rng.standard_normal((2, 5, 3, 11)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(11).astype(np.float32)
    wide = x.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5) * weight * sigmoid(gate)
    assert relative_error(kda.gated_rms_norm(x, gate, weight, 1e-5), want) < 1e-6


def test_bfloat16_inputs_are_computed_in_float32():
    inputs = kda_inputs(np.random.default_rng(4), 1, 23, 2, 16, 16)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]]
    widened = [np.asarray(x.astype(jnp.float32)) for x in narrow]
    want_out, _ = recurrence(*widened, inputs[5])
    for operator in (kda.kda_recurrent, kda.kda_chunk):
        out, state = jax.jit(operator)(*narrow, inputs[5])
        assert out.dtype == state.dtype == jnp.float32
        assert relative_error(out, want_out) < 2e-6
