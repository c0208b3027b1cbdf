"""Warm-up: what it says, what it refuses, and that nothing compiles after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

import k3jax
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import Request, SamplingParams
from k3jax.text_model import TextModel
from serving.memory import NotEnoughMemory, plan_memory
from serving.served_model import ServedModel
from serving.warm_up import WarmUp
from tests.random_weights import write_text_model
from tests.serving.running import RunningWorker, running_worker

CONTEXT, ROWS = 192, 2
SIZES = EngineConfig(
    max_rows=ROWS, max_context=CONTEXT, prefill_shapes=((1, 64),), decode_rows=(ROWS,)
)


class Warmed:
    """A worker of a toy model with vision, and the means to warm it up."""

    def __init__(self, worker: RunningWorker, engine: Engine) -> None:
        self.worker, self.engine = worker, engine
        self.lines: list[str] = []
        self.plan = plan_memory(engine.params, engine.config, engine.settings)

    def warm_up(self, free: int | None) -> None:
        plan = replace(self.plan, free=free)
        warm_up = WarmUp(self.worker.worker, self.engine, plan, self.lines.append)
        self.plan = self.worker.run(warm_up.run(), timeout=300)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warmed]:
    text = TextModel.open(write_text_model(tmp_path_factory.mktemp("models") / "toy"))
    params, config = k3jax.load_model(text.folder)
    engine = Engine(params, config, SIZES)
    model = ServedModel(text, "toy", CONTEXT)
    with running_worker(lambda: engine, model=model, max_rows=ROWS, vision=params.vision) as worker:
        yield Warmed(worker, engine)


def test_a_step_without_room_is_refused_before_it_runs(warmed: Warmed):
    state = warmed.engine.state

    with pytest.raises(NotEnoughMemory, match=r"for the largest step, .* but .* are free"):
        warmed.warm_up(free=warmed.plan.wanted * 20 // 19)

    assert warmed.engine.state is state
    assert warmed.worker.worker.state.reason == "starting: compile"


def test_programs_and_probes_are_told_and_nothing_compiles_afterwards(warmed: Warmed):
    warmed.warm_up(free=10**12)

    said = "\n".join(warmed.lines)
    for piece in (
        "1 x 64 tokens, context 192, images",
        "2 x 1 tokens, context 192",
        "images of 1024 patches",
        "largest image",
    ):
        assert piece in said
    assert warmed.plan.programs["largest step"] > 0 and warmed.plan.programs["vision tower"] > 0

    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for features in (6, 35):
            assert warmed.worker.run(_ask_with_image(warmed, features)) == 3
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


async def _ask_with_image(warmed: Warmed, features: int) -> int:
    """Tokens of an answer to an image of one row of merged cells, a size that no probe had."""
    worker, vision = warmed.worker.worker, warmed.engine.config.vision
    assert worker.images is not None and vision is not None
    merge, size = vision.merge_size, vision.patch_size
    grid = (1, merge, merge * features)
    pixels = np.ones((grid[1] * grid[2], 3, size, size), np.float32)
    images = await worker.images._features([(pixels, grid)])
    prompt = (1, *[vision.media_token_id] * features, 2)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    stream = worker.loop.submit(Request(f"i{features}", prompt, sampling, images=images))
    events = []
    try:
        while not events or events[-1].finish_reason is None:
            events += await stream.next()
    finally:
        stream.close()
    return len(events)
