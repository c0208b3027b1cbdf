"""The static grouped form equals the dense sum, also where a lone row's pairs come unsorted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe.grouped_xla import experts_by_group
from pallas_kernels.moe.reference import experts_dense
from pallas_kernels.moe.routing import sort_pairs


@pytest.mark.parametrize("chosen", [[[3, 1, 4]], [[4, 2, 0], [1, 3, 0]]])
def test_grouped_experts_equal_the_dense_sum(chosen):
    rng = np.random.default_rng(len(chosen))
    indices = jnp.asarray(chosen, jnp.int32)
    gate_up, down = rng.standard_normal((5, 8, 4)), rng.standard_normal((5, 4, 4))
    x = jnp.asarray(rng.standard_normal((len(chosen), 4)), jnp.float32)
    weights = jnp.asarray(rng.uniform(size=indices.shape), jnp.float32)
    gate_up, down = jnp.asarray(gate_up, jnp.float32), jnp.asarray(down, jnp.float32)

    def activation(gate, up):
        return jax.nn.silu(gate) * up

    routing = sort_pairs(indices, weights, jnp.ones(len(chosen), jnp.bool_), 5)
    got = experts_by_group(x, routing, gate_up, down, activation, 5)
    want = experts_dense(x, indices, weights, gate_up, down, activation)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
