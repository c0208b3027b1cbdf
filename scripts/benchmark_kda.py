"""Time the KDA operators against their reference and this machine's float32 limits.

In one run: the GEMM rate (2048³) and the read bandwidth (sum over 256 MiB), then whole sequences
through `kda_chunk` and token by token through `kda_recurrent`, forward and backward at a training
shape, and decoding steps over a pool of states updated in place. The best of several repetitions is
shown. GFLOP/s count what the token-by-token equations need (6 K V per token and head, twice for
multiply and add), GB/s the state read once and written once.

  python scripts/benchmark_kda.py
  python scripts/benchmark_kda.py --heads 4 --dim 64 --tokens 128,512 --rows 1,8 --json
  python scripts/benchmark_kda.py --bound none      # decay without a bound, as in Kimi-Linear
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import kda

FAN_OUT = 3  # K·V products per token and head in the equations: recall, write, read
TRAINING = {"rows": 16, "tokens": 512, "heads": 4, "dim": 64}


def inputs(rows: int, tokens: int, heads: int, dim: int, bound: float | None) -> list[jax.Array]:
    """Random ``q, k, v, log_decay, beta, state`` as the operators take them."""
    rng = np.random.default_rng(rows * 10000 + tokens)
    q, k, v, gate = (jnp.asarray(rng.standard_normal((rows, tokens, heads, dim))) for _ in range(4))
    decay = kda.log_decay_gate(gate, jnp.zeros(heads), jnp.full((heads, dim), -2.0), bound)
    beta = jax.nn.sigmoid(jnp.asarray(rng.standard_normal((rows, tokens, heads))))
    state = jnp.zeros((rows, heads, dim, dim), jnp.float32)
    return [kda.l2_norm(q) * dim**-0.5, kda.l2_norm(k), v, decay, beta, state]


def best_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The shortest of ``repeats`` runs after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def limits(repeats: int) -> dict[str, float]:
    """Float32 GEMM rate in GFLOP/s and read bandwidth in GB/s."""
    side = 2048
    square = jax.random.normal(jax.random.key(0), (side, side))
    long = jnp.ones(1 << 26, jnp.float32)
    multiply, total = jax.jit(lambda a: a @ a), jax.jit(jnp.sum)
    return {
        "gemm_gflops": 2 * side**3 / best_seconds(lambda: multiply(square), repeats) / 1e9,
        "read_gbytes": long.nbytes / best_seconds(lambda: total(long), repeats) / 1e9,
    }


def sequence_row(
    rows: int, tokens: int, heads: int, dim: int, bound: float | None, repeats: int
) -> dict[str, Any]:
    """Forward over whole sequences, chunked and token by token."""
    arrays = inputs(rows, tokens, heads, dim, bound)
    chunk = jax.jit(functools.partial(kda.kda_chunk, log_decay_bound=bound))
    recurrent = jax.jit(kda.kda_recurrent)
    seconds = best_seconds(lambda: chunk(*arrays), repeats)
    slow = best_seconds(lambda: recurrent(*arrays), max(1, repeats // 8))
    work = 2 * FAN_OUT * dim * dim * heads * tokens * rows
    return {
        "what": "forward",
        "rows": rows,
        "tokens": tokens,
        "ms": seconds * 1e3,
        "reference_ms": slow * 1e3,
        "gflops": work / seconds / 1e9,
    }


def training_row(bound: float | None, repeats: int) -> dict[str, Any]:
    """Forward and backward at the training shape, chunked and token by token."""
    arrays = inputs(**TRAINING, bound=bound)

    def gradient(operator: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*arrays: jax.Array) -> jax.Array:
            out, state = operator(*arrays)
            return jnp.sum(jnp.sin(out)) + jnp.sum(state)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))

    chunk = gradient(functools.partial(kda.kda_chunk, log_decay_bound=bound))
    recurrent = gradient(kda.kda_recurrent)
    seconds = best_seconds(lambda: chunk(*arrays), max(1, repeats // 4))
    slow = best_seconds(lambda: recurrent(*arrays), 1)
    rows, tokens = TRAINING["rows"], TRAINING["tokens"]
    work = 2 * FAN_OUT * TRAINING["dim"] ** 2 * TRAINING["heads"] * tokens * rows * 3
    return {
        "what": f"gradient, {TRAINING['heads']}×{TRAINING['dim']}",
        "rows": rows,
        "tokens": tokens,
        "ms": seconds * 1e3,
        "reference_ms": slow * 1e3,
        "gflops": work / seconds / 1e9,
    }


def decode_row(
    rows: int, heads: int, dim: int, bound: float | None, repeats: int
) -> dict[str, Any]:
    """One token per row over a pool of states; the reference keeps its states in one array."""
    *token, state = inputs(rows, 1, heads, dim, bound)
    token = [x[:, 0] for x in token]
    slots = jnp.arange(rows)
    pool = [jnp.zeros((rows + 1, *state.shape[1:]), jnp.float32)]
    decode = jax.jit(kda.kda_decode, donate_argnames="state_pool")
    recurrent = jax.jit(kda.kda_recurrent)

    def step() -> jax.Array:
        out, pool[0] = decode(*token, pool[0], slots, slots)
        return out

    seconds = best_seconds(step, repeats * 4)
    slow = best_seconds(lambda: recurrent(*(x[:, None] for x in token), state), repeats)
    return {
        "what": "decode",
        "rows": rows,
        "tokens": 1,
        "ms": seconds * 1e3,
        "reference_ms": slow * 1e3,
        "gbytes": 2 * state.nbytes / seconds / 1e9,
    }


def print_table(report: dict[str, Any]) -> None:
    """The report as aligned text."""
    print(f"{report['device']}, {report['heads']} heads × {report['dim']}, bound {report['bound']}")
    print(f"GEMM {report['gemm_gflops']:.0f} GFLOP/s, read {report['read_gbytes']:.1f} GB/s")
    columns = ("what", "rows", "tokens", "ms", "reference", "rate", "of limit")
    print("{:<16}{:>5}{:>8}{:>10}{:>11}{:>16}{:>10}".format(*columns))
    for row in report["rows"]:
        if "gflops" in row:
            rate, limit = f"{row['gflops']:.1f} GFLOP/s", row["gflops"] / report["gemm_gflops"]
        else:
            rate, limit = f"{row['gbytes']:.1f} GB/s", row["gbytes"] / report["read_gbytes"]
        print(
            f"{row['what']:<16}{row['rows']:>5}{row['tokens']:>8}{row['ms']:>10.2f}"
            f"{row['reference_ms']:>11.2f}{rate:>16}{limit:>10.0%}"
        )


def integers(text: str) -> list[int]:
    """`1,8` → [1, 8]; empty text gives none."""
    return [int(part) for part in text.split(",") if part]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="key and value channels of a head")
    parser.add_argument("--tokens", type=integers, default=[128, 512, 2048], metavar="N,N")
    parser.add_argument("--rows", type=integers, default=[1, 8], metavar="N,N")
    parser.add_argument("--decode", type=integers, default=[1, 4, 8, 16, 32], metavar="N,N")
    parser.add_argument("--bound", default="-5", help="bound of the log decay, or none")
    parser.add_argument("--repeats", type=int, default=20, help="runs of a forward case")
    parser.add_argument("--skip-gradient", action="store_true", help="leave the training shape out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    bound = None if args.bound == "none" else float(args.bound)
    report: dict[str, Any] = {
        "device": str(jax.devices()[0].device_kind),
        "heads": args.heads,
        "dim": args.dim,
        "bound": bound,
        **limits(args.repeats),
    }
    shape = (args.heads, args.dim, bound, args.repeats)
    report["rows"] = [sequence_row(r, t, *shape) for r in args.rows for t in args.tokens]
    if not args.skip_gradient:
        report["rows"].append(training_row(bound, args.repeats))
    report["rows"] += [decode_row(rows, *shape) for rows in args.decode]
    if args.json:
        print(json.dumps(report))
    else:
        print_table(report)


if __name__ == "__main__":
    main()
