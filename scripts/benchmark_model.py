"""Measure prefill and decode of a seeded 205 M-parameter K3 model against this machine's limits.

In one run: the float32 GEMM rate (2048³) and the read bandwidth (sum over 1 GiB), then prefill of
128, 512 and 2048 tokens through the serving step and decode at batch 1 to 32 as `k3jax.generate`
runs it, the step in a loop on the device, interleaved over several rounds. `--step` adds decode
with one call from Python per step, as the engine runs it. Reported are medians, tokens/s, and the
fraction of the limit that binds: of the GEMM rate for prefill (2 FLOP per weight and token), of
the read bandwidth for decode (each weight that any row uses, read once).

  python scripts/benchmark_model.py
  python scripts/benchmark_model.py --rounds 9 --decode 1,16 --prefill 512 --json
  python scripts/benchmark_model.py --weights int8     # 8-bit linear weights
  python scripts/benchmark_model.py --prefill "" --decode 1,16 --step 1,16    # what calls cost
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import config as configs
from k3jax.cli.arguments import count
from k3jax.config import K3Config
from k3jax.engine.decode_loop import Loop, RowLimits, decode_loop
from k3jax.engine.host import keep_freed_memory
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepInputs, StepState, jitted_step
from k3jax.model import params as model_params
from k3jax.model.params import K3Params
from k3jax.model.quantize import quantize_weights
from k3jax.state import DecodeState, Spans
from scripts.arguments import counts

PAGE_SIZE = 64
CONTEXT = 256
"""Tokens already cached when decode is measured; its page table has room for twice as many."""


def small_config() -> K3Config:
    """`k3-small`: K3's architecture with 205 M parameters, 102 M of them used per token."""
    return replace(
        configs.k3(),
        vocab_size=16384,
        hidden_size=768,
        num_layers=12,
        kda_layers=(0, 1, 2, 4, 5, 6, 8, 9, 10),
        intermediate_size=3584,
        kda_num_heads=8,
        num_heads=8,
        q_lora_rank=256,
        num_experts=32,
        num_experts_per_token=4,
        moe_intermediate_size=256,
        expert_latent_size=384,
        attn_res_block_size=4,
        expert_format=None,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        max_context=8192,
        vision=None,
    )


def random_params(config: K3Config, weights: str) -> K3Params:
    """Seeded weights, `float32` or `int8`."""
    params = jax.jit(model_params.init, static_argnums=0)(config, jax.random.key(0))
    return jax.jit(quantize_weights)(params) if weights == "int8" else params


def active_parameters(config: K3Config) -> int:
    """Weights that one token meets: all but the embedding table and the experts not chosen."""
    spec = model_params.abstract(replace(config, expert_format=None))
    total = model_params.count(spec) - config.vocab_size * config.hidden_size
    idle = config.num_experts - config.num_experts_per_token
    sparse = sum(config.is_sparse(layer) for layer in range(config.num_layers))
    return total - sparse * idle * 3 * config.expert_width * config.moe_intermediate_size


def touched_bytes(config: K3Config, params: K3Params, rows: int) -> float:
    """Bytes of weights that a decode step over `rows` rows reads, experts drawn independently."""
    expert = sum(
        model_params.nbytes(getattr(layer.ffn, name))
        for layer in params.layers
        for name in ("gate_up", "down")
        if hasattr(layer.ffn, "router")
    )
    rest = model_params.nbytes(params) - model_params.nbytes(params.embed) - expert
    missed = (1 - config.num_experts_per_token / config.num_experts) ** rows
    return rest + expert * (1 - missed)


@dataclass(frozen=True)
class Case:
    """One measured shape."""

    kind: str
    rows: int
    tokens: int
    run: Callable[[], float]
    """Seconds of one repetition, per step."""


def step_case(
    params: K3Params, config: K3Config, kind: str, rows: int, tokens: int, repeats: int
) -> Case:
    """A prefill span of `tokens` tokens, or `repeats` decode steps, through the jitted step."""
    prefill = kind == "prefill"
    state, table, sampling = _batch(config, rows, tokens if prefill else 2 * CONTEXT)
    rng = np.random.default_rng(rows * 10000 + tokens)
    ids = rng.integers(0, config.vocab_size, (rows, tokens)).astype(np.int32)
    slots = np.arange(rows, dtype=np.int32)
    holder = [state]

    def inputs(start: int, ids: Any) -> StepInputs:
        return StepInputs(
            tokens=ids,
            spans=Spans(
                lengths=np.full(rows, tokens, np.int32),
                starts=np.full(rows, start, np.int32),
                read_slots=slots if start else np.full(rows, -1, np.int32),
                write_slots=slots,
                page_table=table,
            ),
            lanes=slots,
            emits=np.ones(rows, np.bool_),
            sampling=sampling,
        )

    def run() -> float:
        begin = time.perf_counter()
        token = ids
        for number in range(repeats):
            start = 0 if prefill else CONTEXT + number % CONTEXT
            output, holder[0] = jitted_step(params, config, inputs(start, token), holder[0])
            if not prefill:
                token = output.tokens[:, None]
        jax.block_until_ready(holder[0])
        return (time.perf_counter() - begin) / repeats

    return Case(kind, rows, tokens, run)


def loop_case(params: K3Params, config: K3Config, rows: int, repeats: int) -> Case:
    """`repeats` decode steps, at most CONTEXT, in one loop on the device."""
    state, table, sampling = _batch(config, rows, 2 * CONTEXT)
    limits = RowLimits(
        stop_ids=jnp.full((rows, 1), -1, jnp.int32), budgets=jnp.full(rows, repeats, jnp.int32)
    )
    steps = jnp.int32(repeats)
    holder = [state]

    def run() -> float:
        lengths, done = np.full(rows, CONTEXT, np.int32), np.zeros(rows, np.bool_)
        loop = Loop.init(lengths, done, limit=repeats, top=None)
        begin = time.perf_counter()
        _, holder[0] = decode_loop(
            params, config, sampling, table, limits, steps, loop, holder[0], logprobs=None
        )
        jax.block_until_ready(holder[0])
        return (time.perf_counter() - begin) / repeats

    return Case("decode", rows, 1, run)


def _batch(
    config: K3Config, rows: int, positions: int
) -> tuple[StepState, np.ndarray, SamplingInputs]:
    """Empty state, a page table of `positions` for each row, and greedy sampling."""
    pages = -(-positions // PAGE_SIZE)
    state = StepState(
        decode=DecodeState.init(config, num_slots=rows, num_pages=rows * pages, page_size=PAGE_SIZE)
    )
    table = np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    return state, table, SamplingInputs.pack([SamplingParams()] * rows, [0] * rows)


def limit_cases() -> dict[str, tuple[Callable[[], float], float]]:
    """The machine's limits: a timed function and the FLOP or bytes that it stands for."""
    side = 2048
    a, b = (jax.random.normal(jax.random.key(i), (side, side)) for i in range(2))
    multiply = jax.jit(lambda a, b: a @ b)
    long = jnp.ones(1 << 28, jnp.float32)
    total = jax.jit(jnp.sum)

    def timed(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            jax.block_until_ready(function(*args))
            return time.perf_counter() - begin

        return run

    return {
        "gemm": (timed(multiply, a, b), 2.0 * side**3),
        "read": (timed(total, long), 4.0 * long.size),
    }


def measure(
    params: K3Params,
    config: K3Config,
    prefill: list[int],
    decode: list[int],
    step: list[int],
    rounds: int,
) -> dict[str, Any]:
    """One repetition of every case per round, the limits before and after each; medians."""
    cases = [step_case(params, config, "prefill", 1, tokens, 1) for tokens in prefill]
    cases += [loop_case(params, config, rows, 16) for rows in decode]
    cases += [step_case(params, config, "step", rows, 1, 16) for rows in step]
    limits = limit_cases()
    begin = time.perf_counter()
    for case in cases:
        case.run()
        print(f"compiled {case.kind} {case.rows}x{case.tokens}", file=sys.stderr, flush=True)
    for run, _ in limits.values():
        run()
    compiled = time.perf_counter() - begin
    seconds: dict[Any, list[float]] = {}

    def time_limits() -> None:
        # Often: a machine that becomes slower for some seconds does so for them as well.
        for name, (run, _) in limits.items():
            seconds.setdefault(name, []).append(run())

    for number in range(rounds):
        time_limits()
        for case in cases:
            seconds.setdefault(case, []).append(case.run())
            time_limits()
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    rate = {name: amount / statistics.median(seconds[name]) for name, (_, amount) in limits.items()}
    active = active_parameters(config)
    rows = []
    for case in cases:
        median = statistics.median(seconds[case])
        if case.kind == "prefill":
            fraction = 2.0 * active * case.tokens / median / rate["gemm"]
        else:
            fraction = touched_bytes(config, params, case.rows) / median / rate["read"]
        rows.append(
            {
                "kind": case.kind,
                "batch": case.rows,
                "tokens": case.tokens,
                "ms": 1e3 * median,
                "tokens_per_s": case.rows * case.tokens / median,
                "limit": "gemm" if case.kind == "prefill" else "read",
                "fraction": fraction,
            }
        )
    return {
        "gemm_gflops": rate["gemm"] / 1e9,
        "read_gb_s": rate["read"] / 1e9,
        "parameters": model_params.count(params),
        "active_parameters": active,
        "weight_bytes": model_params.nbytes(params),
        "warm_up_s": compiled,
        "rows": rows,
    }


def main() -> int:
    """Run and print the table, or one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", type=counts, default=[128, 512, 2048], metavar="N,N")
    parser.add_argument("--decode", type=counts, default=[1, 4, 8, 16, 32], metavar="N,N")
    parser.add_argument("--step", type=counts, default=[], metavar="N,N")
    parser.add_argument("--rounds", type=count, default=5, help="repetitions of every case")
    parser.add_argument("--weights", choices=("float32", "int8"), default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    keep_freed_memory()
    config = small_config()
    params = random_params(config, args.weights)
    result = measure(params, config, args.prefill, args.decode, args.step, args.rounds)
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"k3-small, {args.weights} weights: {result['parameters'] / 1e6:.1f} M parameters, "
        f"{result['active_parameters'] / 1e6:.1f} M per token, "
        f"{result['weight_bytes'] / 1e6:.0f} MB; {jax.default_backend()}, jax {jax.__version__}"
    )
    print(
        f"limits: float32 GEMM {result['gemm_gflops']:.0f} GFLOP/s, "
        f"read {result['read_gb_s']:.1f} GB/s; warm-up {result['warm_up_s']:.0f} s"
    )
    print(f"{'':<8} {'batch':>5} {'tokens':>6} {'ms':>9} {'tok/s':>8}  of limit")
    for row in result["rows"]:
        print(
            f"{row['kind']:<8} {row['batch']:>5} {row['tokens']:>6} {row['ms']:>9.1f} "
            f"{row['tokens_per_s']:>8.1f}  {row['fraction']:.0%} of {row['limit']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
