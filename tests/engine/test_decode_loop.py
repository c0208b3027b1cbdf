"""What the compiled decode loop may not do: decode packed weights ahead of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.engine.decode_loop import Loop, RowLimits, decode_loop
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepState
from k3jax.model import params
from k3jax.model.quantize import quantize_weights
from k3jax.state import DecodeState
from tests.helpers import wider_config

SLOTS, PAGES, PAGE = 16, 16, 16


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("weights", ["int8", "mxfp4", "bfloat16"])
def test_packed_weights_stay_packed(weights: str, rows: int):
    config = wider_config(
        intermediate_size=1024,
        num_experts=16,
        vocab_size=2048,
        expert_format="mxfp4" if weights == "mxfp4" else None,
    )
    dtype = jnp.bfloat16 if weights == "bfloat16" else jnp.float32
    tree = params.abstract(config, dtype)
    if weights == "int8":
        tree = jax.eval_shape(quantize_weights, tree)
    state = jax.eval_shape(
        lambda: StepState(
            decode=DecodeState.init(config, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE)
        )
    )
    compiled = decode_loop.lower(
        tree,
        config,
        SamplingInputs.pack([SamplingParams()] * rows, [0] * rows),
        np.zeros((rows, 4), np.int32),
        RowLimits(jnp.full((rows, 1), -1), jnp.full(rows, 8)),
        jnp.int32(8),
        Loop.init(np.zeros(rows, np.int32), np.zeros(rows, np.bool_), limit=8, top=None),
        state,
        logprobs=None,
    ).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    packed = params.nbytes(tree.layers) if weights != "mxfp4" else _expert_bytes(tree)
    assert memory.temp_size_in_bytes < packed / 5


def _expert_bytes(tree: params.K3Params) -> int:
    moes = [layer.ffn for layer in tree.layers if isinstance(layer.ffn, params.MoEParams)]
    return sum(params.nbytes((moe.gate_up, moe.down)) for moe in moes)
