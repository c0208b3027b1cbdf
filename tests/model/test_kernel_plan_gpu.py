"""The model under a plan of kernels steps to the same state and hidden values as under XLA."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model import backbone, params
from k3jax.state import DecodeState, Spans
from pallas_kernels.implementation import Device, plan_kernels, use_plan
from tests.helpers import tiny_config

CONFIG = replace(
    tiny_config(),
    num_layers=2,
    kda_layers=(0,),
    hidden_size=128,
    kda_num_heads=2,
    kda_head_dim=64,
    num_heads=2,
    kv_lora_rank=128,
    qk_rope_head_dim=64,
    expert_latent_size=128,
    moe_intermediate_size=128,
    first_dense_layers=1,
)


@partial(jax.jit, static_argnames="counts")
def forward(weights, ids, spans, state, counts=None):
    """Hidden values and state after the spans, or after as many tokens of each as `counts` says."""
    x = backbone.embed(weights, ids)
    if counts is None:
        hidden, _, state = backbone.forward(weights, CONFIG, x, spans, state)
        return hidden, state
    hidden, traces, state = backbone.verify(weights, CONFIG, x, spans, state)
    return hidden, backbone.replay(traces, jnp.array(counts), spans, state)


def after_a_step(tokens, plan, counts=None):
    """Prefill five tokens under XLA, then run a span of `tokens` under the plan."""
    weights = params.init(CONFIG, jax.random.key(0), jnp.bfloat16)
    state = DecodeState.init(CONFIG, num_slots=4, num_pages=6, page_size=8, dtype=jnp.bfloat16)
    table = np.array([[1, 3], [0, 5], [2, 4]], np.int32)
    slots = np.array([2, 0, -1], np.int32)
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (3, 8))[:, : 5 + tokens]
    none, start = np.zeros(3, np.int32), np.array([5, 3, 0], np.int32)
    first = Spans(
        lengths=start, starts=none, read_slots=none - 1, write_slots=slots, page_table=table
    )
    _, state = forward(weights, ids[:, :5], first, state)
    lengths = np.array([tokens, 1, 0], np.int32)
    then = Spans(
        lengths=lengths, starts=start, read_slots=slots, write_slots=slots, page_table=table
    )
    with use_plan(plan):
        hidden, state = forward(weights, ids[:, 5:], then, state, counts)
    real = np.arange(tokens) < lengths[:, None]
    return np.asarray(hidden, np.float32)[real], state


def assert_close(got, want):
    (hidden, state), (want_hidden, want_state) = got, want
    assert np.abs(hidden - want_hidden).max() < 0.03 * np.abs(want_hidden).max()
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.abs(one - other).max() <= 0.02 * np.abs(other).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "ops"),
    [(1, ("kda_decode", "mla_decode", "experts", "residual_mix")), (3, ("kda_prefill",))],
)
def test_a_step_with_kernels_equals_one_without(tokens, ops):
    plan = plan_kernels(CONFIG, Device("cpu", "cpu"), dict.fromkeys(ops, "interpret"), page_size=8)
    assert_close(after_a_step(tokens, plan), after_a_step(tokens, None))


@pytest.mark.slow
def test_verifying_and_replaying_with_kernels_equals_doing_so_without():
    ops = dict.fromkeys(("kda_verify", "kda_replay", "mla_decode"), "interpret")
    plan = plan_kernels(CONFIG, Device("cpu", "cpu"), ops, page_size=8)
    got = after_a_step(3, plan, counts=(2, 1, 0))
    assert_close(got, after_a_step(3, None, counts=(2, 1, 0)))
    assert_close((got[0], got[1].recurrent), (got[0], after_a_step(2, None)[1].recurrent))
