"""What a run of requests adds up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripts.load.targets import Sample

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Objective:
    """Seconds that a request may take to its first token, and per token after that."""

    ttft: float
    tpot: float

    def met_by(self, sample: Sample) -> bool:
        """Whether one request kept it."""
        if sample.error or not sample.arrivals:
            return False
        return ttft(sample) <= self.ttft and (tpot(sample) or 0.0) <= self.tpot


@dataclass(frozen=True)
class Report:
    """Figures of one load level; times in milliseconds by percentile."""

    load: str
    requests: int
    failures: int
    requests_per_second: float
    tokens_per_second: float
    goodput: float
    """Requests per second that kept the objective."""
    cached_share: float
    """Tokens that came from the prefix cache, per request."""
    times: dict[str, dict[int, float]]
    first_error: str = ""


def ttft(sample: Sample) -> float:
    """Seconds from sending to the first piece."""
    return sample.arrivals[0] - sample.sent


def tpot(sample: Sample) -> float | None:
    """Mean seconds per token after the first; None for a single one."""
    if sample.tokens < 2 or not sample.arrivals:
        return None
    return (sample.arrivals[-1] - sample.arrivals[0]) / (sample.tokens - 1)


def summarize(load: str, samples: Sequence[Sample], seconds: float, objective: Objective) -> Report:
    """Figures over the samples of `seconds` of load. Failures count in nothing but themselves."""
    good = [sample for sample in samples if not sample.error and sample.arrivals]
    measured = {
        "TTFT": [ttft(sample) for sample in good],
        "TPOT": [value for sample in good if (value := tpot(sample)) is not None],
        "ITL": [b - a for sample in good for a, b in pairwise(sample.arrivals)],
        "end to end": [sample.arrivals[-1] - sample.sent for sample in good],
        "queue": [sample.queue for sample in good if sample.queue is not None],
    }
    return Report(
        load=load,
        requests=len(samples),
        failures=len(samples) - len(good),
        requests_per_second=len(good) / seconds,
        tokens_per_second=sum(sample.tokens for sample in good) / seconds,
        goodput=sum(map(objective.met_by, samples)) / seconds,
        cached_share=sum(sample.cached_tokens for sample in good) / max(1, len(good)),
        times={
            name: {p: percentile(values, p) * 1e3 for p in PERCENTILES}
            for name, values in measured.items()
            if values
        },
        first_error=next((sample.error for sample in samples if sample.error), ""),
    )


def percentile(values: Sequence[float], p: float) -> float:
    """The smallest value that at least `p` percent are no larger than."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)]


def sustainable(reports: Sequence[tuple[int, Report]], objective: Objective) -> int | None:
    """The largest concurrency whose p95 of both times keeps the objective, without failures."""
    kept = [
        concurrency
        for concurrency, report in reports
        if not report.failures
        and report.times["TTFT"][95] <= objective.ttft * 1e3
        and report.times.get("TPOT", {}).get(95, 0.0) <= objective.tpot * 1e3
    ]
    return max(kept, default=None)


def table(report: Report) -> list[str]:
    """A report for people."""
    lines = [
        f"{report.load}: {report.requests} requests, {report.failures} failed, "
        f"{report.requests_per_second:.2f} requests/s, {report.tokens_per_second:.1f} tokens/s, "
        f"goodput {report.goodput:.2f} requests/s, {report.cached_share:.0f} tokens cached each"
    ]
    if report.first_error:
        lines.append(f"  first error: {report.first_error}")
    for name, values in report.times.items():
        cells = "  ".join(f"p{p} {value:8.1f}" for p, value in values.items())
        lines.append(f"  {name:<10} {cells}  ms")
    return lines
