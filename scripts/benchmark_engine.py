"""Measure what the engine adds to the bare step, and what its prefix cache and scheduling give.

One run on the 205 M-parameter model of benchmark_model.py, everything interleaved over rounds:
decode throughput at several numbers of concurrent requests beside the bare jitted step over the
same rows and context, in turns; host time per step; time to first token of a follow-up turn whose
prefix is cached beside the same prompt cold; and the gaps between tokens of running requests while
a long prompt comes in. Medians.

  python scripts/benchmark_engine.py
  python scripts/benchmark_engine.py --rounds 3 --decode 1,16 --json
  python scripts/benchmark_engine.py --prefix 512 --weights int8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from k3jax.cli.arguments import count
from k3jax.config import K3Config
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.host import keep_freed_memory
from k3jax.engine.request import Request, SamplingParams
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepInputs, StepOutput, StepState, jitted_step
from k3jax.model.params import K3Params
from k3jax.state import DecodeState, Spans
from scripts.arguments import counts
from scripts.benchmark_model import random_params, small_config

PROMPT = 128
STEPS = 24
"""Decode steps of one measurement."""
FOLLOW_UP = 32
"""Tokens that a follow-up turn adds to the shared prefix."""


class Prompts:
    """Random prompts that never repeat."""

    def __init__(self, vocab_size: int):
        self._rng = np.random.default_rng(0)
        self._vocab = vocab_size
        self._number = 0

    def request(self, tokens: int, max_tokens: int, prefix: tuple[int, ...] = ()) -> Request:
        """A request of `prefix` and random tokens, `tokens` in all."""
        self._number += 1
        rest = self._rng.integers(0, self._vocab, tokens - len(prefix)).tolist()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(f"r{self._number}", (*prefix, *rest), sampling)


def bare_decode(params: K3Params, engine: Engine, rows: int) -> Callable[[], float]:
    """Seconds per step of the jitted step alone over `rows` rows of the same context.

    Rows begin with tokens of their own: alike, they would all read the same few experts.
    """
    config, settings = engine.config, engine.settings
    pages = -(-settings.contexts[0] // settings.page_size)
    holder = [
        StepState(
            decode=DecodeState.init(
                config, num_slots=rows, num_pages=rows * pages, page_size=settings.page_size
            )
        )
    ]
    slots = np.arange(rows, dtype=np.int32)
    sampling = SamplingInputs.pack([SamplingParams()] * rows, [0] * rows)
    table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    ones = np.ones(rows, np.int32)
    first = np.random.default_rng(rows).integers(0, config.vocab_size, (rows, 1), np.int32)

    def run() -> float:
        tokens: Any = first
        begin = time.perf_counter()
        for number in range(STEPS):
            spans = Spans(ones, np.full(rows, PROMPT + number, np.int32), slots, slots, table)
            inputs = StepInputs(tokens, spans, slots, ones > 0, sampling)
            output, holder[0] = jitted_step(params, config, inputs, holder[0])
            tokens = output.tokens[:, None]
        jax.block_until_ready(tokens)
        return (time.perf_counter() - begin) / STEPS

    return run


def decode_pair(
    params: K3Params, engine: Engine, prompts: Prompts, rows: int
) -> Callable[[], dict[str, float]]:
    """Seconds per step of the bare step and of the engine with `rows` requests in decode.

    In turns while the requests go on, bare, engine, engine, bare: a machine that becomes slower
    or faster within seconds does so for both.
    """
    bare = bare_decode(params, engine, rows)

    def with_engine() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        jax.block_until_ready(engine.state)
        return (time.perf_counter() - begin) / STEPS

    def run() -> dict[str, float]:
        for _ in range(rows):
            engine.submit(prompts.request(PROMPT, 2 * STEPS + 8 + 8 * rows))
        seen: set[str] = set()
        while len(seen) < rows:
            seen.update(event.request_id for event in engine.step())
        jax.block_until_ready(engine.state)
        first, second, third, fourth = bare(), with_engine(), with_engine(), bare()
        for request_id in seen:
            engine.abort(request_id)
        drain(engine)
        return {"bare": (first + fourth) / 2, "engine": (second + third) / 2}

    return run


class TimedEngine(Engine):
    """An engine that knows how long the runtime's call took in its last step."""

    call = np.zeros(2)

    def _run(self, inputs: StepInputs) -> StepOutput:
        begin = host_clocks()
        output = super()._run(inputs)
        self.call = host_clocks() - begin
        return output


def host_clocks() -> np.ndarray:
    """Seconds by the wall clock, and of this thread's processor time."""
    return np.array([time.perf_counter(), time.thread_time()])


def host_time(engine: TimedEngine, prompts: Prompts, rows: int) -> Callable[[], dict[str, Any]]:
    """Seconds that one step keeps the host busy when the device has nothing left to do.

    `own` is planning, packing and absorbing; `call` is JAX's call of the compiled step. Each by
    the wall clock, which on a CPU includes waiting for a core that the step itself computes on,
    and in processor time.
    """

    def run() -> dict[str, Any]:
        for _ in range(rows):
            engine.submit(prompts.request(PROMPT, STEPS + 8 + 8 * rows))
        seen: set[str] = set()
        while len(seen) < rows:
            seen.update(event.request_id for event in engine.step())
        own, call = [], []
        for _ in range(STEPS):
            jax.block_until_ready(engine.state)
            begin = host_clocks()
            plan = engine.scheduler.plan()
            assert plan is not None
            engine.dispatch(plan)
            dispatched = host_clocks()
            jax.block_until_ready(engine.state)
            ready = host_clocks()
            engine.absorb(0)
            busy = dispatched - begin + host_clocks() - ready
            call.append(engine.call)
            own.append(busy - engine.call)
        for request_id in seen:
            engine.abort(request_id)
        drain(engine)
        return {"own": np.median(own, axis=0), "call": np.median(call, axis=0)}

    return run


def first_token(engine: Engine, request: Request) -> tuple[float, int]:
    """Seconds from submission to the first token, and the cached tokens."""
    drain(engine)
    jax.block_until_ready(engine.state)
    begin = time.perf_counter()
    engine.submit(request)
    while not (events := engine.step()):
        pass
    return time.perf_counter() - begin, events[0].cached_tokens


def follow_up(engine: Engine, prompts: Prompts, prefix: int) -> Callable[[], dict[str, float]]:
    """Time to first token of a turn after a cached prefix, and of as long a cold prompt."""

    def run() -> dict[str, float]:
        opening = prompts.request(prefix, 1)
        first_token(engine, opening)
        turn = prompts.request(prefix + FOLLOW_UP, 1, opening.prompt)
        warm, cached = first_token(engine, turn)
        cold, none = first_token(engine, prompts.request(prefix + FOLLOW_UP, 1))
        assert none == 0
        return {"cold": cold, "warm": warm, "cached": cached}

    return run


def gaps(engine: Engine, prompts: Prompts, rows: int, prompt: int) -> Callable[[], dict[str, Any]]:
    """Gaps between the tokens of running requests, alone and while a long prompt comes in."""

    def run() -> dict[str, Any]:
        drain(engine)
        watched = [prompts.request(PROMPT, 400) for _ in range(rows)]
        for request in watched:
            engine.submit(request)
        last: dict[str, float] = {}
        found: dict[str, list[float]] = {"alone": [], "beside": []}
        arrived: str | None = None
        begin = None
        while True:
            for event in engine.step():
                now = time.perf_counter()
                if event.request_id == arrived:
                    for request in watched:
                        engine.abort(request.id)
                    engine.abort(event.request_id)
                    drain(engine)
                    return found
                if event.request_id in last and begin is not None:
                    kind = "alone" if arrived is None else "beside"
                    found[kind].append(now - last[event.request_id])
                last[event.request_id] = now
            if len(last) == rows and begin is None:
                begin = time.perf_counter()
            if arrived is None and len(found["alone"]) >= 12 * rows:
                long = prompts.request(prompt, 1)
                arrived = long.id
                engine.submit(long)

    return run


def drain(engine: Engine) -> None:
    """Run the engine empty."""
    for _ in engine.run():
        pass


def measure(
    params: K3Params, config: K3Config, batches: list[int], prefix: int, rounds: int
) -> dict[str, Any]:
    """Everything, interleaved over `rounds`."""
    most = max(batches)
    engine = TimedEngine(
        params,
        config,
        EngineConfig(
            max_rows=most,
            max_context=max(4096, 2 * prefix),
            decode_rows=tuple(sorted({*batches, most})),
        ),
    )
    begin = time.perf_counter()
    engine.warm_up(lambda what, i, n: print(f"compile {i + 1}/{n} {what}", file=sys.stderr))
    prompts = Prompts(config.vocab_size)
    decode = {rows: decode_pair(params, engine, prompts, rows) for rows in batches}
    busy = host_time(engine, prompts, most)
    turn = follow_up(engine, prompts, prefix)
    watch = gaps(engine, prompts, min(4, most), prefix)
    for run in decode.values():
        run()
    compiled = time.perf_counter() - begin
    seconds: dict[str, list[Any]] = {}
    for number in range(rounds):
        for rows in batches:
            seconds.setdefault(f"decode {rows}", []).append(decode[rows]())
        seconds.setdefault("host", []).append(busy())
        seconds.setdefault("turn", []).append(turn())
        seconds.setdefault("gaps", []).append(watch())
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return report(seconds, batches, prefix) | {"warm_up_s": compiled, "host_rows": most}


def report(seconds: dict[str, list[Any]], batches: list[int], prefix: int) -> dict[str, Any]:
    """Medians and ratios of raw measurements."""
    decode = []
    for rows in batches:
        pairs = seconds[f"decode {rows}"]
        bare, own = (statistics.median(pair[name] for pair in pairs) for name in ("bare", "engine"))
        overheads = [pair["engine"] / pair["bare"] - 1 for pair in pairs]
        decode.append(
            {
                "requests": rows,
                "bare_tokens_per_s": rows / bare,
                "tokens_per_s": rows / own,
                "overhead": statistics.median(overheads),
                "overheads": overheads,
            }
        )
    for row in decode:
        row["over_single"] = row["tokens_per_s"] / decode[0]["tokens_per_s"]
    turns = seconds["turn"]
    host = {k: 1e3 * np.median([h[k] for h in seconds["host"]], axis=0) for k in ("own", "call")}
    alone = [gap for found in seconds["gaps"] for gap in found["alone"]]
    beside = [gap for found in seconds["gaps"] for gap in found["beside"]]
    return {
        "decode": decode,
        "host_ms_per_step": dict(zip(("wall", "cpu"), host["own"].tolist(), strict=True)),
        "runtime_ms_per_step": dict(zip(("wall", "cpu"), host["call"].tolist(), strict=True)),
        "prefix_tokens": prefix,
        "cached_tokens": turns[0]["cached"],
        "ttft_cold_ms": 1e3 * statistics.median(t["cold"] for t in turns),
        "ttft_warm_ms": 1e3 * statistics.median(t["warm"] for t in turns),
        "ttft_ratio": statistics.median(t["cold"] / t["warm"] for t in turns),
        "gap_alone_ms": {q: 1e3 * float(np.percentile(alone, q)) for q in (50, 99)},
        "gap_beside_ms": {q: 1e3 * float(np.percentile(beside, q)) for q in (50, 99)},
    }


def show(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [
        f"{'requests':>8} {'bare tok/s':>11} {'engine tok/s':>13} {'overhead':>9} {'x one':>6}"
    ]
    lines += [
        f"{row['requests']:>8} {row['bare_tokens_per_s']:>11.1f} {row['tokens_per_s']:>13.1f} "
        f"{row['overhead']:>9.1%} {row['over_single']:>6.2f}  "
        f"(rounds: {', '.join(f'{overhead:.1%}' for overhead in row['overheads'])})"
        for row in result["decode"]
    ]
    alone, beside = result["gap_alone_ms"], result["gap_beside_ms"]
    own, call = result["host_ms_per_step"], result["runtime_ms_per_step"]
    lines += [
        f"host time per step of {result['host_rows']} rows: {own['cpu']:.2f} ms of our own and "
        f"{call['cpu']:.2f} in the runtime's call; by the wall clock {own['wall']:.2f} and "
        f"{call['wall']:.2f}",
        f"first token after {result['prefix_tokens']} shared + {FOLLOW_UP} tokens: cold "
        f"{result['ttft_cold_ms']:.0f} ms, cached ({result['cached_tokens']} tokens) "
        f"{result['ttft_warm_ms']:.0f} ms: {result['ttft_ratio']:.1f} x faster",
        f"gap between tokens of running requests: p50 {alone[50]:.0f}, p99 {alone[99]:.0f} ms; "
        f"while {result['prefix_tokens']} tokens come in: p50 {beside[50]:.0f}, "
        f"p99 {beside[99]:.0f} ms",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run and print the table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--decode", type=counts, default=[1, 4, 16, 32], metavar="N,N", help="requests"
    )
    parser.add_argument("--prefix", type=count, default=2048, help="tokens of the shared prefix")
    parser.add_argument("--rounds", type=count, default=3, help="repetitions of every measurement")
    parser.add_argument("--weights", choices=("float32", "int8"), default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if not args.decode:
        parser.error("--decode: at least one number of requests")
    keep_freed_memory()
    config = small_config()
    params = random_params(config, args.weights)
    result = measure(params, config, sorted(args.decode), args.prefix, args.rounds)
    print(json.dumps(result) if args.json else show(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
