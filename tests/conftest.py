"""Settings that hold for every test."""

import pytest
from hypothesis import settings

# A jitted function compiles at its first example, which no per-example deadline can allow for.
settings.register_profile("compiling", deadline=None)
settings.load_profile("compiling")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where JAX has none."""
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip(f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}")
