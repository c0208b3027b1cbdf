"""Packing: what a step's arrays say about media tokens."""

from dataclasses import replace

import numpy as np

from k3jax.config import K3Config
from k3jax.engine.batch import Packer
from k3jax.engine.generate import PromptImages
from k3jax.engine.request import Request, SamplingParams
from k3jax.engine.sequence import Row, Sequence, StepPlan
from tests.helpers import K3_TINY


def test_a_media_token_that_was_generated_keeps_its_embedding_when_computed_again():
    config = replace(K3Config.from_hf(K3_TINY), hidden_size=5)
    assert config.vision is not None
    media = config.vision.media_token_id
    features = np.arange(10, dtype=np.float32).reshape(2, 5) + 1
    embedding = np.full(5, -7, np.float32)
    packer = Packer(config, max_rows=2, page_size=4, contexts=(32,), media_embedding=embedding)
    request = Request("a", (1, media, media, 2), images=PromptImages(features))
    tokens = [*request.prompt, 3, media, 4]
    sequence = Sequence(request, 0, SamplingParams(), 0, 9, frozenset(), tokens, tokens, None)
    sequence.lane, sequence.pages = 0, [3, 1]
    packer.admit(sequence)
    row = Row(sequence, start=2, length=5, read_slot=0, write_slot=0, emits=True, decodes=False)
    inputs = packer.pack(StepPlan([row], num_rows=1, width=6))
    assert inputs.images is not None
    found = np.asarray(inputs.images.features)[int(inputs.images.first[0]) :]
    np.testing.assert_array_equal(found[:2], [features[1], embedding])
    np.testing.assert_array_equal(inputs.tokens[0], [media, 2, 3, media, 4, 0])
