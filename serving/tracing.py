"""One OpenTelemetry span per request, under the trace that its caller sends along as `traceparent`.

Needs the extra `otel`; without an endpoint nothing of it is imported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from serving.request_log import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent(metadata: Iterable[Any] | None) -> str:
    """The W3C trace context of a call, or nothing without a well-formed one."""
    for key, value in metadata or ():
        if key == "traceparent":
            well_formed = isinstance(value, str) and _TRACEPARENT.fullmatch(value)
            return value if well_formed else ""
    return ""


class RequestSpans:
    """Makes a span of every request that ends; attributes have the names that vLLM gives them."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model_name = provider, model_name
        self._tracer = provider.get_tracer("k3jax.serving")
        self._propagator = TraceContextTextMapPropagator()

    def request_ended(self, record: RequestRecord) -> None:
        """Tell of one request: attributes, and events when it left the queue and when it spoke."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {"traceparent": record.traceparent} if record.traceparent else {}
        now = time.monotonic()
        offset = time.time_ns() - int(now * 1e9)

        def at(moment: float) -> int:
            return int(moment * 1e9) + offset

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=at(record.arrived),
            attributes=self._attributes(record),
        )
        if record.timing is not None:
            span.add_event("admitted", timestamp=at(record.timing.admitted))
        if record.first_token is not None:
            span.add_event("first token", timestamp=at(record.first_token))
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(at(now if record.ended is None else record.ended))

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord) -> dict[str, str | int | float]:
        found: dict[str, str | int | float | None] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": record.id,
            "gen_ai.request.n": record.n,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.cached_tokens": record.cached_tokens,
            "gen_ai.usage.completion_tokens": record.completion_tokens,
            "gen_ai.response.finish_reasons": ",".join(record.finish_reasons),
            "gen_ai.latency.time_in_queue": record.queue_seconds,
            "gen_ai.latency.time_to_first_token": record.first_token_seconds,
            "gen_ai.latency.e2e": record.total_seconds,
        }
        return {name: value for name, value in found.items() if value is not None}


def exporting(endpoint: str, model_name: str) -> RequestSpans:
    """Spans that go to an OTLP collector's gRPC port, `HOST:PORT`, in the background.

    Raises ValueError without the extra.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ValueError('--otlp needs the extra otel: pip install "k3jax[otel]"') from None
    provider = TracerProvider(resource=Resource.create({"service.name": "k3jax"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestSpans(provider, model_name)
