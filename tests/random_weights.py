"""Random models made with NumPy: nothing compiles, unlike in `k3jax.model.params.init`."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config, VisionConfig
from k3jax.model.params import K3Params, abstract
from k3jax.weights import save_hf
from tests.helpers import GOLDEN, tiny_config

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


def random_weights(config: K3Config, seed: int = 0) -> K3Params:
    """Matrices of variance 1/in, unit norms, decay gates slow enough that states live on."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, spec: Any) -> jax.Array:
        name, shape = jax.tree_util.keystr(path), spec.shape
        if spec.dtype == jnp.uint8:
            low, high = (122, 125) if name.endswith("scales") else (0, 256)
            return jnp.asarray(rng.integers(low, high, shape, np.uint8))
        if "norm" in name:
            floats = np.ones(shape)
        elif "decay_bias" in name:
            floats = rng.uniform(-6, -4, shape)
        else:
            scale = 1.0 if "embed" in name else 1 / math.sqrt(shape[-1])
            floats = rng.standard_normal(shape) * scale
        return jnp.asarray(floats, spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract(config))


def two_layer_config() -> K3Config:
    """One KDA layer with a dense MLP and one MLA layer with experts: compiles fastest."""
    return replace(tiny_config(), num_layers=2, kda_layers=(0,))


def text_config() -> K3Config:
    """Two layers with vision, for the toy vocabulary of `golden/chat`."""
    return replace(
        two_layer_config(),
        vocab_size=846,
        eos_token_ids=(592,),
        bos_token_id=590,
        pad_token_id=845,
        max_context=1024,
        vision=VisionConfig(
            hidden_size=16,
            qkv_hidden_size=16,
            num_heads=2,
            num_layers=1,
            intermediate_size=16,
            patch_size=14,
            pos_emb_height=4,
            pos_emb_width=4,
            pos_emb_time=2,
            merge_size=2,
            projector_ln_eps=1e-5,
            text_hidden_size=32,
            media_token_id=611,
        ),
    )


def write_text_model(folder: Path, config: K3Config | None = None, *, seed: int = 0) -> Path:
    """A released-format folder with random weights and the toy tokenizer."""
    config = config or text_config()
    save_hf(random_weights(config, seed), config, folder)
    for name in TOKENIZER_FILES:
        shutil.copy(GOLDEN / "chat" / name, folder)
    return folder
