"""Runs workers and gateways for tests, on ports of their own, and ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as pb_grpc

from k3jax.bundled import bundled_model
from k3jax.text_model import TextModel
from serving.engine_loop import EngineLike
from serving.gateway import Gateway, GatewayOptions, free_port
from serving.served_model import ServedModel
from serving.service_state import ServiceState
from serving.worker import OPTIONS, Worker

PAGE_SIZE = 64


class RunningWorker:
    """A worker on an event loop of its own thread, and a blocking client of it."""

    def __init__(
        self,
        make_engine: Callable[[], EngineLike],
        *,
        model: ServedModel | None = None,
        max_rows: int = 16,
        token: str | None = None,
        tls: Any = None,
        ready: bool = True,
        **options: Any,
    ) -> None:
        self.model = model or nano()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.stopped = False

        async def start() -> Worker:
            worker = Worker(
                self.model,
                make_engine(),
                ServiceState(),
                max_rows=max_rows,
                page_size=PAGE_SIZE,
                **options,
            )
            await worker.start("127.0.0.1:0", token=token, tls=tls)
            if ready:
                worker.state.set_ready()
            return worker

        self.worker = self.run(start())
        self.address = f"127.0.0.1:{self.worker.port}"
        self.url = f"grpc://{self.address}"
        self.channel = grpc.insecure_channel(self.address, options=OPTIONS)
        self.stub = pb_grpc.TokenSpeedSchedulerStub(self.channel)

    def run(self, coroutine: Any, timeout: float = 60) -> Any:
        """Run a coroutine on the worker's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def generate(self, *prompt: int, **fields: Any) -> list[pb.GenerateResponse]:
        """All responses to one request."""
        return list(self.stub.Generate(request(*prompt, **fields), timeout=60))

    def set_ready(self) -> None:
        """Take requests from now on."""

        async def on_loop() -> None:
            self.worker.state.set_ready()

        self.run(on_loop())

    def drain(self, grace: float = 10.0) -> None:
        """Drain and stop."""
        if not self.stopped:
            self.stopped = True
            self.run(self.worker.drain(grace))

    def close(self) -> None:
        """End everything at once."""
        self.channel.close()
        self.drain(0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def nano(name: str = "nano", max_context: int | None = None) -> ServedModel:
    """The bundled model, to be served under a name."""
    text = TextModel.open(bundled_model())
    return ServedModel(text, name, max_context or text.config.max_context)


def request(
    *prompt: int, request_id: str = "", stream: bool = True, **sampling: Any
) -> pb.GenerateRequest:
    """A request; keyword arguments are sampling parameters."""
    message = pb.GenerateRequest(
        request_id=request_id, stream=stream, sampling_params=pb.SamplingParams(**sampling)
    )
    message.tokenized.input_ids.extend(prompt or (5, 6, 7))
    return message


def tokens(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    """The ids of one choice's chunks, joined."""
    chunks = [r.chunk for r in responses if r.WhichOneof("response") == "chunk"]
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def completes(responses: list[pb.GenerateResponse]) -> list[pb.GenerateComplete]:
    """The ends of all choices, by index."""
    found = [r.complete for r in responses if r.WhichOneof("response") == "complete"]
    return sorted(found, key=lambda complete: complete.index)


@contextmanager
def running_worker(
    make_engine: Callable[[], EngineLike], **options: Any
) -> Iterator[RunningWorker]:
    """A worker for the length of a block."""
    running = RunningWorker(make_engine, **options)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def running_gateway(
    *workers: RunningWorker, lines: list[str] | None = None, **options: Any
) -> Iterator[Gateway]:
    """The real gateway before some workers, for the length of a block; `lines` gets its output."""
    lines = [] if lines is None else lines
    chosen = {
        "host": "127.0.0.1",
        "port": free_port(),
        "metrics_port": free_port(),
        "workers": [worker.url for worker in workers],
        "grace_seconds": 2,
    }
    with Gateway(GatewayOptions(**{**chosen, **options}), say=lines.append) as gateway:
        try:
            gateway.wait_ready(60)
        except Exception:
            print(*lines, sep="\n")
            raise
        yield gateway
