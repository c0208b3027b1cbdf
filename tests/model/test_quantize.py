"""Eight-bit weights: what is converted, and how far the logits move."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.model import backbone, params
from k3jax.model.params import MoEParams
from k3jax.model.quantize import quantize_weights
from k3jax.quant import QuantArray
from tests.helpers import tiny_config


def test_int8_weights_are_a_quarter_and_move_logits_little():
    config = tiny_config()
    weights = params.init(config, jax.random.key(1))
    small = quantize_weights(weights)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 17)).astype(np.int32)
    run = jax.jit(backbone.forward_logits, static_argnums=1)
    exact, found = run(weights, config, tokens), run(small, config, tokens)
    error = jnp.sqrt(jnp.mean((exact - found) ** 2)) / jnp.std(exact)
    assert 1e-4 < error < 0.1, error
    assert params.nbytes(small.layers[0].mixer.out) < 0.3 * params.nbytes(
        weights.layers[0].mixer.out
    )
    assert small.layers[0].mixer.out.shape == weights.layers[0].mixer.out.shape


def test_packed_experts_and_what_steers_them_stay_as_they_are():
    config = tiny_config()
    weights = params.init(config, jax.random.key(1))
    small = quantize_weights(weights)
    before, after = weights.layers[1].ffn, small.layers[1].ffn
    assert isinstance(before, MoEParams) and isinstance(after, MoEParams)
    assert isinstance(before.gate_up, QuantArray) and after.gate_up is before.gate_up
    assert after.router is before.router and small.embed is weights.embed
    assert after.shared is not None
    assert isinstance(after.shared.down, QuantArray) and after.shared.down.format == "int8"
