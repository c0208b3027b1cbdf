"""Parameter structs of the whole model, their abstract shapes, and a seeded initialiser."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Float32

from k3jax.config import K3Config
from k3jax.quant import BLOCK, QuantArray, quantize

Weight = Array | QuantArray


class KDAParams(struct.PyTreeNode):
    """One Kimi Delta Attention mixer (`self_attn.*` of a KDA layer); weights are `[out, in]`."""

    qkv: Weight
    """`[3·head·key, hidden]`: q_proj, k_proj and v_proj stacked."""
    conv: Float32[Array, "channel tap"]
    """Depthwise taps of the three streams, `[3·head·key, 4]`; the last tap is the current token."""
    decay_down: Weight
    decay_up: Weight
    decay_bias: Float32[Array, "head key"]
    decay_log_scale: Float32[Array, "head"]
    """`A_log`: one value per head, whatever padding the file has."""
    beta: Weight
    gate: Weight | None
    """Full-rank output gate (K3); None when low-rank."""
    gate_down: Weight | None
    gate_up: Weight | None
    out_norm: Float32[Array, "value"]
    out: Weight


class MLAParams(struct.PyTreeNode):
    """One gated Multi-head Latent Attention mixer (`self_attn.*` of an MLA layer)."""

    q_down: Weight | None
    """`q_a_proj`; None when queries have no low-rank path (Kimi-Linear)."""
    q_norm: Float[Array, "q_rank"] | None
    q: Weight
    """`q_b_proj` or `q_proj`: `[head·(nope+rope), q_rank or hidden]`."""
    kv_down: Weight
    """`kv_a_proj_with_mqa`: `[latent+rope, hidden]`."""
    kv_norm: Float[Array, "latent"]
    kv_up: Float[Array, "head_out latent"]
    """`kv_b_proj`: per head, `nope` rows of keys then `value` rows of values."""
    gate: Weight | None
    out: Weight


class MLPParams(struct.PyTreeNode):
    """A gated MLP: `gate_up` is `[2·width, in]`, gate rows first; `down` is `[out, width]`."""

    gate_up: Weight
    down: Weight


class MoEParams(struct.PyTreeNode):
    """Router, routed experts, latent projections and the shared MLP (`block_sparse_moe.*`)."""

    router: Float[Array, "expert hidden"]
    score_bias: Float32[Array, "expert"]
    gate_up: Weight
    """`[expert, 2·width, expert latent]`: w1 rows then w3 rows."""
    down: Weight
    """`[expert, expert latent, width]`: w2."""
    latent_down: Weight | None
    latent_norm: Float[Array, "latent"] | None
    latent_up: Weight | None
    shared: MLPParams | None


class ResidualMix(struct.PyTreeNode):
    """One scoring site of Attention Residuals: `*_res_norm` and `*_res_proj`."""

    norm: Float[Array, "hidden"]
    proj: Float[Array, "hidden"]


class LayerParams(struct.PyTreeNode):
    """One decoder layer."""

    mixer_mix: ResidualMix | None
    mixer_norm: Float[Array, "hidden"]
    mixer: KDAParams | MLAParams
    ffn_mix: ResidualMix | None
    ffn_norm: Float[Array, "hidden"]
    ffn: MLPParams | MoEParams


class VisionBlockParams(struct.PyTreeNode):
    """One block of the vision tower."""

    norm0: Float[Array, "hidden"]
    qkv: Float[Array, "qkv hidden"]
    out: Float[Array, "hidden qkv_hidden"]
    norm1: Float[Array, "hidden"]
    up: Float[Array, "width hidden"]
    down: Float[Array, "hidden width"]


class VisionParams(struct.PyTreeNode):
    """MoonViT-3d tower (`vision_tower.*`) and patch-merger projector (`mm_projector.*`)."""

    patch: Float[Array, "hidden patch"]
    """Patch convolution flattened to `[hidden, 3·patch·patch]`."""
    pos_emb: Float[Array, "height width hidden"]
    blocks: tuple[VisionBlockParams, ...]
    norm: Float[Array, "hidden"]
    project_in: Float[Array, "merged merged"]
    project_out: Float[Array, "text merged"]
    project_norm: Float[Array, "text"]


class K3Params(struct.PyTreeNode):
    """Every weight of the model; layers are separate leaves because they are never scanned."""

    embed: Float[Array, "vocab hidden"]
    layers: tuple[LayerParams, ...]
    final_mix: ResidualMix | None
    final_norm: Float[Array, "hidden"]
    lm_head: Weight
    vision: VisionParams | None


def abstract(config: K3Config, dtype: Any = jnp.float32) -> K3Params:
    """The tree of `jax.ShapeDtypeStruct` that `config` implies.

    `dtype` is that of matrices and norms; what the maths needs in float32 stays float32, and
    routed experts are packed when `config.expert_format` says so.
    """

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    layers = tuple(_layer(config, layer, array, dtype) for layer in range(config.num_layers))
    hidden = config.hidden_size
    return K3Params(
        embed=array(config.vocab_size, hidden),
        layers=layers,
        final_mix=_mix(config, array),
        final_norm=array(hidden),
        lm_head=array(config.vocab_size, hidden),
        vision=_vision(config, array) if config.vision else None,
    )


def init(config: K3Config, key: Array, dtype: Any = jnp.float32) -> K3Params:
    """Seeded random weights: normal matrices of variance 1/in, unit norms, slow decay gates.

    The decay bias spreads over [-6, -4] so that a state outlives a few tokens (with a zero bias
    it is gone after four). Packed experts are quantised from random floats.
    """
    spec = abstract(config, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        spec, is_leaf=lambda node: isinstance(node, QuantArray)
    )
    made = [
        _init_leaf(jax.tree_util.keystr(path), leaf, jax.random.fold_in(key, number))
        for number, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree_util.tree_unflatten(treedef, made)


def count(params: K3Params) -> int:
    """Number of logical weights, a packed weight counting as the matrix it stands for."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QuantArray))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def nbytes(params: Any) -> int:
    """Bytes of all leaves of the tree, or a part of it, as stored."""
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(params))


def _float32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _mix(config: K3Config, array: Any) -> ResidualMix | None:
    if config.attn_res_block_size is None:
        return None
    return ResidualMix(norm=array(config.hidden_size), proj=array(config.hidden_size))


def _layer(config: K3Config, layer: int, array: Any, dtype: Any) -> LayerParams:
    hidden = config.hidden_size
    kind = config.layer_kinds[layer]
    if config.is_sparse(layer):
        ffn = _moe(config, array, dtype)
    else:
        width = config.intermediate_size
        ffn = MLPParams(gate_up=array(2 * width, hidden), down=array(hidden, width))
    return LayerParams(
        mixer_mix=_mix(config, array),
        mixer_norm=array(hidden),
        mixer=_kda(config, array) if kind == "kda" else _mla(config, array),
        ffn_mix=_mix(config, array),
        ffn_norm=array(hidden),
        ffn=ffn,
    )


def _kda(config: K3Config, array: Any) -> KDAParams:
    hidden, heads, key = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    width, full = heads * key, config.kda_full_rank_gate
    return KDAParams(
        qkv=array(3 * width, hidden),
        conv=_float32(3 * width, config.kda_conv_size),
        decay_down=array(key, hidden),
        decay_up=array(width, key),
        decay_bias=_float32(heads, key),
        decay_log_scale=_float32(heads),
        beta=array(heads, hidden),
        gate=array(width, hidden) if full else None,
        gate_down=None if full else array(key, hidden),
        gate_up=None if full else array(width, key),
        out_norm=_float32(key),
        out=array(hidden, width),
    )


def _mla(config: K3Config, array: Any) -> MLAParams:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.q_lora_rank
    value = heads * config.v_head_dim
    q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    return MLAParams(
        q_down=None if rank is None else array(rank, hidden),
        q_norm=None if rank is None else array(rank),
        q=array(q_width, rank or hidden),
        kv_down=array(config.latent_width, hidden),
        kv_norm=array(config.kv_lora_rank),
        kv_up=array(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        gate=array(value, hidden) if config.mla_output_gate else None,
        out=array(hidden, value),
    )


def _moe(config: K3Config, array: Any, dtype: Any) -> MoEParams:
    hidden, latent, number = config.hidden_size, config.expert_width, config.num_experts
    width = config.moe_intermediate_size
    shared = width * config.num_shared_experts
    has_latent = config.expert_latent_size is not None

    def packed(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.uint8)

    def expert(out: int, into: int) -> Any:
        if config.expert_format is None:
            return array(number, out, into)
        if into % BLOCK:
            raise ValueError(
                f"config: MXFP4 experts need input widths that are multiples of {BLOCK}, got {into}"
            )
        return QuantArray(
            packed(number, out, into // 2),
            packed(number, out, into // BLOCK),
            format=config.expert_format,
            dtype=jnp.dtype(dtype),
        )

    return MoEParams(
        router=array(number, hidden),
        score_bias=_float32(number),
        gate_up=expert(2 * width, latent),
        down=expert(latent, width),
        latent_down=array(latent, hidden) if has_latent else None,
        latent_norm=array(latent) if config.expert_latent_norm else None,
        latent_up=array(hidden, latent) if has_latent else None,
        shared=MLPParams(gate_up=array(2 * shared, hidden), down=array(hidden, shared))
        if shared
        else None,
    )


def _vision(config: K3Config, array: Any) -> VisionParams:
    vision = config.vision
    assert vision is not None
    hidden, qkv, width = vision.hidden_size, vision.qkv_hidden_size, vision.intermediate_size
    merged = hidden * vision.merge_size**2
    block = VisionBlockParams(
        norm0=array(hidden),
        qkv=array(3 * qkv, hidden),
        out=array(hidden, qkv),
        norm1=array(hidden),
        up=array(width, hidden),
        down=array(hidden, width),
    )
    return VisionParams(
        patch=array(hidden, 3 * vision.patch_size**2),
        pos_emb=array(vision.pos_emb_height, vision.pos_emb_width, hidden),
        blocks=(block,) * vision.num_layers,
        norm=array(hidden),
        project_in=array(merged, merged),
        project_out=array(vision.text_hidden_size, merged),
        project_norm=array(vision.text_hidden_size),
    )


def _init_leaf(path: str, leaf: Any, key: Array) -> Any:
    shape, dtype = leaf.shape, leaf.dtype
    if isinstance(leaf, QuantArray):
        scale = 1.0 / math.sqrt(shape[-1])
        floats = jax.random.normal(key, shape, jnp.float32) * scale
        return quantize(floats.astype(dtype), leaf.format)
    if "norm" in path:
        return jnp.ones(shape, dtype)
    if "decay_bias" in path:
        return jax.random.uniform(key, shape, dtype, -6.0, -4.0)
    if "decay_log_scale" in path or "score_bias" in path:
        return jnp.zeros(shape, dtype)
    if "_mix.proj" in path:
        return jnp.zeros(shape, dtype)
    scale = 1.0 if "embed" in path else 1.0 / math.sqrt(shape[-1])
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)
