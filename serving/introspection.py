"""The k3jax.v1 service: request times, pools, resumable prefixes, and the start-up's phases."""

from __future__ import annotations

import dataclasses

import grpc

from serving.cache_events import CachePublisher
from serving.engine_loop import EngineLoop
from serving.proto import k3jax_v1_pb2 as pb
from serving.proto import k3jax_v1_pb2_grpc as pb_grpc
from serving.request_log import RequestLog, RequestRecord
from serving.rich_status import abort
from serving.service_state import ServiceState

DEFAULT_LIMIT = 100


class IntrospectionServicer(pb_grpc.IntrospectionServicer):
    """Reads what the service keeps; asks nothing of the engine."""

    def __init__(
        self,
        loop: EngineLoop,
        state: ServiceState,
        requests: RequestLog,
        publisher: CachePublisher,
    ) -> None:
        self._loop, self._state = loop, state
        self._requests, self._publisher = requests, publisher

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: grpc.aio.ServicerContext
    ) -> pb.RequestReport:
        """One request; NOT_FOUND when it is unknown or forgotten."""
        try:
            return _report(self._requests.find(request.request_id))
        except KeyError as error:
            await abort(context, error)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRequestsResponse:
        """Open requests, then the latest finished ones."""
        records = self._requests.latest(request.limit or DEFAULT_LIMIT)
        return pb.ListRequestsResponse(requests=map(_report, records))

    async def GetCache(
        self, request: pb.GetCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.CacheReport:
        """Counters of the engine, and the prefixes that can be resumed."""
        return pb.CacheReport(
            stats=numbers(self._loop.stats),
            prefixes=[
                pb.Prefix(num_tokens=tokens, block_hash=block_hash)
                for tokens, block_hash in self._publisher.prefixes()
            ],
        )

    async def GetReadiness(
        self, request: pb.GetReadinessRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReadinessReport:
        """Whether requests are taken, why not, and what the start-up did."""
        phases = [
            pb.Phase(name=phase.name, seconds=phase.seconds, bytes=phase.bytes)
            for phase in self._state.phases
        ]
        return pb.ReadinessReport(ready=self._state.ready, reason=self._state.reason, phases=phases)


def numbers(stats: object, prefix: str = "") -> dict[str, float]:
    """The numeric fields of a dataclass, those of nested ones and mappings as `outer.inner`."""
    found: dict[str, float] = {}
    if dataclasses.is_dataclass(stats):
        items = [(field.name, getattr(stats, field.name)) for field in dataclasses.fields(stats)]
    elif isinstance(stats, dict):
        items = list(stats.items())
    else:
        items = []
    for name, value in items:
        key = f"{prefix}{name}"
        if isinstance(value, int | float):
            found[key] = float(value)
        else:
            found |= numbers(value, f"{key}.")
    return found


def _report(record: RequestRecord) -> pb.RequestReport:
    return pb.RequestReport(
        request_id=record.id,
        state=record.state,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        finish_reasons=record.finish_reasons,
        queue_seconds=record.queue_seconds,
        first_token_seconds=record.first_token_seconds,
        total_seconds=record.total_seconds,
        error=record.error,
    )
