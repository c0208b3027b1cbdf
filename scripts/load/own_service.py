"""A service of the benchmark's own, and the bare engine on the same model beside it."""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3jax.bundled import BUNDLED, bundled_model
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import Request, SamplingParams
from k3jax.text_model import TextModel
from k3jax.weights import load_model, save_native
from scripts.benchmark_model import random_params, small_config
from scripts.load.targets import NO_THINKING, Sample
from scripts.nano import vocabulary
from serving.engine_loop import EngineLike
from serving.options import EngineSizes, ServeOptions, WorkerOptions
from serving.server import Service

SPECIALS = 256
"""Ids after the ranks in K3's layout."""


@dataclass(frozen=True)
class OwnService:
    """Where the service answers; stopped at the end of the block that made it."""

    grpc: str
    http: str
    model: str


@contextmanager
def started(folder: Path, sizes: EngineSizes) -> Iterator[OwnService]:
    """`k3jax serve` on a model folder and free ports of this machine."""
    name = folder.name
    worker = WorkerOptions(
        str(folder), name, listen="127.0.0.1:0", sizes=sizes, log_level="error", drain_seconds=2
    )
    service = Service(
        ServeOptions(worker, http="127.0.0.1:0"), lambda line: print(line, flush=True)
    )
    with service.started() as gateway:
        assert gateway is not None
        yield OwnService(service.addresses[0], gateway.url, name)


@contextmanager
def model_folder(name: str, weights: str) -> Iterator[Path]:
    """The bundled model, or `benchmark_model.py`'s seeded one written for the length of a block."""
    with ExitStack() as stack:
        if name == BUNDLED:
            yield bundled_model()
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / name
        config = small_config()
        config = replace(
            config,
            bos_token_id=config.vocab_size - SPECIALS,
            eos_token_ids=(config.vocab_size - SPECIALS + 2,),
            pad_token_id=config.vocab_size - 1,
        )
        save_native(random_params(config, weights), config, folder)
        vocabulary.write(folder, _tokens(config.vocab_size - SPECIALS))
        yield folder


class BareEngine:
    """An engine alone, in this process and on this thread."""

    def __init__(self, engine: EngineLike, model: TextModel) -> None:
        self._engine, self.model = engine, model
        self._number = 0

    @classmethod
    def load(cls, folder: Path, sizes: EngineSizes) -> BareEngine:
        """Load and compile."""
        model = TextModel.open(folder)
        params, _ = load_model(folder, progress=False)
        given: dict[str, Any] = sizes.given()
        engine = Engine(params, model.config, EngineConfig(**given))
        engine.warm_up()
        return cls(engine, model)

    def run(
        self, conversations: Sequence[Any], tokens: int, concurrency: int
    ) -> tuple[list[Sample], float]:
        """Each conversation continued by `tokens` greedy ids, so many at a time; the seconds."""
        prompts = [self.model.chat_prompt(c, NO_THINKING).tokens for c in conversations]
        waiting, samples = list(reversed(prompts)), {}
        start = time.perf_counter()
        while waiting or self._engine.has_work:
            while waiting and sum(s.tokens < tokens for s in samples.values()) < concurrency:
                self._number += 1
                sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
                request = Request(f"b{self._number}", waiting.pop(), sampling)
                samples[request.id] = Sample(time.perf_counter())
                self._engine.submit(request)
            for event in self._engine.step():
                sample = samples[event.request_id]
                sample.arrivals.append(time.perf_counter())
                sample.tokens += 1
                sample.cached_tokens = event.cached_tokens
        return list(samples.values()), time.perf_counter() - start


def _tokens(count: int) -> list[bytes]:
    """The bundled model's ranks, then text that nobody writes."""
    lines = (bundled_model() / "tiktoken.model").read_bytes().splitlines()
    known = [base64.b64decode(line.split()[0]) for line in lines]
    return [*known, *(b" ~%d~" % number for number in range(count - len(known)))]
