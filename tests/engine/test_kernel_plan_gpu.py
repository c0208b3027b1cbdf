"""The engine plans its kernels once, obeys what was asked for, and its steps run under the plan."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import k3jax
from k3jax.engine.kernel_plan import kernel_plan
from k3jax.model.params import abstract, init
from pallas_kernels.implementation import Device, Implementation
from tests.helpers import tiny_config
from tests.pallas_kernels.interpreter import no_races

PROMPT = tuple(range(5, 18))
SAMPLING = k3jax.SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(scope="module")
def nano():
    return k3jax.load_model(k3jax.bundled_model())


def engine(model, **kernels):
    sizes = k3jax.EngineConfig(max_rows=1, max_context=64, token_budget=16, kernels=kernels or None)
    return k3jax.Engine(*model, sizes)


def greedy_tokens(engine):
    engine.submit(k3jax.Request("a", PROMPT, SAMPLING))
    return [event.token for event in engine.run()]


def test_an_interpreted_kernel_gives_the_engine_the_tokens_of_xla(nano):
    interpreted = engine(nano, kda_decode="interpret")
    assert interpreted.kernel_plan["kda_decode"] is Implementation.INTERPRET
    with no_races():
        got = greedy_tokens(interpreted)
    assert got == greedy_tokens(engine(nano))


def test_an_engine_plans_every_op_and_can_be_given_a_plan(nano):
    planned = engine(nano).kernel_plan
    assert {choice.implementation for choice in planned.choices} == {Implementation.XLA}
    other = dataclasses.replace(planned, device=Device("cpu", "another"))
    assert k3jax.Engine(*nano, k3jax.EngineConfig(max_rows=1), plan=other).kernel_plan is other


@pytest.mark.slow
def test_generate_runs_under_the_plan_that_it_is_given():
    config = dataclasses.replace(
        tiny_config(), num_layers=2, kda_layers=(0,), kda_num_heads=1, kda_head_dim=64
    )
    model = init(config, jax.random.key(0)), config
    plan = kernel_plan(*model, {"kda_decode": "interpret"}, page_size=64, batch=1)
    with no_races():
        [got] = k3jax.generate(*model, [PROMPT], SAMPLING, plan=plan)
    [want] = k3jax.generate(*model, [PROMPT], SAMPLING)
    assert got.tokens == want.tokens


def test_weights_decide_what_fits_not_the_configuration():
    config = dataclasses.replace(
        tiny_config(), moe_intermediate_size=128, expert_latent_size=128, expert_format="mxfp4"
    )
    packed = abstract(config, jnp.bfloat16)
    floats = abstract(dataclasses.replace(config, expert_format=None), jnp.bfloat16)
    hopper = Device("gpu", "NVIDIA H200", "9.0")
    plan = kernel_plan(packed, config, {"experts": "gpu"}, page_size=16, batch=1, device=hopper)
    assert plan["experts"] is Implementation.GPU
    with pytest.raises(ValueError, match="experts are floats, not mxfp4"):
        kernel_plan(floats, config, {"experts": "gpu"}, page_size=16, batch=1, device=hopper)
