"""Measures a service: closed loop (so many at once) or open loop (so many a second).

    python scripts/benchmark_serving.py --start k3-small --rounds 3
    k3jax serve k3-nano &
    python scripts/benchmark_serving.py --grpc 127.0.0.1:50051 --concurrency 1,4,16
    python scripts/benchmark_serving.py --http http://127.0.0.1:8000 --model k3-nano --rate 2,4

`--start` starts a service of its own on the seeded 205 M-parameter model of benchmark_model.py (or
k3-nano), and puts the same conversations of about --prompt-tokens tokens to the bare engine, to
gRPC and to the gateway, in turns: what is lost on the way is a ratio of neighbours in time.

The first conversations of every level warm up and are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k3jax.compilation_cache import enable_compilation_cache
from k3jax.engine.host import keep_freed_memory
from k3jax.text_model import TextModel
from scripts.load.conversations import Shape, first_messages, next_message
from scripts.load.own_service import BareEngine, model_folder, started
from scripts.load.report import Objective, Report, summarize, sustainable, table
from scripts.load.targets import NO_THINKING, Http, Native, Sample, Target
from serving.options import EngineSizes


def main() -> int:
    """Run every level, print its report, and write all of them as JSON if asked.

    Returns 1 when not one request succeeded.
    """
    args = _arguments()
    if args.start:
        compare(args)
        return 0
    target: Target
    target = Native(args.grpc, args.key) if args.grpc else Http(args.http, args.model, args.key)
    shape = Shape(args.words, args.turns, args.later_words, args.shared_words)
    objective = Objective(args.slo_ttft / 1e3, args.slo_tpot / 1e3)
    reports: list[tuple[int, Report]] = []
    for concurrency in args.concurrency if not args.rate else ():
        run = closed_loop(target, shape, args.tokens, args.conversations, concurrency)
        reports.append((concurrency, summarize(f"{concurrency} at once", *run, objective)))
        print(*table(reports[-1][1]), sep="\n", flush=True)
    for rate in args.rate:
        run = open_loop(target, shape, args.tokens, args.conversations, rate)
        reports.append((0, summarize(f"{rate} conversations/s", *run, objective)))
        print(*table(reports[-1][1]), sep="\n", flush=True)
    if not args.rate:
        print(f"sustainable concurrency: {sustainable(reports, objective)}")
    if args.json:
        entries = [dataclasses.asdict(report) for _, report in reports]
        Path(args.json).write_text(json.dumps(entries, indent=1) + "\n")
    return int(all(report.failures == report.requests for _, report in reports))


def closed_loop(
    target: Target, shape: Shape, tokens: int, conversations: int, concurrency: int
) -> tuple[list[Sample], float]:
    """So many conversations at a time, each worker starting the next when one is over."""
    beginnings = first_messages(shape, seed=concurrency)
    warm = [next(beginnings) for _ in range(concurrency)]
    measured = [next(beginnings) for _ in range(conversations)]
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda messages: target.run(messages, tokens), warm))
        start = time.perf_counter()
        runs = pool.map(
            lambda job: converse(target, shape, tokens, job[1], job[0]), enumerate(measured)
        )
        samples = [sample for run in runs for sample in run]
    return samples, time.perf_counter() - start


def open_loop(
    target: Target, shape: Shape, tokens: int, conversations: int, rate: float
) -> tuple[list[Sample], float]:
    """Conversations that begin at random times, whether or not the earlier ones are over."""
    rng = random.Random(1)
    beginnings = first_messages(shape, seed=1000)
    target.run(next(beginnings), tokens)
    samples: list[Sample] = []
    lock = threading.Lock()

    def run(number: int, messages: list) -> None:
        found = converse(target, shape, tokens, messages, number)
        with lock:
            samples.extend(found)

    threads: list[threading.Thread] = []
    start = time.perf_counter()
    for number in range(conversations):
        threads.append(threading.Thread(target=run, args=(number, next(beginnings))))
        threads[-1].start()
        time.sleep(rng.expovariate(rate))
    for thread in threads:
        thread.join()
    return samples, time.perf_counter() - start


def converse(
    target: Target, shape: Shape, tokens: int, messages: list, number: int
) -> list[Sample]:
    """All turns of a conversation; a failed one ends it."""
    samples: list[Sample] = []
    for turn in range(shape.turns):
        if turn:
            reply = {"role": "assistant", "content": samples[-1].text}
            messages = [*messages, reply, next_message(shape, number, turn)]
        samples.append(target.run(messages, tokens))
        if samples[-1].error:
            break
    return samples


def compare(args: argparse.Namespace) -> None:
    """Bare engine, gRPC and HTTP over the same conversations, in turns."""
    keep_freed_memory()
    enable_compilation_cache()
    [concurrency] = args.concurrency if len(args.concurrency) == 1 else [16]
    objective = Objective(args.slo_ttft / 1e3, args.slo_tpot / 1e3)
    sizes = EngineSizes(max_rows=concurrency, max_context=2 * (args.prompt_tokens + args.tokens))
    found: dict[str, list[tuple[list[Sample], float]]] = {}
    with model_folder(args.start, args.weights) as folder, started(folder, sizes) as service:
        bare = BareEngine.load(folder, sizes)
        targets = {
            "gRPC": Native(service.grpc),
            "HTTP": Http(service.http, service.model),
        }
        for number in range(args.rounds + 1):
            talks = _talks(bare.model, args.prompt_tokens, args.conversations, seed=number)
            runs = {"engine": bare.run(talks, args.tokens, concurrency)}
            for name, target in targets.items():
                runs[name] = fixed_loop(target, talks, args.tokens, concurrency)
            for name, run in runs.items():
                if number:  # the first round warms up
                    found.setdefault(name, []).append(run)
    reports = {}
    for name, runs in found.items():
        samples = [sample for run, _ in runs for sample in run]
        load = f"{name}, {concurrency} at once"
        reports[name] = summarize(load, samples, sum(seconds for _, seconds in runs), objective)
        print(*table(reports[name]), sep="\n", flush=True)
    rates = {name: [_rate(*run) for run in runs] for name, runs in found.items()}
    for name in targets:
        ratios = [a / b for a, b in zip(rates[name], rates["engine"], strict=True)]
        print(
            f"{name} gives {statistics.median(ratios):.1%} of the bare engine's tokens/s "
            f"(rounds: {', '.join(f'{ratio:.1%}' for ratio in ratios)})"
        )
    if args.json:
        entries = [dataclasses.asdict(report) for report in reports.values()]
        Path(args.json).write_text(json.dumps(entries, indent=1) + "\n")


def fixed_loop(
    target: Target, talks: Sequence[list], tokens: int, concurrency: int
) -> tuple[list[Sample], float]:
    """One reply to each conversation, so many at a time; and the seconds."""
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        samples = list(pool.map(lambda messages: target.run(messages, tokens), talks))
    return samples, time.perf_counter() - start


def _talks(model: TextModel, tokens: int, count: int, seed: int) -> list[list]:
    """Conversations of as many words as make a prompt of at least `tokens` tokens."""
    talks = []
    for number in range(count):
        words, talk = tokens // 4, []
        while not talk or len(model.chat_prompt(talk, NO_THINKING).tokens) < tokens:
            words += 1
            talk = next(first_messages(Shape(words), seed=1000 * seed + number))
        talks.append(talk)
    return talks


def _rate(samples: Sequence[Sample], seconds: float) -> float:
    return sum(sample.tokens for sample in samples) / seconds


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list]:
    return lambda text: [kind(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--grpc", metavar="HOST:PORT", help="a worker")
    where.add_argument("--http", metavar="URL", help="a gateway")
    where.add_argument("--start", choices=("k3-small", "k3-nano"), help="a service of its own")
    parser.add_argument("--model", default="k3-nano", help="its name behind --http")
    parser.add_argument("--key", help="API key or token")
    parser.add_argument(
        "--concurrency", type=_numbers(int), default=[1, 4, 16], metavar="N,N", help="closed loops"
    )
    parser.add_argument(
        "--rate",
        type=_numbers(float),
        default=[],
        metavar="X,X",
        help="open loops: conversations/s",
    )
    parser.add_argument("--conversations", type=int, default=32, metavar="N", help="per level")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="with --start")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="with --start")
    parser.add_argument("--weights", choices=("float32", "int8"), default="float32")
    parser.add_argument("--turns", type=int, default=1, metavar="N")
    parser.add_argument("--words", type=int, default=100, metavar="N", help="of the first message")
    parser.add_argument("--later-words", type=int, default=16, metavar="N")
    parser.add_argument("--shared-words", type=int, default=0, metavar="N", help="system message")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each reply")
    parser.add_argument("--slo-ttft", type=float, default=2000, metavar="MS")
    parser.add_argument("--slo-tpot", type=float, default=200, metavar="MS")
    parser.add_argument("--json", metavar="FILE", help="also write the reports there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
