"""The objective, the optimiser, and a run that stops and goes on."""

import csv
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model import params as model_params
from k3jax.model.backbone import forward_logits
from scripts.nano import objective, optimizer
from scripts.nano.corpus import Batch, Encoder, make_batch
from scripts.nano.initial import initial_params
from tests.scripts.nano_model import nano_tokenizer, small_config

TOKENIZER = nano_tokenizer()
CONFIG = small_config()


@pytest.fixture(scope="module")
def params():
    return initial_params(CONFIG, TOKENIZER, 0)


@pytest.fixture(scope="module")
def batch():
    made = make_batch(Encoder(TOKENIZER), 0, 0, 0.0)
    width = 239
    lengths = np.minimum(made.lengths[:3], [width, width - 1, 151]).astype(np.int32)
    real = np.arange(width) < lengths[:, None]
    return Batch(made.tokens[:3, :width], lengths, np.where(real, made.task[:3, :width], -1))


def test_loss_is_the_cross_entropy_of_the_released_forward_pass(params, batch):
    loss, scores = jax.jit(objective.loss, static_argnums=1)(
        params, CONFIG, objective.targets(batch)
    )
    released = objective.as_released(params)
    logits = forward_logits(released, CONFIG, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths))
    logp = np.asarray(jax.nn.log_softmax(logits))
    row, column = np.nonzero(batch.task >= 0)
    assert len(row) > 20
    expected = -logp[row, column - 1, batch.tokens[row, column]].mean()
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(scores.counts.sum()) == len(row)
    assert np.allclose(np.asarray(scores.loads).sum(-1), 1, atol=1e-6)


def test_targets_beyond_the_share_are_cut_and_fewer_are_filled(batch):
    cut = objective.targets(batch, share=0.05)
    assert len(cut.labels) == int(batch.tokens.size * 0.05)
    assert (np.asarray(cut.tasks) >= 0).all()
    filled = objective.targets(batch, share=1.0)
    assert (np.asarray(filled.tasks) >= 0).sum() == (batch.task >= 0).sum()


def test_training_lowers_the_loss(params, batch):
    data = objective.targets(batch)
    moments = optimizer.init(params)

    @jax.jit
    def step(params, moments, number):
        gradient = jax.value_and_grad(objective.loss, has_aux=True)
        (loss, scores), gradients = gradient(params, CONFIG, data)
        return *optimizer.update(params, gradients, moments, scores.loads, number, 1.0), loss

    losses = []
    for number in range(8):
        params, moments, loss = step(params, moments, jnp.int32(number))
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("shape", [(2, 5, 11), (1, 7, 7)])
def test_newton_schulz_makes_singular_values_near_one(shape):
    m = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values = np.linalg.svd(np.asarray(optimizer.newton_schulz(jnp.asarray(m))), compute_uv=False)
    assert values.min() > 0.3 and values.max() < 1.4


def test_the_selection_bias_moves_towards_equal_loads(params):
    zero = jax.tree.map(jnp.zeros_like, params)
    loads = jnp.tile(jnp.asarray([0.7, 0.1, 0.1, 0.1]), (5, 1))
    moved, _ = optimizer.update(params, zero, optimizer.init(params), loads, jnp.int32(0), 1.0)
    ffn = moved.layers[1].ffn
    assert isinstance(ffn, model_params.MoEParams)
    bias = np.asarray(ffn.score_bias)
    assert bias[0] < 0 and (bias[1:] > 0).all()


def test_the_rate_rises_holds_and_falls():
    rates = [optimizer.rate(step, 1000) for step in range(1001)]
    assert rates[0] < 0.05 and rates[40] == 1.0 == rates[300]
    assert rates[599:] == sorted(rates[599:], reverse=True)
    assert rates[1000] == pytest.approx(0.02)


def test_decay_gates_outlive_a_chunk(params):
    for layer in params.layers:
        if isinstance(layer.mixer, model_params.KDAParams):
            a = np.exp(np.asarray(layer.mixer.decay_log_scale))[:, None]
            z = np.asarray(layer.mixer.decay_bias)
            decay = np.exp(-5 / (1 + np.exp(-a * z)))
            assert decay.max() ** 400 > 0.4
            assert np.median(decay, axis=1).min() ** 64 > 0.3


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    from scripts.nano.training import Plan, train

    def run(folder, steps):
        plan = Plan(folder, steps=4, minutes=30, measure_every=99, save_every=steps, samples=1)
        return train(replace(plan, steps=steps), CONFIG, TOKENIZER, quiet=True)

    run(tmp_path, 2)
    resumed = run(tmp_path, 3)
    assert resumed.step == 3
    again = run(tmp_path, 3)
    for a, b in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(again.params), strict=True):
        assert np.array_equal(a, b)
    with (tmp_path / "exact.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2", "3"]
