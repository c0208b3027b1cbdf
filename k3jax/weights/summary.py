"""What a model folder holds, without reading its weights: the facts behind `k3jax info`."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.config import K3Config
from k3jax.model.params import abstract
from k3jax.quant import QuantArray
from k3jax.weights.hf_folder import matrix_dtype, plan
from k3jax.weights.leaves import by_path
from k3jax.weights.model_folder import is_native
from k3jax.weights.names import layout
from k3jax.weights.native import native_leaves

TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")

# What a field of a mixer, an FFN or the whole model belongs to, when it is not the mixer or FFN.
_FIELD_PARTS = {
    "embed": "embedding",
    "lm_head": "output head",
    "vision": "vision",
    "mixer_mix": "attention residuals",
    "ffn_mix": "attention residuals",
    "final_mix": "attention residuals",
    "mixer_norm": "norms",
    "ffn_norm": "norms",
    "final_norm": "norms",
}
_MOE_PARTS = {
    "router": "router",
    "score_bias": "router",
    "gate_up": "routed experts",
    "down": "routed experts",
    "latent_down": "expert latent projections",
    "latent_norm": "expert latent projections",
    "latent_up": "expert latent projections",
    "shared": "shared experts",
}

_ORDER = (
    "embedding",
    "KDA",
    "MLA",
    "dense MLP",
    "shared experts",
    "router",
    "expert latent projections",
    "routed experts",
    "attention residuals",
    "norms",
    "output head",
    "vision",
)


def summarize(path: str | Path) -> dict[str, Any]:
    """Format, config and parts of the model in a folder, as plain JSON values.

    `parts` gives for each part of the model the number of weights (a packed weight counts as the
    matrix it stands for) and the bytes on disk; `weights_per_token` leaves out the vision part and
    the routed experts that one token does not use. A released folder is checked as `load` does
    before it reads data. Raises what `load_model` would raise.
    """
    folder = Path(path)
    native = is_native(folder)
    config = K3Config.from_hf(folder)
    sizes, storage = _native(folder) if native else _released(folder, config)
    weights, stored = Counter[str](), Counter[str]()
    for name, leaf in by_path(abstract(config)).items():
        part = _part(name, config)
        weights[part] += math.prod(leaf.shape)
        stored[part] += sizes[name]
    used = config.num_experts_per_token / max(config.num_experts, 1)
    unused = weights["vision"] + round(weights["routed experts"] * (1 - used))
    return {
        "path": str(folder),
        **storage,
        "layout": layout(config),
        "weights": weights.total(),
        "weights_per_token": weights.total() - unused,
        "bytes": stored.total(),
        "parts": {
            part: {"weights": weights[part], "bytes": stored[part]}
            for part in _ORDER
            if weights[part]
        },
        "config": _config(config),
        "missing_tokenizer_files": [f for f in TOKENIZER_FILES if not (folder / f).is_file()],
    }


def _released(folder: Path, config: K3Config) -> tuple[Counter[str], dict[str, Any]]:
    todo = plan(folder, config)
    sizes = Counter[str]()
    for piece, tensor in todo:
        sizes[piece.leaf] += tensor.nbytes
    dtype = matrix_dtype(todo).name
    storage = {
        "format": "released",
        "files": len({tensor.file for _, tensor in todo}),
        "dtype": dtype,
        "expert_format": config.expert_format or dtype,
    }
    return sizes, storage


def _native(folder: Path) -> tuple[Counter[str], dict[str, Any]]:
    sizes, experts = Counter[str](), None
    leaves = native_leaves(folder)
    for name, leaf in leaves.items():
        for array in jax.tree.leaves(leaf):
            sizes[name] += math.prod(array.shape) * np.dtype(array.dtype).itemsize
        if isinstance(leaf, QuantArray) and ".ffn." in name:
            experts = leaf.format
    dtype = np.dtype(leaves["embed"].dtype).name
    return sizes, {"format": "k3jax", "dtype": dtype, "expert_format": experts or dtype}


def _part(name: str, config: K3Config) -> str:
    """The part of the model that a leaf such as `layers.3.ffn.shared.down` belongs to."""
    field, *rest = name.split(".")
    if field != "layers":
        return _FIELD_PARTS[field]
    layer, field, inner = int(rest[0]), rest[1], rest[2] if len(rest) > 2 else ""
    if field == "mixer":
        return config.layer_kinds[layer].upper()
    if field == "ffn":
        return _MOE_PARTS[inner] if config.is_sparse(layer) else "dense MLP"
    return _FIELD_PARTS[field]


def _config(config: K3Config) -> dict[str, Any]:
    sparse = [layer for layer in range(config.num_layers) if config.is_sparse(layer)]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_context": config.max_context,
        "num_layers": config.num_layers,
        "layer_kinds": list(config.layer_kinds),
        "sparse_layers": sparse,
        "attn_res_block_size": config.attn_res_block_size,
        "activation": config.activation,
        "kda_heads": [config.kda_num_heads, config.kda_head_dim],
        "mla_heads": [config.num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim],
        "latent_width": config.latent_width,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_token,
        "eos_token_ids": list(config.eos_token_ids),
        "vision": config.vision is not None,
    }
