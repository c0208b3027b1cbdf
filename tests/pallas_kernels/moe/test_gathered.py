"""The form for devices other than a CPU equals the sum by hand, and decodes only what is used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from k3jax.quant import dequantize, quantize
from pallas_kernels.implementation import Device, plan_kernels, use_plan
from pallas_kernels.moe import experts
from pallas_kernels.moe.gathered_xla import experts_by_gather
from pallas_kernels.moe.routing import sort_pairs
from pallas_kernels.shapes import SMALL
from tests.pallas_kernels.moe.test_experts import activation, by_hand, problem

FOR_GPU = plan_kernels(SMALL, Device("gpu", "NVIDIA H200", "9.0"), measured=())


@jax.jit
def run(x, indices, weights, gate_up, down, valid):
    with use_plan(FOR_GPU):
        return experts(x, indices, weights, gate_up, down, activation, valid=valid)


@pytest.mark.parametrize(
    ("rows", "count", "form"),
    [
        (1, 11, "mxfp4"),
        (7, 11, "float32"),
        (7, 11, "int8"),
        (7, 11, "mxfp4"),
        (67, 5, "int8"),
        (131, 3, "mxfp4"),
        (131, 3, "float32"),
    ],
)
def test_experts_for_a_gpu_equal_the_sum_by_hand(rows, count, form):
    x, indices, weights, gate_up, down = problem(rows, 2, count, 32, 64)
    valid = jnp.arange(rows) % 5 != 2
    poisoned = jnp.where(valid[:, None], x, jnp.nan)
    packed = floats = (gate_up, down)
    if form != "float32":
        quantized = [quantize(w, form) for w in floats]
        packed, floats = [w.pair for w in quantized], [dequantize(w) for w in quantized]
    got = run(poisoned, indices, weights, *packed, valid)
    want = by_hand(x, indices, jnp.where(valid[:, None], weights, 0), *floats)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert (got[~valid] == 0).all()


def test_tiles_are_taken_a_few_at_a_time():
    args = problem(131, 2, 7, 32, 32)
    routing = sort_pairs(*args[1:3], jnp.ones(131, jnp.bool_), 7)
    three = functools.partial(
        experts_by_gather, activation=activation, count=7, decoded_bytes=3 * 3 * 32 * 32 * 4
    )
    got = jax.jit(three)(args[0], routing, *args[3:])
    want = by_hand(*args)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("rows", [1, 16])
def test_a_decode_step_for_a_gpu_never_decodes_all_experts(rows):
    count, width = 64, 32
    sizes = {"gate_up": (count, 2 * width, width), "down": (count, width, width)}
    packed = [quantize(jnp.zeros(shape), "mxfp4").pair for shape in sizes.values()]
    x, indices = jnp.zeros((rows, width)), jnp.zeros((rows, 2), jnp.int32)
    traced = run.trace(x, indices, jnp.ones((rows, 2)), *packed, jnp.ones(rows, jnp.bool_))
    floats = [
        var.aval.size
        for eqn in _equations(traced.jaxpr.jaxpr)
        for var in eqn.outvars
        if jnp.issubdtype(var.aval.dtype, jnp.floating)
    ]
    assert max(floats) <= 2 * rows * 2 * width * width


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)
