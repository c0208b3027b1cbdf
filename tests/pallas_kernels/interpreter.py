"""Watching Mosaic GPU kernels in JAX's interpreter, which notes unordered memory accesses."""

from contextlib import contextmanager

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@contextmanager
def no_races():
    """Fails when an interpreted kernel inside touched memory without ordering, or none ran."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    gpu_callbacks._races = None
    yield
    assert not gpu_callbacks.get_races().races_found
