"""Settings that hold for every test."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Compiling dominates these tests; LLVM without optimisation takes 2.4 times less of it. Set before
# anything imports JAX.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"

# Interpreted GPU kernels wait for one another inside host callbacks, each of which holds a thread
# of XLA's pool: with a thread per core, a small machine deadlocks.
os.environ.setdefault("NPROC", "16")

# A jitted function compiles at its first example, which no per-example deadline can allow for.
settings.register_profile("compiling", deadline=None)
settings.load_profile("compiling")


MOST_MAPS = 30_000
"""Memory maps of a process at which its compiled programs are dropped; Linux allows 65,530."""


@pytest.fixture(autouse=True, scope="module")
def few_enough_programs() -> Iterator[None]:
    """Every compiled program holds memory maps, and LLVM crashes where there are no more."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.is_file() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where JAX has none."""
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip(f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}")
