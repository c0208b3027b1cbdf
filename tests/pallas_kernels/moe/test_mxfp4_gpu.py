"""The MXFP4 kernel decodes every code and scale exactly, and its experts equal the dense ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementation import Implementation
from pallas_kernels.linear import decode_mxfp4
from pallas_kernels.moe.experts_gpu import experts_by_tile, tile_rows
from pallas_kernels.moe.mxfp4_gpu import by_planes, tile_product
from pallas_kernels.moe.reference import experts_dense
from pallas_kernels.moe.routing import sort_pairs
from tests.pallas_kernels.interpreter import no_races

INTERPRET = Implementation.INTERPRET.interpret


def situ(gate, up):
    wide = 25.0 * jnp.tanh(up.astype(jnp.float32) / 25.0)
    gate = gate.astype(jnp.float32)
    return (4.0 * jnp.tanh(gate / 4.0) * jax.nn.sigmoid(gate) * wide).astype(gate.dtype)


def packed(rng, experts, outputs, inputs, low=117, high=122):
    """Every byte and a range of scales; weights of about unit size divided by √inputs."""
    values = rng.integers(0, 256, (experts, outputs, inputs // 2), np.uint8)
    scales = rng.integers(low, high, (experts, outputs, inputs // 32), np.uint8)
    return jnp.asarray(values), jnp.asarray(scales)


def relative_error(got, want):
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


@pytest.mark.parametrize(("inputs", "rows", "low", "high"), [(128, 8, 1, 60), (256, 16, 100, 180)])
def test_weights_are_decoded_exactly_and_summed_in_float32(inputs, rows, low, high):
    rng = np.random.default_rng(inputs)
    values, scales = packed(rng, 3, 64, inputs, low, high)
    x = jnp.asarray(rng.standard_normal((2, rows, inputs)), jnp.bfloat16)
    experts = jnp.asarray([2, 0], jnp.int32)
    product = functools.partial(
        tile_product, activation=None, out_dtype=jnp.dtype("float32"), interpret=INTERPRET
    )
    got = jax.jit(product)(by_planes(x), experts, values, scales)
    weights = decode_mxfp4(values, scales)[experts]
    want = jnp.einsum("tok,tmk->tom", weights, x.astype(jnp.float32), precision="highest")
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize(("tokens", "choices"), [(1, 3), (7, 2), (13, 1)])
def test_experts_by_tile_equal_the_dense_ones(tokens, choices):
    rng = np.random.default_rng(tokens)
    count, latent, width = 5, 128, 128
    gate_up, down = packed(rng, count, 2 * width, latent), packed(rng, count, latent, width)
    x = jnp.asarray(rng.standard_normal((tokens, latent)), jnp.bfloat16)
    indices = jnp.asarray([rng.permutation(count)[:choices] for _ in range(tokens)], jnp.int32)
    indices = indices.at[:, 0].set(jnp.where(jnp.arange(tokens) > 3, 4, indices[:, 0]))
    weights = jnp.asarray(rng.uniform(0.1, 1.0, (tokens, choices)), jnp.float32)
    valid = jnp.arange(tokens) != 2

    @jax.jit
    def run(x):
        routing = sort_pairs(indices, weights, valid, count)
        return experts_by_tile(x, routing, gate_up, down, situ, count, interpret=INTERPRET)

    poisoned = jnp.where(valid[:, None], x, jnp.nan)
    want = experts_dense(x.astype(jnp.float32), indices, weights, gate_up, down, situ, valid=valid)
    with no_races():
        got = run(poisoned)
    assert relative_error(got, want) < 6e-3
    assert not np.asarray(got)[~np.asarray(valid)].any()


def test_tiles_grow_with_the_pairs_per_expert():
    assert [tile_rows(pairs, 896) for pairs in (16, 1024, 7168, 32768, 10**6)] == [
        8, 8, 8, 64, 128
    ]  # fmt: skip
