"""Measures a running service: closed loop (so many at once) or open loop (so many a second).

    k3jax serve k3-nano &
    python scripts/benchmark_serving.py --grpc 127.0.0.1:50051 --concurrency 1,4,16
    python scripts/benchmark_serving.py --http http://127.0.0.1:8000 --model k3-nano --rate 2,4

The first conversations of every level warm up and are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.load.conversations import Shape, first_messages, next_message
from scripts.load.report import Objective, Report, summarize, sustainable, table
from scripts.load.targets import Http, Native, Sample, Target


def main() -> None:
    """Run every level, print its report, and write all of them as JSON if asked."""
    args = _arguments()
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


def _numbers(kind: Callable[[str], float]) -> Callable[[str], list]:
    return lambda text: [kind(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--grpc", metavar="HOST:PORT", help="a worker")
    where.add_argument("--http", metavar="URL", help="a gateway")
    parser.add_argument("--model", default="k3-nano", help="its name behind --http")
    parser.add_argument("--key", help="API key or token")
    parser.add_argument("--concurrency", type=_numbers(int), default=[1, 4, 16], metavar="N,N")
    parser.add_argument("--rate", type=_numbers(float), default=[], metavar="X,X")
    parser.add_argument("--conversations", type=int, default=32, metavar="N", help="per level")
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
    main()
