"""Prometheus metrics under the names that dashboards and autoscalers know from vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from k3jax.engine.request import TokenEvent
from serving.compile_count import CompileCount
from serving.engine_loop import EngineLoop
from serving.introspection import numbers
from serving.request_log import RequestRecord

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

_LABELS = ("model_name", "engine")


class Metrics:
    """One registry for one engine; gauges are read from the engine loop when scraped."""

    def __init__(self, loop: EngineLoop, model_name: str, *, page_size: int) -> None:
        self.registry = CollectorRegistry()
        self._loop, self._page_size = loop, page_size
        self._values = (model_name, "0")
        self._token_times: dict[tuple[str, int], float] = {}
        self._ttft = self._seconds("vllm:time_to_first_token_seconds", "Arrival to first token.")
        self._itl = self._seconds("vllm:inter_token_latency_seconds", "Between two tokens.")
        self._tpot = self._seconds(
            "vllm:request_time_per_output_token_seconds", "Mean per token after the first."
        )
        self._queue = self._seconds("vllm:request_queue_time_seconds", "Arrival to admission.")
        self._total = self._seconds("vllm:e2e_request_latency_seconds", "Arrival to end.")
        self._step = self._seconds("k3jax:step_seconds", "Wall time of an engine step.")
        self._finished = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._failed = self._counter("k3jax:request_failure", "Requests that failed.")
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found cached.")
        self._compiled = CompileCount()
        self.registry.register(self)  # pyright: ignore[reportArgumentType]

    def note_ready(self) -> None:
        """From now on nothing should compile."""
        self._compiled.note_ready()

    def collect(self) -> Iterator[Metric]:
        """Gauges, for the registry."""
        stats = self._loop.stats
        gauges = {
            "vllm:num_requests_running": stats.running,
            "vllm:num_requests_waiting": stats.waiting,
            "vllm:kv_cache_usage_perc": stats.pages_running / max(1, stats.pages_total),
        }
        gauges |= {
            "k3jax:compiled_programs": self._compiled.total,
            "k3jax:compiled_programs_after_ready": self._compiled.after_ready,
        }
        for name, value in gauges.items():
            yield self._gauge(name, float(value))
        for name, value in numbers(stats).items():
            if "." not in name:
                yield self._gauge(f"k3jax:{name}", value)
        yield self._by_reason("k3jax:prefix_cache_misses", "Prompts not found.", stats.misses)
        yield self._by_reason("k3jax:prefix_cache_evictions", "Cached.", stats.evictions)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Sizes of the paged cache.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks"),
        )
        config.add_metric((*self._values, str(self._page_size), str(stats.pages_total)), 1.0)
        yield config

    def serve(self, port: int, host: str) -> int:
        """Answer HTTP scrapes; returns the port. Raises OSError when it cannot be had."""
        server, _ = start_http_server(port, addr=host, registry=self.registry)
        return server.server_port

    def step_ended(self, events: Sequence[TokenEvent], seconds: float) -> None:
        """Count one step."""
        if events:
            self._step.observe(seconds)
        now = time.monotonic()
        for event in events:
            key = (event.request_id, event.choice)
            before = self._token_times.pop(key, None)
            if event.token is not None:
                self._generated.inc()
                if before is not None:
                    self._itl.observe(now - before)
                if event.finish_reason is None:
                    self._token_times[key] = now

    def request_ended(self, record: RequestRecord) -> None:
        """Count one request."""
        for index in range(record.n):
            self._token_times.pop((record.id, index), None)
        if record.error:
            self._failed.inc()
            return
        for reason in record.finish_reasons:
            self._finished.labels(*self._values, reason).inc()
        self._prompt.inc(record.prompt_tokens)
        self._queries.inc(record.prompt_tokens)
        self._hits.inc(record.cached_tokens)
        first, total = record.first_token_seconds, record.total_seconds
        for histogram, value in (
            (self._ttft, first),
            (self._total, total),
            (self._queue, record.queue_seconds),
        ):
            if value is not None:
                histogram.observe(value)
        after_first = record.completion_tokens - record.n
        if first is not None and total is not None and after_first > 0:
            self._tpot.observe((total - first) * record.n / after_first)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        histogram = Histogram(name, help_text, _LABELS, buckets=_SECONDS, registry=self.registry)
        return histogram.labels(*self._values)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, _LABELS, registry=self.registry).labels(*self._values)

    def _by_reason(self, name: str, help_text: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=(*_LABELS, "reason"))
        for reason, count in counts.items():
            family.add_metric((*self._values, str(reason)), count)
        return family

    def _gauge(self, name: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, f"{name.partition(':')[2]} of the engine.", labels=_LABELS)
        gauge.add_metric(self._values, value)
        return gauge
