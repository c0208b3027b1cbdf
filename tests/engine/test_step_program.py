"""What the compiled decode step may not do: copy weights or state, or fail to alias its state."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepInputs, StepState, jitted_step
from k3jax.model import params
from k3jax.state import DecodeState, Spans
from tests.helpers import wider_config

SLOTS, PAGES, PAGE = 64, 64, 16
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "u8": 1, "s8": 1, "pred": 1}


@pytest.fixture(scope="module", params=[1, 4], ids="rows={}".format)
def program(request):
    rows = request.param
    config = wider_config(
        intermediate_size=512, expert_format=None, vocab_size=512, q_lora_rank=128
    )
    state = jax.eval_shape(
        lambda: StepState(
            decode=DecodeState.init(config, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE)
        )
    )
    ints = np.zeros(rows, np.int32)
    inputs = StepInputs(
        tokens=np.zeros((rows, 1), np.int32),
        spans=Spans(ints, ints, ints, ints, np.zeros((rows, 40), np.int32)),
        lanes=ints,
        emits=np.ones(rows, np.bool_),
        sampling=SamplingInputs.pack([SamplingParams()] * rows, [0] * rows),
    )
    weights = params.abstract(config, jnp.float32)
    compiled = jitted_step.lower(weights, config, inputs, state).compile()
    return compiled.as_text(), weights, state


def nbytes(dtype: str, dims: str) -> int:
    return BYTES.get(dtype, 8) * math.prod(int(d) for d in dims.split(",") if d)


def test_every_state_leaf_is_donated_and_aliased(program):
    text, _, state = program
    alias = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert alias is not None
    assert alias.group(1).count("may-alias") + alias.group(1).count("must-alias") == len(
        jax.tree.leaves(state)
    )


@pytest.mark.parametrize("operation", ["copy", "convert", "transpose"])
def test_no_weight_or_pool_is_copied(program, operation):
    text, weights, state = program
    pools = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    matrices = [
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights) if leaf.ndim >= 2
    ]
    smallest_pool = min(pools)
    found = [
        (dtype, dims)
        for dtype, dims in re.findall(rf"= (\w+)\[([\d,]+)\]\S* {operation}\(", text)
        if nbytes(dtype, dims) >= smallest_pool or nbytes(dtype, dims) in set(matrices)
    ]
    # The decay, beta and router projections are smaller than any activation that may be copied.
    large = [(dtype, dims) for dtype, dims in found if nbytes(dtype, dims) >= 64 * 1024]
    assert not large
