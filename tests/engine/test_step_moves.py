"""The decode step at K3's sizes copies, converts and transposes no more than is known.

Counted in the optimised program of a slice of K3, arrays above 1 MiB; nothing is allocated.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from k3jax import config as configs
from k3jax.model import params
from scripts.gpu.model_slice import StepProgram, new_state, step_inputs
from scripts.gpu.program_text import large_moves
from scripts.gpu.step_cases import small_slice

ROOT = Path(__file__).parents[2]

KNOWN_ON_CPU = {1: 0, 16: 4}
"""By rows. At 16: the logits out of the branch without masks, two arrays of a draw's random bits,
and what attention has mixed, turned to heads first; no weight and no state."""


def in_float32(tree):
    def leaf(spec):
        dtype = jnp.float32 if spec.dtype == jnp.bfloat16 else spec.dtype
        return jax.ShapeDtypeStruct(spec.shape, dtype)

    return jax.tree.map(leaf, tree)


@pytest.mark.parametrize("rows", KNOWN_ON_CPU)
def test_a_decode_step_on_cpu_moves_no_more_than_is_known(rows):
    config = small_slice(configs.k3())
    inputs = step_inputs(config, rows, 8192, 1, 64)
    state = in_float32(jax.eval_shape(lambda: new_state(config, inputs, 64)))
    weights = params.abstract(config, jnp.float32)
    compiled = StepProgram(config, None).trace(weights, inputs, state).lower().compile()
    moves = large_moves(compiled.as_text())
    assert len(moves) <= KNOWN_ON_CPU[rows], moves


def test_a_decode_step_for_cuda_moves_no_more_than_is_known():
    missing = cuda_plugin_missing()
    if missing:
        pytest.skip(f'{missing} is not installed: pip install ".[cuda-compile]"')
    command = ["scripts/check_cuda_compile.py", "--only", "step", "--rows", "1", "--span", "0"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def cuda_plugin_missing() -> str | None:
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return name
    return None
