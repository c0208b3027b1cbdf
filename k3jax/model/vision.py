"""The image path: MoonViT-3d tower, patch-merger projector, features put into the text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from k3jax.config import VisionConfig
from k3jax.model.params import VisionBlockParams, VisionParams
from k3jax.model.vision_inputs import Grid, VisionInputs, prepare, time_embedding
from pallas_kernels.linear import linear

SCORES = 1 << 25
"""Attention scores held at once: float32, so 128 MiB per temporary, whatever the image's size."""


def encode_images(
    params: VisionParams,
    config: VisionConfig,
    pixel_values: Float32[Array, "patch channel y x"],
    grids: tuple[Grid, ...],
) -> Float[Array, "feature text"]:
    """Features of images and clips, concatenated in order, without padding.

    `grids` is static: under jit every combination of sizes is a program of its own. `encode` with a
    bucket is the form for serving.
    """
    return encode(params, config, pixel_values, prepare(grids, config))


def encode(
    params: VisionParams,
    config: VisionConfig,
    pixel_values: Float32[Array, "patch channel y x"],
    inputs: VisionInputs,
) -> Float[Array, "feature text"]:
    """Features of the images that `inputs` describes, in the dtype of the weights; padding is 0.

    `pixel_values` are normalised patches `[bucket, 3, patch, patch]`; what padding rows hold does
    not matter. Norm statistics, rotary embedding, softmax and the position embedding are float32.
    Temporaries grow linearly with the bucket: 94 KiB per patch for the released tower in bfloat16,
    compiled for CPU. Raises ValueError when the number of patches is not that of `inputs`.
    """
    x = patch_embed(params, config, pixel_values, inputs)
    x = encoder(params, config, x, inputs)
    return project(params, config, merge_patches(x, inputs))


def patch_embed(
    params: VisionParams,
    config: VisionConfig,
    pixel_values: Float32[Array, "patch channel y x"],
    inputs: VisionInputs,
) -> Float[Array, "patch hidden"]:
    """Patch convolution plus position embedding, and the time embedding for clips."""
    patches, size = inputs.segments.shape[0], config.patch_size
    if pixel_values.shape != (patches, 3, size, size):
        raise ValueError(
            f"vision: pixel_values {pixel_values.shape}, expected {(patches, 3, size, size)}"
        )
    real = inputs.segments[:, None] >= 0
    pixels = jnp.where(real, pixel_values.reshape(patches, -1), 0)
    x = linear(pixels.astype(params.patch.dtype), params.patch)

    table = params.pos_emb.reshape(-1, config.hidden_size)
    weights = jnp.asarray(inputs.pos_weights)
    position = sum(
        weights[:, corner, None] * table[inputs.pos_indices[:, corner]].astype(jnp.float32)
        for corner in range(4)
    )
    frame = jnp.asarray(inputs.frame)
    time = jnp.where(frame[:, None] >= 0, jnp.asarray(time_embedding(config))[frame], 0)
    return (x.astype(jnp.float32) + position + time).astype(x.dtype)


def encoder(
    params: VisionParams,
    config: VisionConfig,
    x: Float[Array, "patch hidden"],
    inputs: VisionInputs,
) -> Float[Array, "patch hidden"]:
    """All blocks and the final norm."""
    for block in params.blocks:
        x = encoder_block(block, config, x, inputs)
    return _rms_norm(x, params.norm, config.norm_eps)


def encoder_block(
    params: VisionBlockParams,
    config: VisionConfig,
    x: Float[Array, "patch hidden"],
    inputs: VisionInputs,
) -> Float[Array, "patch hidden"]:
    """One pre-norm block: attention within each image, then a tanh-GELU MLP."""
    normed = _rms_norm(x, params.norm0, config.norm_eps)
    qkv = linear(normed, params.qkv).reshape(-1, 3, config.num_heads, config.head_dim)
    cos, sin = jnp.asarray(inputs.rope_cos), jnp.asarray(inputs.rope_sin)
    q, k = rotate(qkv[:, 0], cos, sin), rotate(qkv[:, 1], cos, sin)
    mixed = segment_attention(q, k, qkv[:, 2], jnp.asarray(inputs.segments))
    x = x + linear(mixed.reshape(x.shape[0], -1), params.out)
    normed = _rms_norm(x, params.norm1, config.norm_eps)
    return x + linear(jax.nn.gelu(linear(normed, params.up), approximate=True), params.down)


def rotate(
    x: Float[Array, "patch head key"],
    cos: Float32[Array, "patch pair"],
    sin: Float32[Array, "patch pair"],
) -> Float[Array, "patch head key"]:
    """Turns interleaved pairs (2i, 2i+1) of every head by the patch's angles, in float32."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def segment_attention(
    q: Float[Array, "patch head key"],
    k: Float[Array, "patch head key"],
    v: Float[Array, "patch head key"],
    segments: Int32[Array, "patch"],
    *,
    max_scores: int = SCORES,
) -> Float[Array, "patch head key"]:
    """Full softmax attention among the patches of equal segment.

    Queries are taken in blocks, one after the other, so that at most about `max_scores` scores
    (or one query's) exist at a time. The work is patches² whatever the segments, so large images
    are better encoded apart. Products sum in float32 and the softmax is float32.
    """
    patches, heads, _ = q.shape
    blocks = -(-patches * patches * heads // max_scores)
    block = -(-patches // min(blocks, patches))

    def attend(queries: tuple[Array, Array]) -> Array:
        block_q, block_segments = queries
        return _attend(block_q, block_segments, k, v, segments)

    if block >= patches:
        return attend((q, segments))
    pad = -patches % block
    padded_q = jnp.pad(q, ((0, pad), (0, 0), (0, 0))).reshape(-1, block, *q.shape[1:])
    padded_segments = jnp.pad(segments, (0, pad), constant_values=-1).reshape(-1, block)
    return jax.lax.map(attend, (padded_q, padded_segments)).reshape(-1, *q.shape[1:])[:patches]


def merge_patches(
    x: Float[Array, "patch hidden"], inputs: VisionInputs
) -> Float[Array, "feature cell hidden"]:
    """Groups each cell's patches row-major, averaged over the frames of a clip."""
    cells = x[inputs.merge_indices].astype(jnp.float32)
    return jnp.sum(cells * inputs.merge_weights[:, None, :, None], axis=2).astype(x.dtype)


def project(
    params: VisionParams, config: VisionConfig, cells: Float[Array, "feature cell hidden"]
) -> Float[Array, "feature text"]:
    """Patch-merger projector: two layers with the exact GELU between, then a norm."""
    merged = cells.reshape(cells.shape[0], -1)
    hidden = jax.nn.gelu(linear(merged, params.project_in), approximate=False)
    return _rms_norm(
        linear(hidden, params.project_out), params.project_norm, config.projector_ln_eps
    )


def merge_features(
    embeddings: Float[Array, "row token hidden"],
    tokens: Int32[Array, "row token"],
    features: Float[Array, "feature hidden"],
    media_token_id: int,
    feature_offsets: Int32[Array, "row"] | None = None,
) -> Float[Array, "row token hidden"]:
    """Overwrites the embedding of each media position with the next feature, in order.

    A row's first media position takes feature `feature_offsets[row]`, the next one the feature
    after it: a span that starts inside an image passes the index of the first feature it has not
    yet consumed. None means that rows are whole and their features follow one another. Features
    are cast to the embeddings' dtype. A position past the last feature becomes NaN rather than a
    wrong picture; `check_media` refuses such prompts beforehand.
    """
    if features.shape[0] == 0:
        return embeddings
    media = tokens == media_token_id
    count = jnp.cumsum(media, axis=1, dtype=jnp.int32)
    if feature_offsets is None:
        feature_offsets = jnp.cumsum(count[:, -1]) - count[:, -1]
    index = feature_offsets[:, None] + count - 1
    taken = features.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return jnp.where(media[..., None], taken.astype(embeddings.dtype), embeddings)


def _attend(
    q: Float[Array, "query head key"],
    query_segments: Int32[Array, "query"],
    k: Float[Array, "patch head key"],
    v: Float[Array, "patch head key"],
    segments: Int32[Array, "patch"],
) -> Float[Array, "query head key"]:
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision=highest, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    # A finite mask: a padded query may have no key at all.
    scores = jnp.where(query_segments[:, None] == segments, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum(
        "hqk,khd->qhd", weights, v, precision=highest, preferred_element_type=jnp.float32
    )
    return mixed.astype(q.dtype)


def _rms_norm(
    x: Float[Array, "row hidden"], weight: Float[Array, "hidden"], eps: float
) -> Float[Array, "row hidden"]:
    """As `torch.nn.RMSNorm`: float32 throughout, rounded once, after the weight."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
