"""Measure what bringing a prefix back from host memory saves over computing it again.

On the 205 M-parameter model of benchmark_model.py: time to first token of a prompt of N tokens and
a follow-up, when the N tokens are still on the device, when they come back from host memory, and
when nothing is cached; interleaved over rounds, medians. `load` is what the host adds to the
device's time, `even` the number of tokens that are computed in that time.

  python scripts/benchmark_host_tier.py
  python scripts/benchmark_host_tier.py --tokens 64,2048 --rounds 9 --json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import Request, SamplingParams
from k3jax.model import params as model_params
from scripts.benchmark_model import small_config

FOLLOW_UP = 32
"""Tokens after the prefix."""
ROOM = 128
KINDS = ("device", "host", "none")


def random_weights(config: K3Config) -> model_params.K3Params:
    """Weights of the model's shapes, made without compiling anything."""
    rng = np.random.default_rng(0)

    def leaf(spec: jax.ShapeDtypeStruct) -> jax.Array:
        scale = 1 / math.sqrt(spec.shape[-1])
        return jnp.asarray(rng.standard_normal(spec.shape, np.float32) * scale, spec.dtype)

    return jax.tree.map(leaf, model_params.abstract(config))


class Bench:
    """One engine, whose prefixes can be made to give way."""

    def __init__(self, longest: int):
        config = small_config()
        params = random_weights(config)
        context = longest + ROOM
        settings = EngineConfig(
            max_rows=1,
            max_context=context,
            contexts=(context,),
            prefill_shapes=((1, 64), (1, 512)),
            num_pages=2 * -(-context // 64),
            num_slots=8,
            host_bytes=1 << 31,
            host_least_tokens=1,
        )
        self.engine = Engine(params, config, settings)
        self._rng = np.random.default_rng(0)
        self._number = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self._rng.integers(0, self.engine.config.vocab_size, count).tolist())

    def first_token(self, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Seconds until the first token of a reply, and the prompt tokens that were cached."""
        self._number += 1
        request = Request(f"r{self._number}", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        begin = time.perf_counter()
        self.engine.submit(request)
        events = list(self.engine.run())
        return time.perf_counter() - begin, events[0].cached_tokens

    def lose_everything(self) -> None:
        """Let every cached prefix go to the host, and wait for it to be there."""
        store = self.engine.store
        pages = store.take_pages(store.pages.size)
        assert pages is not None
        store.pages.release(pages)
        jax.block_until_ready([entry.arrays for entry in self._host()])
        assert self.engine.host is not None
        self.engine.host.collect()

    def _host(self) -> list[Any]:
        assert self.engine.host is not None
        return list(self.engine.host.entries())

    def host_bytes(self, count: int) -> int:
        """Bytes of the prefix of `count` tokens."""
        return next(entry.nbytes for entry in self._host() if entry.num_tokens == count)

    def round(self, count: int) -> tuple[dict[str, float], int]:
        """Seconds by where the prefix is, and its bytes."""
        prefix, seconds, nbytes = self.tokens(count), {}, 0
        self.first_token(prefix)
        for kind in KINDS:
            if kind == "none":
                self.engine.flush_cache()
            elif kind == "host":
                self.lose_everything()
                nbytes = self.host_bytes(count)
            seconds[kind], cached = self.first_token((*prefix, *self.tokens(FOLLOW_UP)))
            assert cached == (0 if kind == "none" else count), f"{cached} tokens were cached"
        self.engine.flush_cache()
        return seconds, nbytes


def measure(counts: list[int], rounds: int) -> list[dict[str, float]]:
    """A row for every number of prefix tokens."""
    bench = Bench(max(counts))
    seconds = {count: {kind: [] for kind in KINDS} for count in counts}
    nbytes = {}
    for number in range(rounds + 1):
        for count in counts:
            found, nbytes[count] = bench.round(count)
            if number:  # the first round compiles, and touches memory for the first time
                for kind in KINDS:
                    seconds[count][kind].append(found[kind])
            shown = ", ".join(f"{kind} {1e3 * found[kind]:.1f} ms" for kind in KINDS)
            print(
                f"{f'round {number}' if number else 'warm-up'}, {count} tokens: {shown}",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for count in counts:
        device, host, none = (statistics.median(seconds[count][kind]) for kind in KINDS)
        load = max(host - device, 0.0)
        rows.append(
            {
                "tokens": count,
                "mb": nbytes[count] / 1e6,
                "device_ms": 1e3 * device,
                "host_ms": 1e3 * host,
                "none_ms": 1e3 * none,
                "load_ms": 1e3 * load,
                "speedup": none / host,
                "even_tokens": load / max((none - device) / count, 1e-9),
            }
        )
    return rows


def main() -> int:
    """Run and print the table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[16, 64, 256, 1024, 2048],
        metavar="N,N",
        help="lengths of the prefix",
    )
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of every length")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.rounds < 1 or min(args.tokens) < 1:
        parser.error("--rounds and --tokens: at least 1")
    rows = measure(args.tokens, args.rounds)
    if args.json:
        print(json.dumps({"backend": jax.default_backend(), "rows": rows}))
        return 0
    print(f"time to first token, ms; {jax.default_backend()}, jax {jax.__version__}")
    print(
        f"{'prefix':>7} {'MB':>7} {'device':>8} {'host':>8} {'computed':>9} "
        f"{'computed/host':>13} {'load':>7} {'even':>6}"
    )
    for row in rows:
        print(
            f"{row['tokens']:>7} {row['mb']:>7.1f} {row['device_ms']:>8.1f} {row['host_ms']:>8.1f} "
            f"{row['none_ms']:>9.1f} {row['speedup']:>12.1f}x {row['load_ms']:>7.1f} "
            f"{row['even_tokens']:>6.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
