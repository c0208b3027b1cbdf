"""Spans of requests: whose trace they join, and what they tell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from openai import OpenAI
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from serving.tracing import RequestSpans, exporting, traceparent
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import RunningWorker, nano, request, running_gateway, running_worker
from tests.serving.scripted import Replies
from tests.serving.waiting import eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def traced() -> Iterator[tuple[RunningWorker, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = FakeEngine(step_seconds=0.005)
    with running_worker(lambda: engine, spans=RequestSpans(provider, "nano")) as worker:
        yield worker, exporter


def only_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    assert eventually(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    return span


def test_request_is_a_span_under_its_callers(traced: tuple[RunningWorker, InMemorySpanExporter]):
    worker, exporter = traced
    message = request(5, 6, 7, request_id="r1", max_new_tokens=4)

    list(worker.stub.Generate(message, metadata=(("traceparent", HEADER),), timeout=30))

    span = only_span(exporter)
    assert span.context is not None and span.parent is not None
    assert span.context.trace_id == int(TRACE, 16)
    assert span.parent.span_id == int(PARENT, 16)
    attributes: Any = span.attributes
    assert attributes["gen_ai.request.id"] == "r1"
    assert attributes["gen_ai.usage.prompt_tokens"] == 3
    assert attributes["gen_ai.usage.completion_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == "length"
    assert attributes["gen_ai.latency.e2e"] >= attributes["gen_ai.latency.time_to_first_token"] > 0
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert [event.name for event in span.events] == ["admitted", "first token"]
    assert times == sorted(times)  # pyright: ignore[reportArgumentType]
    assert span.status.status_code is StatusCode.UNSET


def test_refused_request_is_a_span_with_its_error(
    traced: tuple[RunningWorker, InMemorySpanExporter],
):
    worker, exporter = traced

    with pytest.raises(grpc.RpcError):
        worker.generate(5, temperature=-1)

    span = only_span(exporter)
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    assert "temperature" in (span.status.description or "")
    assert not span.events


@pytest.mark.parametrize(
    "header", ["", "00-short-b7ad6b7169203331-01", f"00-{TRACE}-{PARENT}", b"\xff"]
)
def test_malformed_context_is_none(header: Any):
    assert traceparent([("other", "x"), ("traceparent", header)]) == ""
    assert traceparent(None) == ""
    assert traceparent([("traceparent", HEADER)]) == HEADER


def test_without_an_endpoint_nothing_of_it_is_imported():
    code = "import sys, serving.worker_process; print('opentelemetry' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert found.stdout.strip() == "False"


class Collector(collector_grpc.TraceServiceServicer):
    """Keeps the spans that are exported to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return collector_pb.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    collector_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def test_collector_gets_the_span_of_a_request_through_the_gateway_in_its_callers_trace():
    model = nano()
    replies = Replies(model.text.tokenizer, {})
    engine = FakeEngine(replies, eos=model.text.config.eos_token_ids)
    lines: list[str] = []
    with (
        collecting() as (collector, address),
        running_worker(lambda: engine, spans=exporting(address, "nano")) as worker,
        running_gateway(worker, otlp=address, lines=lines) as gateway,
    ):
        ask_traced(gateway.url)
        worker.drain()  # which sends what is left

        spans = {span.name: span for span in collector.spans}
        assert spans["llm_request"].trace_id.hex() == TRACE
        assert spans["llm_request"].parent_span_id
        values = {a.key: a.value for a in spans["llm_request"].attributes}
        assert values["gen_ai.usage.completion_tokens"].int_value > 0
        assert not [line for line in lines if " INFO " in line], "logged for the sake of spans"


def test_spans_of_the_last_request_are_sent_though_the_gateway_is_stopped_at_once():
    model = nano()
    engine = FakeEngine(Replies(model.text.tokenizer, {}), eos=model.text.config.eos_token_ids)
    with (
        collecting() as (collector, address),
        running_worker(lambda: engine) as worker,
    ):
        with running_gateway(worker, otlp=address) as gateway:
            ask_traced(gateway.url)

        assert any(span.trace_id.hex() == TRACE for span in collector.spans)
        assert gateway.process.returncode == 0, "it was ended before it had sent what was left"


def ask_traced(url: str) -> None:
    """A question to the gateway within the trace of `HEADER`."""
    OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "hi"}],
        extra_headers={"traceparent": HEADER},
    )
