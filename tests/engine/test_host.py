"""What the engine asks of compiler and allocator, and what that may not change."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.engine.host import COMPILER_OPTIONS, keep_freed_memory


def test_nan_and_infinity_keep_their_meaning():
    values = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, -0.3], jnp.float32)

    def checks(x):
        return jnp.isnan(x), jnp.isinf(x), jax.nn.softmax(jnp.where(x == 1, -jnp.inf, 0.0)), x / 3

    plain, fast = jax.jit(checks), jax.jit(checks, compiler_options=COMPILER_OPTIONS)

    for expected, found in zip(plain(values), fast(values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_functions_keep_their_precision():
    x = np.random.default_rng(0).uniform(-80, 80, 10_007).astype(np.float32)
    for function, exact in ((jnp.exp, np.exp), (jnp.tanh, np.tanh)):
        found = jax.jit(function, compiler_options=COMPILER_OPTIONS)(x)
        np.testing.assert_allclose(found, exact(x.astype(np.float64)), rtol=1e-6)


def test_keeping_freed_memory_can_be_asked_for_twice():
    assert keep_freed_memory() == keep_freed_memory()
