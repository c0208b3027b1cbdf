"""The released sizes: the whole step traces and lowers without weights, and its bytes are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config, k3, kimi_linear_48b
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepInputs, StepState, jitted_step
from k3jax.model import params
from k3jax.state import DecodeState, Spans

SLOTS, PAGES, PAGE = 2, 8, 64


def abstract_state(config: K3Config) -> StepState:
    def make() -> StepState:
        decode = DecodeState.init(
            config, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, dtype=jnp.bfloat16
        )
        return StepState(decode=decode)

    return jax.eval_shape(make)


@pytest.mark.parametrize("config", [k3(), kimi_linear_48b()], ids=["k3", "kimi-linear-48b"])
def test_the_full_size_step_lowers(config):
    ints = np.zeros(SLOTS, np.int32)
    inputs = StepInputs(
        tokens=np.zeros((SLOTS, 1), np.int32),
        spans=Spans(ints, ints, ints, ints, np.zeros((SLOTS, PAGES // SLOTS), np.int32)),
        lanes=ints,
        emits=np.ones(SLOTS, np.bool_),
        sampling=SamplingInputs.pack([SamplingParams()] * SLOTS, [0] * SLOTS),
    )
    weights = params.abstract(config, jnp.bfloat16)
    lowered = jitted_step.lower(weights, config, inputs, abstract_state(config))
    output, state = lowered.out_info
    assert output.tokens.shape == (SLOTS,)
    assert len(jax.tree.leaves(state)) == 2 * len(config.kda_layers) + len(config.mla_layers)


def test_the_state_of_k3_has_the_published_bytes():
    state = abstract_state(k3()).decode
    recurrent = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.recurrent))
    assert recurrent == SLOTS * 449_372_160
    assert state.bytes - recurrent == PAGES * PAGE * 27_648
