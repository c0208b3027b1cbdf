"""Compares ways of routing: two replicas of a real model, follow-up turns of several conversations.

    python scripts/compare_routing.py
    python scripts/compare_routing.py --model WEIGHTS --policies cache_aware,least_load --turns 5

Every policy gets fresh replicas and the same conversations, whose turns come in random order.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.bundled import BUNDLED
from scripts.load.conversations import Shape, first_messages, next_message
from scripts.load.targets import Http, Sample
from serving.options import EngineSizes, ServeOptions, WorkerOptions
from serving.server import Service

TOKENS = 16
"""Of each reply."""


@dataclass(frozen=True)
class Found:
    """What the follow-up turns of one policy found."""

    follow_ups: int
    hits: int
    cached_tokens: int
    prompt_tokens: int
    ttft: float
    """Median seconds to the first token of a follow-up."""

    def line(self, policy: str) -> str:
        """For people."""
        return (
            f"{policy:<14} {self.hits}/{self.follow_ups} follow-ups found their prefix, "
            f"{self.cached_tokens / max(1, self.prompt_tokens):.1%} of their tokens, "
            f"first token after {self.ttft * 1e3:.0f} ms"
        )


def main() -> None:
    """One line for each policy."""
    args = _arguments()
    shape = Shape(args.words, args.turns, later_words=12)
    pages = args.conversations * -(-args.max_context // 64)
    slots = 2 * args.conversations * args.turns
    sizes = EngineSizes(  # room for all conversations on either replica
        max_rows=1,
        max_context=args.max_context,
        token_budget=256,
        num_pages=pages,
        num_slots=slots,
    )
    for policy in args.policies.split(","):
        worker = WorkerOptions(
            args.model, Path(args.model).name, listen="127.0.0.1:0", sizes=sizes, drain_seconds=2
        )
        options = ServeOptions(worker, replicas=2, http="127.0.0.1:0", policy=policy)
        with Service(options, lambda line: None).started() as gateway:
            assert gateway is not None
            target = Http(gateway.url, worker.name)
            samples = converse(target, shape, args.conversations)
        print(count(samples).line(policy), flush=True)


def converse(target: Http, shape: Shape, conversations: int) -> list[list[Sample]]:
    """All turns of all conversations, one request at a time; samples by turn."""
    rng = random.Random(5)
    beginnings = first_messages(shape, seed=7)
    talks: list[list[Any]] = [next(beginnings) for _ in range(conversations)]
    samples: list[list[Sample]] = []
    for turn in range(shape.turns):
        samples.append([])
        for number in rng.sample(range(conversations), conversations):
            if turn:
                talks[number].append(next_message(shape, number, turn))
            sample = target.run(talks[number], TOKENS)
            if sample.error:
                raise SystemExit(f"a request failed: {sample.error}")
            talks[number].append({"role": "assistant", "content": sample.text or "-"})
            samples[-1].append(sample)
    return samples


def count(samples: Sequence[Sequence[Sample]]) -> Found:
    """Over the turns after the first."""
    later = [sample for turn in samples[1:] for sample in turn]
    times = sorted(s.arrivals[0] - s.sent for s in later if s.arrivals)
    return Found(
        follow_ups=len(later),
        hits=sum(sample.cached_tokens >= 64 for sample in later),
        cached_tokens=sum(sample.cached_tokens for sample in later),
        prompt_tokens=sum(sample.prompt_tokens for sample in later),
        ttft=times[len(times) // 2] if times else 0.0,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=BUNDLED, metavar="WEIGHTS")
    parser.add_argument("--policies", default="cache_aware,round_robin", metavar="NAME,NAME")
    parser.add_argument("--conversations", type=int, default=8, metavar="N")
    parser.add_argument("--turns", type=int, default=4, metavar="N")
    parser.add_argument("--words", type=int, default=200, metavar="N", help="of the first message")
    parser.add_argument("--max-context", type=int, default=2048, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    main()
