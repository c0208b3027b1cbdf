"""The weights that training of k3-nano starts from: random, but arranged so that copying is easy.

The budget is a few million tokens, too few to find from noise that "the same word" matters. So a
word and the same word after a space start almost alike, the head starts along the embedding, every
mixer starts with equal query and key projections and with its output projection along the transpose
of its value projection, and the heads' convolutions differ in what they look at. One KDA head then
starts as "what followed this token before?". Training is free to move all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from k3jax.model import params as model_params
from k3jax.model.params import K3Params, KDAParams, MLAParams

EMBED_SCALE = 0.5
HEAD_SCALE = 0.05
CONV_NOISE = 0.1
DECAY_BIAS = (-8.0, -3.5)
"""Channels forget within some thousand down to some dozen tokens."""

LOOKS = (((0,), (1,)), ((1,), (2,)), ((0, 1), (1, 2)))
"""How far back the queries and the keys of KDA head 0, 1, 2, … look at the start."""


def initial_params(config: K3Config, tokenizer: Tokenizer, seed: int) -> K3Params:
    """Seeded float32 weights; `config` has float experts."""
    params = model_params.init(config, jax.random.key(seed))
    twin = _twins(config, tokenizer)
    embed = EMBED_SCALE * (params.embed[twin] + 0.3 * params.embed)
    layers = []
    for number, layer in enumerate(params.layers):
        key = jax.random.fold_in(jax.random.key(seed + 1), number)
        if isinstance(layer.mixer, KDAParams):
            mixer = _kda(layer.mixer, config, key)
        else:
            mixer = _mla(layer.mixer, config)
        layers.append(layer.replace(mixer=mixer))
    head = HEAD_SCALE * embed / EMBED_SCALE
    return params.replace(embed=embed, lm_head=head, layers=tuple(layers))


def _twins(config: K3Config, tokenizer: Tokenizer) -> np.ndarray:
    """For every token the one that it starts from: itself, or the word without its space."""
    twin = np.arange(config.vocab_size)
    for token in range(tokenizer.num_base):
        text = tokenizer.decode_bytes([token])
        if text[:1] == b" " and text[1:].isalpha():
            (twin[token],) = tokenizer.encode(text[1:].decode())
    return twin


def _kda(mixer: KDAParams, config: K3Config, key: Array) -> KDAParams:
    heads, width = config.kda_num_heads, config.kda_head_dim
    assert isinstance(mixer.qkv, jax.Array)
    query = mixer.qkv[: heads * width]
    value = _orthogonal(key, heads * width, config.hidden_size)
    taps = CONV_NOISE * np.array(jax.random.normal(key, mixer.conv.shape))
    taps = taps.reshape(3, heads, width, config.kda_conv_size)
    for head in range(heads):
        looks = LOOKS[head % len(LOOKS)]
        for stream, back in enumerate((*looks, (0,))):
            for distance in back:
                taps[stream, head, :, -1 - distance] += len(back) ** -0.5
    spread = jnp.linspace(*DECAY_BIAS, width)
    return mixer.replace(
        qkv=jnp.concatenate([query, query, value]),
        out=value.T,
        conv=jnp.asarray(taps.reshape(mixer.conv.shape)),
        decay_bias=jnp.broadcast_to(spread, (heads, width)),
    )


def _mla(mixer: MLAParams, config: K3Config) -> MLAParams:
    heads, rank, nope = config.num_heads, config.kv_lora_rank, config.qk_nope_head_dim
    assert isinstance(mixer.q_down, jax.Array) and isinstance(mixer.kv_down, jax.Array)
    assert isinstance(mixer.q, jax.Array)
    q_down = mixer.q_down.at[:rank].set(mixer.kv_down[:rank])
    queries = mixer.q.reshape(heads, -1, mixer.q.shape[-1])
    kv_up = mixer.kv_up.reshape(heads, -1, rank)
    queries = queries.at[:, :nope].set(0.0).at[:, :nope, :rank].set(kv_up[:, :nope])
    values = kv_up[:, nope:].reshape(-1, rank) @ mixer.kv_down[:rank]
    out = values.T / jnp.linalg.norm(values, ord=2)
    return mixer.replace(q_down=q_down, q=queries.reshape(mixer.q.shape), out=out)


def _orthogonal(key: Array, rows: int, columns: int) -> Float[Array, "row column"]:
    """Rows (or columns, if fewer) that are orthonormal."""
    return jax.nn.initializers.orthogonal()(key, (rows, columns), jnp.float32)
