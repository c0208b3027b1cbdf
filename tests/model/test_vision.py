"""Vision tower, projector and merge against the released code's float64 run, and their laws.

Goldens: the released HF code in float64 on k3-tiny's weights (a 2-block tower), stored as float32.
"""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config, VisionConfig, k3
from k3jax.model import vision
from k3jax.model.backbone import embed, forward, logits
from k3jax.model.params import K3Params, VisionParams, abstract
from k3jax.model.vision_inputs import (
    VisionInputs,
    check_media,
    feature_count,
    frame_rows,
    position_neighbours,
    prepare,
    rope,
    time_embedding,
)
from k3jax.state import Spans
from k3jax.weights import hf

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def tiny() -> tuple[K3Params, K3Config]:
    config = K3Config.from_hf(GOLDEN / "k3-tiny")
    return hf.load(GOLDEN / "k3-tiny", dtype=jnp.float32), config


def tower() -> tuple[VisionParams, VisionConfig]:
    params, config = tiny()
    assert params.vision is not None and config.vision is not None
    return params.vision, config.vision


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as file:
        return dict(file)


def grids_of(array: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    return tuple((int(t), int(h), int(w)) for t, h, w in array)


def pixels(grids, seed: int = 0) -> jax.Array:
    rows = sum(t * h * w for t, h, w in grids)
    random = np.random.default_rng(seed)
    return jnp.asarray(random.uniform(-1, 1, (rows, 3, 14, 14)), jnp.float32)


def padded(values: jax.Array, bucket: int) -> jax.Array:
    """Poisoned padding: NaN must not reach any feature."""
    shape = (bucket, *values.shape[1:])
    return jnp.full(shape, jnp.nan, values.dtype).at[: values.shape[0]].set(values)


encode = jax.jit(vision.encode, static_argnums=1)


@partial(jax.jit, static_argnums=1)
def stages(params: VisionParams, config: VisionConfig, values: jax.Array, inputs: VisionInputs):
    embedded = vision.patch_embed(params, config, values, inputs)
    encoded = vision.encoder(params, config, embedded, inputs)
    cells = vision.merge_patches(encoded, inputs)
    return embedded, encoded, cells, vision.project(params, config, cells)


def within(got, expected: np.ndarray, relative: float = 2e-6) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=relative * np.abs(expected).max())


def test_images_match_the_released_code_at_every_stage():
    params, config = tower()
    data = golden("k3-tiny/vision.npz")
    inputs = prepare(grids_of(data["grid_thws"]), config)
    embedded, encoded, cells, features = stages(params, config, data["pixel_values"], inputs)
    within(embedded, data["patch_embed"])
    within(encoded, data["encoder"])
    within(cells, data["tower"])
    within(features, data["features"])


def test_clips_match_the_released_code():
    params, config = tower()
    data = golden("k3-tiny/vision.npz")
    inputs = prepare(grids_of(data["video_grid_thws"]), config)
    _, _, cells, features = stages(params, config, data["video_pixel_values"], inputs)
    within(cells, data["video_tower"])
    within(features, data["video_features"])


def test_encode_images_matches_the_released_code():
    params, config = tower()
    data = golden("k3-tiny/vision.npz")
    run = jax.jit(vision.encode_images, static_argnums=(1, 3))
    grids = grids_of(data["grid_thws"])
    within(run(params, config, data["pixel_values"], grids), data["features"])


def test_image_and_text_logits_match_the_released_code():
    params, config = tiny()
    assert params.vision is not None and config.vision is not None
    data = golden("k3-tiny/vision.npz")
    grids = grids_of(data["grid_thws"])
    tokens = jnp.asarray(data["expanded_input_ids"], jnp.int32)
    check_media(tokens[0].tolist(), grids, config.vision)
    media_token_id = config.vision.media_token_id
    features = encode(
        params.vision, config.vision, data["pixel_values"], prepare(grids, config.vision)
    )

    @jax.jit
    def run(params: K3Params, tokens: jax.Array, features: jax.Array) -> jax.Array:
        x = vision.merge_features(embed(params, tokens), tokens, features, media_token_id)
        spans = Spans.fresh(jnp.array([tokens.shape[1]]))
        return logits(params, forward(params, config, x, spans, None)[0])

    got = run(params, tokens, features)
    np.testing.assert_allclose(got, data["logits"], rtol=0, atol=1e-3)


def test_positions_match_the_released_code():
    params, config = tower()
    data = golden("components/vision_parts.npz")
    grids = grids_of(data["grid_thws"])
    parts = []
    for grid in grids:
        indices, weights = position_neighbours(grid, config)
        table = np.asarray(params.pos_emb).reshape(-1, config.hidden_size)
        frames = frame_rows(grid)
        time = np.where(frames[:, None] >= 0, time_embedding(config)[frames], 0)
        parts.append((table[indices] * weights[..., None]).sum(1) + time)
    within(np.concatenate(parts), data["pos_emb"])
    within(np.concatenate([rope(grid, config)[0] for grid in grids]), data["rope_cos"])
    within(np.concatenate([rope(grid, config)[1] for grid in grids]), data["rope_sin"])
    within(time_embedding(config), data["time_weight"])


def test_rotation_and_one_block_match_the_released_code():
    params, config = tower()
    data = golden("components/vision_parts.npz")
    inputs = prepare(grids_of(data["grid_thws"][:1]), config)
    cos, sin = jnp.asarray(inputs.rope_cos), jnp.asarray(inputs.rope_sin)
    within(vision.rotate(jnp.asarray(data["rope_q_in"]), cos, sin), data["rope_q_out"])
    x = jnp.asarray(data["block_x"])
    block = jax.jit(vision.encoder_block, static_argnums=1)
    within(block(params.blocks[0], config, x, inputs), data["block0"])


def test_a_grid_of_the_tables_size_takes_its_rows_unchanged():
    _, config = tower()
    side = config.pos_emb_height
    indices, weights = position_neighbours((1, side, side), config)
    np.testing.assert_array_equal(weights[:, 0], 1)
    np.testing.assert_array_equal(weights[:, 1:], 0)
    np.testing.assert_array_equal(indices[:, 0], np.arange(side * side))


def test_images_encoded_together_equal_each_alone():
    params, config = tower()
    grids = ((1, 2, 2), (1, 2, 14), (3, 4, 2), (1, 10, 6), (4, 2, 2), (2, 6, 2))
    values = pixels(grids)
    together = encode(params, config, padded(values, 164), prepare(grids, config, 164))
    patch = feature = 0
    for grid in grids:
        size, count = int(np.prod(grid)), feature_count(grid, config)
        values_alone = padded(values[patch : patch + size], 164)
        alone = encode(params, config, values_alone, prepare((grid,), config, 164))
        expected = together[feature : feature + count]
        np.testing.assert_allclose(alone[:count], expected, rtol=0, atol=3e-6)
        patch, feature = patch + size, feature + count


@pytest.mark.parametrize("grids", [((1, 2, 2),), ((1, 4, 6), (1, 2, 10)), ((3, 2, 4), (1, 2, 2))])
def test_padding_changes_nothing_whatever_it_holds(grids):
    params, config = tower()
    values = pixels(grids)
    expected = encode(params, config, values, prepare(grids, config))
    got = encode(params, config, padded(values, 64), prepare(grids, config, 64))
    assert got.shape == (16, config.text_hidden_size)
    count = expected.shape[0]
    np.testing.assert_allclose(got[:count], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got[count:], 0)


def test_one_bucket_is_one_program():
    params, config = tower()
    traces = []

    def traced(values: jax.Array, inputs: VisionInputs) -> jax.Array:
        traces.append(inputs)
        return vision.encode(params, config, values, inputs)

    run = jax.jit(traced)
    for grids in [((1, 2, 2),), ((1, 8, 4),), ((1, 2, 4), (1, 4, 2), (1, 2, 2))]:
        inputs = prepare(grids, config, 32)
        run(jnp.zeros((32, 3, 14, 14)), inputs)
    assert len(traces) == 1


@pytest.mark.parametrize("patches", [1, 2, 37, 64])
@pytest.mark.parametrize("max_scores", [1, 500, 3 * 64 * 7])
def test_attention_in_blocks_equals_plain_attention(patches: int, max_scores: int):
    random = np.random.default_rng(patches)
    q, k, v = jnp.asarray(random.normal(size=(3, patches, 3, 16)), jnp.float32)
    segments = np.sort(random.integers(-1, 3, patches)).astype(np.int32)
    got = vision.segment_attention(q, k, v, jnp.asarray(segments), max_scores=max_scores)
    scores = np.einsum("qhd,khd->hqk", q, k).astype(np.float64) / 4
    scores = np.where(segments[:, None] == segments, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("hqk,khd->qhd", weights, v), rtol=0, atol=2e-6)


def test_attention_memory_does_not_grow_with_patches_squared():
    patches, heads, max_scores = 4099, 3, 1 << 18
    array = jax.ShapeDtypeStruct((patches, heads, 16), jnp.float32)
    segments = jax.ShapeDtypeStruct((patches,), jnp.int32)

    def run(q, k, v, segments):
        return vision.segment_attention(q, k, v, segments, max_scores=max_scores)

    memory = jax.jit(run).lower(array, array, array, segments).compile().memory_analysis()
    assert memory is not None
    whole = 4 * heads * patches**2
    assert 0 < memory.temp_size_in_bytes < 8 * (4 * max_scores) < whole / 20


def test_the_released_tower_traces_in_bfloat16():
    config = k3().vision
    assert config is not None
    params, inputs = abstract(k3(), jnp.bfloat16).vision, prepare([(1, 8, 6)], config, 64)
    values = jax.ShapeDtypeStruct((64, 3, 14, 14), jnp.float32)
    got = jax.eval_shape(lambda p, *args: vision.encode(p, config, *args), params, values, inputs)
    assert (got.shape, got.dtype) == ((16, 7168), jnp.bfloat16)


def test_bfloat16_weights_give_bfloat16_features_near_float32():
    params, config = tower()
    grids = ((1, 4, 6), (3, 2, 4))
    values = pixels(grids)
    inputs = prepare(grids, config)
    exact = encode(params, config, values, inputs)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    got = encode(half, config, values, inputs)
    assert got.dtype == jnp.bfloat16
    error = jnp.abs(got.astype(jnp.float32) - exact).max() / jnp.abs(exact).max()
    assert 1e-4 < error < 2e-2


def merge_case():
    random = np.random.default_rng(5)
    embeddings = jnp.asarray(random.normal(size=(3, 7, 4)), jnp.float32)
    features = jnp.asarray(random.normal(size=(6, 4)), jnp.float32)
    tokens = np.array([[1, 9, 9, 2, 9, 3, 0], [4, 5, 6, 7, 8, 1, 2], [9, 1, 9, 2, 3, 9, 4]])
    return embeddings, tokens.astype(np.int32), features


def test_features_replace_media_positions_in_order_and_nothing_else():
    embeddings, tokens, features = merge_case()
    expected = np.array(embeddings)
    expected[tokens == 9] = features
    got = vision.merge_features(embeddings, jnp.asarray(tokens), features, 9)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("split", [1, 2, 5])
def test_spans_that_start_inside_an_image_equal_the_whole(split: int):
    embeddings, tokens, features = merge_case()
    whole = vision.merge_features(embeddings, jnp.asarray(tokens), features, 9)
    first = np.array([0, 3, 3])
    seen = first + (tokens[:, :split] == 9).sum(1)
    parts = [
        vision.merge_features(
            embeddings[:, span], jnp.asarray(tokens[:, span]), features, 9, jnp.asarray(start)
        )
        for span, start in [(slice(split), first), (slice(split, None), seen)]
    ]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), whole)


def test_a_media_position_without_a_feature_is_nan():
    embeddings, tokens, features = merge_case()
    got = vision.merge_features(embeddings, jnp.asarray(tokens), features[:5], 9)
    assert np.isnan(got).all(-1).sum() == np.isnan(got).any(-1).sum() == 1


def test_text_alone_needs_no_features():
    embeddings, tokens, features = merge_case()
    got = vision.merge_features(embeddings, jnp.asarray(tokens), features[:0], 9)
    np.testing.assert_array_equal(got, embeddings)


def test_a_prompt_with_too_few_or_many_media_tokens_is_refused():
    _, config = tower()
    media = config.media_token_id
    check_media([1, *[media] * 7, 2], ((1, 2, 2), (3, 4, 6)), config)
    with pytest.raises(ValueError, match=r"6 media tokens.*7 features"):
        check_media([1, *[media] * 6, 2], ((1, 2, 2), (3, 4, 6)), config)
    with pytest.raises(ValueError, match=r"1 media tokens.*0 features"):
        check_media([media], (), config)


@pytest.mark.parametrize(
    ("grids", "bucket", "message"),
    [
        ((), 16, "no images"),
        (((1, 5, 2),), None, "5×2.*multiples of 2"),
        (((1, 2, 0),), None, "2×0"),
        (((5, 2, 2),), None, "5 frames.*1 to 4"),
        (((1, 4, 4),), 12, "16 patches.*12"),
        (((1, 2, 2),), 6, "6 patches.*multiple of 4"),
    ],
)
def test_impossible_grids_and_buckets_are_refused(grids, bucket, message: str):
    _, config = tower()
    with pytest.raises(ValueError, match=message):
        prepare(grids, config, bucket)


def test_pixels_that_do_not_fit_the_grids_are_refused():
    params, config = tower()
    with pytest.raises(ValueError, match=r"\(4, 3, 14, 14\), expected \(8, 3, 14, 14\)"):
        vision.encode_images(params, config, pixels([(1, 2, 2)]), ((1, 2, 4),))
