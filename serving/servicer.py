"""Speaks the scheduler protocol of the smg gateway: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as pb_grpc

from k3jax import __version__
from k3jax.engine.request import Request
from serving.cache_events import CachePublisher
from serving.constraints import ConstraintCompiler
from serving.declared_tools import check_declared_tools
from serving.engine_loop import EngineLoop
from serving.images import ImageEncoder
from serving.load import LoadMeter
from serving.reply import Reply
from serving.request_log import RequestLog, RequestRecord
from serving.rich_status import abort
from serving.served_model import ServedModel
from serving.service_state import ServiceState
from serving.tracing import traceparent
from serving.wire import MAX_REQUEST_ID, FieldError, Incoming, to_request

log = logging.getLogger("k3jax.serving")

HEARTBEAT_SECONDS = 1.0
"""How often a subscriber of cache events hears of the load when nothing happens."""

FLUSH_POLL_SECONDS = 0.01


class SchedulerServicer(pb_grpc.TokenSpeedSchedulerServicer):
    """One model on one engine."""

    def __init__(
        self,
        model: ServedModel,
        loop: EngineLoop,
        state: ServiceState,
        *,
        requests: RequestLog,
        publisher: CachePublisher,
        meter: LoadMeter,
        constraints: ConstraintCompiler,
        images: ImageEncoder | None = None,
    ) -> None:
        self._model, self._loop, self._state = model, loop, state
        self._requests, self._publisher, self._meter = requests, publisher, meter
        self._constraints, self._images = constraints, images

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run a request. A call that is cancelled, or whose deadline passes, is aborted."""
        record = RequestRecord(
            id=request.request_id[:MAX_REQUEST_ID],
            prompt_tokens=len(request.tokenized.input_ids),
            n=request.sampling_params.n or 1,
            traceparent=traceparent(context.invocation_metadata()),
        )
        error = "cancelled"
        try:
            self._state.check()
            incoming = to_request(request, self._model.limits)
            record.id = incoming.request.id
            self._requests.open(record)
            async for response in self._run(incoming, request, record):
                yield response
            error = ""
            context.set_trailing_metadata(_times(record))
        except Exception as problem:
            error = str(problem) or type(problem).__name__
            await abort(context, problem)
        finally:
            self._requests.close(record, error)

    async def _run(
        self, incoming: Incoming, message: pb.GenerateRequest, record: RequestRecord
    ) -> AsyncIterator[pb.GenerateResponse]:
        request = await self._prepare(incoming, message)
        reply = Reply(request, incoming.delivery, self._model.text.tokenizer)
        stream = self._loop.submit(request)
        try:
            while not reply.done:
                responses = list(reply.push(await stream.next()))
                record.update(reply)
                for response in responses:
                    yield response
        finally:
            stream.close()

    async def _prepare(self, incoming: Incoming, message: pb.GenerateRequest) -> Request:
        """Add what takes time to make: the constraint, and the features of images."""
        request = incoming.request
        check_declared_tools(self._model.text.tokenizer, request.prompt)
        if incoming.constraint is not None:
            constraint = await self._constraints.compile(incoming.constraint, request.prompt)
            request = replace(request, constraint=constraint)
        if message.mm_inputs.items:
            if self._images is None:
                raise FieldError("mm_inputs", f"{self._model.name} has no vision tower")
            images = await self._images.encode(message.mm_inputs.items, request.prompt)
            request = replace(request, images=images)
        return request

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """End a request with reason `abort`."""
        found = self._loop.abort(request.request_id)
        log.info("abort %s: %s (%s)", request.request_id, found, request.reason)
        message = "" if found else f"no open request {request.request_id!r}"
        return pb.AbortResponse(success=found, message=message)

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Whether requests are taken, and why not."""
        return pb.HealthCheckResponse(healthy=self._state.ready, message=self._state.reason or "ok")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """Names, limits and defaults of the model."""
        return self._model.info()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Sizes, versions and how structured output is done."""
        load = self._meter.read()
        info = pb.GetServerInfoResponse(
            active_requests=self._loop.open_requests,
            uptime_seconds=time.time() - self._state.started,
            max_total_num_tokens=load.max_total_num_tokens,
            tokenspeed_version=f"k3jax-{__version__}",
            constrained_decoding="requested",
        )
        info.start_time.FromNanoseconds(int(self._state.started * 1e9))
        info.server_args.update(
            {
                "max_running_requests": load.max_running_requests,
                "block_size": self._publisher.block_size,
                "constrained_decoding_start": "first_token",
                "grammar_backend": "llguidance",
            }
        )
        return info

    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        """Requests, pools and speed, now."""
        load = self._meter.read()
        return pb.GetLoadsResponse(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=f"k3jax-{__version__}",
            dp_rank_count=1,
            loads=[load],
            aggregate=pb.AggregateMetrics(
                total_running_reqs=load.num_running_reqs,
                total_waiting_reqs=load.num_waiting_reqs,
                total_reqs=load.num_total_reqs,
                avg_token_usage=load.token_usage,
                avg_throughput=load.gen_throughput,
                avg_utilization=load.utilization,
            ),
        )

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        """The tokenizer's files."""
        for chunk in self._model.tokenizer_chunks():
            yield chunk

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common.KvEventBatch]:
        """Cache events with the load, and the load alone when nothing happens."""
        subscription = self._publisher.subscribe(request.start_sequence_number)
        await context.send_initial_metadata(())
        sequence, sample = 0, 0
        try:
            while not subscription.lagged:
                batch = await subscription.next(HEARTBEAT_SECONDS)
                sample += 1
                if batch is None:
                    if sequence or request.load_records_before_first_batch:
                        batch = common.KvEventBatch(sequence_number=sequence, timestamp=time.time())
                        batch.load.CopyFrom(self._meter.record(sample, load_only=True))
                        yield batch
                    continue
                sequence = batch.sequence_number
                sent = common.KvEventBatch()
                sent.CopyFrom(batch)
                sent.load.CopyFrom(self._meter.record(sample, load_only=False))
                yield sent
        finally:
            subscription.close()

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common.FlushCacheResponse:
        """Forget all prefixes, once no request is open."""
        deadline = time.monotonic() + request.timeout_s
        while self._loop.open_requests:
            if time.monotonic() >= deadline:
                count = self._loop.open_requests
                return common.FlushCacheResponse(
                    success=False, message=f"{count} requests are open"
                )
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        await self._loop.call(lambda engine: engine.flush_cache())
        return common.FlushCacheResponse(success=True, message="flushed")


def _times(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a finished request, in seconds."""
    found = {
        "k3jax-queue-seconds": record.queue_seconds,
        "k3jax-first-token-seconds": record.first_token_seconds,
    }
    times = [(name, f"{value:.6f}") for name, value in found.items() if value is not None]
    return (*times, ("k3jax-cached-tokens", str(record.cached_tokens)))
