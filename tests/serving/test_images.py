"""Images from the wire: the tower's features, or a refusal that names what does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

import k3jax
from k3jax.engine.images import image_features
from serving.engine_loop import EngineLoop
from serving.images import ImageEncoder
from serving.wire import FieldError
from tests.helpers import K3_TINY
from tests.serving.fake_engine import FakeEngine

PARAMS, CONFIG = k3jax.load_model(K3_TINY)
VISION = CONFIG.vision
assert VISION is not None and PARAMS.vision is not None
PATCH, MERGE, MEDIA = VISION.patch_size, VISION.merge_size, VISION.media_token_id


def tensor(array: np.ndarray) -> pb.TensorData:
    return pb.TensorData(shape=array.shape, dtype=str(array.dtype), inline=array.tobytes())


def pixels(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    shape = (rows * columns, 3, PATCH, PATCH)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def item(
    rows: int = 2 * MERGE, columns: int = 3 * MERGE, name: str = "grid_thws", seed: int = 0
) -> pb.MultimodalItem:
    grid = np.array([[1, rows, columns]], np.int64)
    return pb.MultimodalItem(
        modality=common.IMAGE,
        encoder_input=tensor(pixels(rows, columns, seed)),
        model_specific_tensors={name: tensor(grid)},
    )


def encode(items: list[pb.MultimodalItem], prompt: list[int]) -> np.ndarray:
    async def run() -> np.ndarray:
        loop = EngineLoop(FakeEngine())
        loop.start()
        try:
            assert PARAMS.vision is not None and VISION is not None
            encoder = ImageEncoder(PARAMS.vision, VISION, loop)
            return np.asarray((await encoder.encode(items, prompt)).features)
        finally:
            await loop.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["grid_thws", "image_grid_thw", "grid_thw"])
def test_features_are_the_towers(name: str):
    rows, columns = 2 * MERGE, 3 * MERGE

    found = encode([item(rows, columns, name)], [1, *[MEDIA] * 6, 2])

    assert PARAMS.vision is not None and VISION is not None
    expected = image_features(PARAMS.vision, VISION, [(pixels(rows, columns), (1, rows, columns))])
    np.testing.assert_array_equal(found, np.asarray(expected))
    assert found.shape == (6, CONFIG.hidden_size)


def test_several_images_come_in_order():
    first, second = item(seed=1), item(MERGE, MERGE, seed=2)

    both = encode([first, second], [MEDIA] * 7)

    np.testing.assert_allclose(both[:6], encode([first], [MEDIA] * 6), atol=1e-5)
    np.testing.assert_allclose(both[6:], encode([second], [MEDIA]), atol=1e-5)


def broken(change: Callable[[pb.MultimodalItem], Any]) -> pb.MultimodalItem:
    result = item()
    change(result)
    return result


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda i: setattr(i, "modality", common.VIDEO), "modality"),
        (lambda i: setattr(i.encoder_input, "inline", b"123"), "encoder_input"),
        (lambda i: setattr(i.encoder_input, "dtype", "bfloat16"), "encoder_input.dtype"),
        (lambda i: i.encoder_input.shm.SetInParent(), "encoder_input"),
        (lambda i: i.encoder_input.CopyFrom(tensor(np.zeros((2, 3), np.float32))), "encoder_input"),
        (lambda i: i.model_specific_tensors.clear(), "model_specific_tensors"),
        (
            lambda i: i.model_specific_tensors["grid_thws"].CopyFrom(
                tensor(np.array([[1, 1, 1]], np.int64))
            ),
            "model_specific_tensors['grid_thws']",
        ),
        (
            lambda i: i.model_specific_tensors["grid_thws"].CopyFrom(
                tensor(np.array([[6 * MERGE * MERGE, 1, 1]], np.int64))
            ),
            "model_specific_tensors['grid_thws']",
        ),
    ],
)
def test_item_that_does_not_fit_is_refused_by_name(
    change: Callable[[pb.MultimodalItem], Any], field: str
):
    with pytest.raises(FieldError) as refused:
        encode([broken(change)], [MEDIA] * 6)

    assert refused.value.field == f"mm_inputs.items[0].{field}"


def test_images_and_media_tokens_must_agree():
    with pytest.raises(FieldError, match="6 features for 5 media tokens"):
        encode([item()], [MEDIA] * 5)
