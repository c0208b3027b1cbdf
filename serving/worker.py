"""One engine behind one gRPC port: the scheduler protocol, k3jax.v1, health and reflection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as pb_grpc

from k3jax.engine.request import TokenEvent
from k3jax.model.params import VisionParams
from serving.cache_events import CachePublisher
from serving.constraints import ConstraintCompiler
from serving.engine_loop import EngineFailed, EngineLike, EngineLoop
from serving.images import ImageEncoder
from serving.introspection import IntrospectionServicer
from serving.load import LoadMeter
from serving.metrics import Metrics
from serving.proto import k3jax_v1_pb2, k3jax_v1_pb2_grpc
from serving.request_log import RequestLog, RequestRecord
from serving.security import BearerToken, Tls
from serving.served_model import ServedModel
from serving.service_state import ServiceState
from serving.servicer import SchedulerServicer
from serving.tracing import RequestSpans

log = logging.getLogger("k3jax.serving")

MAX_MESSAGE_BYTES = 256 << 20
"""A maximal image is 147 MiB of float32 patches."""

OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

DRAIN_POLL_SECONDS = 0.02

STOP_SECONDS = 0.25
"""For the last bytes of finished calls."""

SCHEDULER = pb.DESCRIPTOR.services_by_name["TokenSpeedScheduler"].full_name
INTROSPECTION = k3jax_v1_pb2.DESCRIPTOR.services_by_name["Introspection"].full_name


class Worker:
    """Starts not ready: probes are answered, requests refused, until `state` says otherwise.

    `page_size` is the block size under which cached prefixes are announced; `spans`, if there are
    any, get every request that ends.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineLike,
        state: ServiceState,
        *,
        max_rows: int,
        page_size: int,
        vision: VisionParams | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        self.state, self.model = state, model
        self.loop = EngineLoop(engine)
        self.requests = RequestLog()
        self.publisher = CachePublisher(page_size)
        self.constraints = ConstraintCompiler(model.text.tokenizer, model.text.config.eos_token_ids)
        self.meter = LoadMeter(self.loop, max_rows=max_rows, page_size=page_size)
        self.metrics = Metrics(self.loop, model.name, page_size=page_size)
        self._spans = spans
        self.images: ImageEncoder | None = None
        if vision is not None and model.text.config.vision is not None:
            self.images = ImageEncoder(vision, model.text.config.vision, self.loop)
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(
        self, address: str = "127.0.0.1:0", *, tls: Tls | None = None, token: str | None = None
    ) -> int:
        """Listen on `HOST:PORT` (0 finds a port), run the engine, and return the port.

        Raises OSError when the address cannot be had.
        """
        self.loop.on_step = self._on_step
        self.loop.on_failure = self._on_failure
        self.loop.on_cache_changes = self.publisher.apply
        self.requests.on_end = self._on_end
        self.state.on_change = self._publish_health
        self._server = grpc.aio.server(
            interceptors=[BearerToken(token)] if token else [],
            options=OPTIONS,
        )
        self._add_services(self._server)
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        self._publish_health(self.state.ready)
        self.loop.start()
        await self._server.start()
        return self.port

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new requests, let open ones finish for a while, then stop everything."""
        self.state.set_not_ready("draining")
        await self._health.enter_graceful_shutdown()
        deadline = time.monotonic() + grace_seconds
        while self.requests.num_open and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        # What is left are calls cut off by the deadline, and watchers, who would stay for ever.
        await self._server.stop(STOP_SECONDS if grace_seconds else 0)
        await self.loop.stop(max(grace_seconds, 1.0))
        self.constraints.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()

    def _add_services(self, server: grpc.aio.Server) -> None:
        scheduler = SchedulerServicer(
            self.model,
            self.loop,
            self.state,
            requests=self.requests,
            publisher=self.publisher,
            meter=self.meter,
            constraints=self.constraints,
            images=self.images,
        )
        pb_grpc.add_TokenSpeedSchedulerServicer_to_server(scheduler, server)
        introspection = IntrospectionServicer(self.loop, self.state, self.requests, self.publisher)
        k3jax_v1_pb2_grpc.add_IntrospectionServicer_to_server(introspection, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SCHEDULER, INTROSPECTION, HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    def _on_step(self, events: Sequence[TokenEvent], seconds: float) -> None:
        self.meter.count(events)
        self.metrics.step_ended(events, seconds)

    def _on_end(self, record: RequestRecord) -> None:
        self.metrics.request_ended(record)
        if self._spans is not None:
            self._spans.request_ended(record)

    def _on_failure(self, failure: EngineFailed) -> None:
        self.state.set_not_ready(str(failure))

    def _publish_health(self, ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SCHEDULER, INTROSPECTION):
            task = asyncio.get_running_loop().create_task(self._health.set(name, status))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
