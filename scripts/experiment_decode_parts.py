"""What a decode step is made of on CPU: its large parts alone, beside whole steps, in one run.

On the model of benchmark_model.py, in turns: the whole step at one row and at `--rows`; and, at
`--rows`, every dense product, the routed experts, the recurrent states and the latent attention,
each part a loop of its own on the device with nothing else between its layers. The sum of the parts
is what a step over that many rows would take if norms, residual mixing, convolutions, routing and
sampling cost nothing and nothing overlapped. That stands beside `--times` the tokens per second of
one row.

  python scripts/experiment_decode_parts.py
  python scripts/experiment_decode_parts.py --rows 32 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.cli.arguments import count
from k3jax.config import K3Config
from k3jax.engine.host import COMPILER_OPTIONS, keep_freed_memory
from k3jax.model.layers import activation
from k3jax.model.params import K3Params, KDAParams, MLAParams, MoEParams, Weight
from k3jax.quant import matmul
from pallas_kernels.kda import kda_decode
from pallas_kernels.mla.paged_decode import mla_paged_decode
from pallas_kernels.moe import experts
from scripts.benchmark_model import CONTEXT, PAGE_SIZE, loop_case, random_params, small_config

STEPS = 6
"""Steps of each repetition."""


def dense_weights(params: K3Params) -> Iterator[Weight]:
    """Every matrix that each row is multiplied by, but `kv_up`, which is part of the attention."""
    for layer in params.layers:
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, KDAParams):
            yield from (mixer.qkv, mixer.decay_down, mixer.decay_up, mixer.beta, mixer.out)
        else:
            yield from (mixer.q, mixer.kv_down, mixer.out)
            assert mixer.q_down is not None
            yield mixer.q_down
        assert mixer.gate is not None
        yield mixer.gate
        if isinstance(ffn, MoEParams):
            assert ffn.latent_down is not None and ffn.latent_up is not None
            assert ffn.shared is not None
            yield from (ffn.router, ffn.latent_down, ffn.latent_up)
            ffn = ffn.shared
        yield from (ffn.gate_up, ffn.down)
    yield params.lm_head


def parts(params: K3Params, config: K3Config, rows: int) -> dict[str, Callable[[], float]]:
    """Seconds of one step's dense products, routed experts, recurrent states and attention."""
    rng = np.random.default_rng(rows)
    kdas = [layer.mixer for layer in params.layers if isinstance(layer.mixer, KDAParams)]
    mlas = [layer.mixer for layer in params.layers if isinstance(layer.mixer, MLAParams)]
    moes = [layer.ffn for layer in params.layers if isinstance(layer.ffn, MoEParams)]

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    weights = list(dense_weights(params))
    inputs = {width: normal(rows, width) for width in {w.shape[1] for w in weights}}

    def dense(inputs: dict[int, jax.Array], weights: list[Weight]) -> jax.Array:
        # Each waits for the one before, as XLA would copy weights of equal inputs into one product.
        y = jnp.zeros((rows, 1))
        for w in weights:
            y = matmul(inputs[w.shape[1]] + 1e-9 * y[:, :1], w)
        return y

    choices, count = config.num_experts_per_token, config.num_experts
    picks = [
        jnp.asarray(np.stack([rng.permutation(count)[:choices] for _ in range(rows)]), jnp.int32)
        for _ in moes
    ]
    packs = [(moe.gate_up, moe.down) for moe in moes]
    scores = jnp.full((rows, choices), 1 / choices)

    def routed(
        x: jax.Array, picks: list[jax.Array], packs: list[tuple[jax.Array, jax.Array]]
    ) -> list[jax.Array]:
        return [
            experts(x, pick, scores, *pair, activation(config))
            for pick, pair in zip(picks, packs, strict=True)
        ]

    heads, key = config.kda_num_heads, config.kda_head_dim
    q, k, v = (normal(rows, heads, key) * key**-0.5 for _ in range(3))
    log_decay = -jnp.ones((rows, heads, key))
    beta, slots = jnp.full((rows, heads), 0.5), jnp.arange(rows, dtype=jnp.int32)
    pools = [jnp.zeros((rows, heads, key, key)) for _ in kdas]

    def states(pools: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        stepped = [kda_decode(q, k, v, log_decay, beta, pool, slots, slots) for pool in pools]
        return [pool for _, pool in stepped], [out for out, _ in stepped]

    per_row = 2 * CONTEXT // PAGE_SIZE
    table = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row)
    starts, ones = jnp.full(rows, CONTEXT, jnp.int32), jnp.ones(rows, jnp.int32)
    pages = [normal(rows * per_row, PAGE_SIZE, config.latent_width) for _ in mlas]
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    query = normal(rows, 1, config.num_heads, nope + config.qk_rope_head_dim)

    def attention(pages: list[jax.Array], mlas: list[MLAParams]) -> list[jax.Array]:
        ups = [m.kv_up.reshape(config.num_heads, nope + value, -1) for m in mlas]
        q, outs = query, []
        for pool, up in zip(pages, ups, strict=True):
            # In a step pages wait for their layer's new latents; else all are gathered beforehand.
            q, pool = jax.lax.optimization_barrier((q, pool))
            outs.append(mla_paged_decode(q, pool, up, table, starts, ones))
            q = query + 1e-9 * outs[-1][..., :1]
        return outs

    def advance(pools: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        outs = [jnp.zeros_like(v) for _ in pools]
        return jax.lax.fori_loop(0, STEPS, lambda _, carry: states(carry[0]), (pools, outs))

    holder = [pools]
    in_place = jax.jit(advance, donate_argnums=0, compiler_options=COMPILER_OPTIONS)

    def advanced() -> float:
        begin = time.perf_counter()
        holder[0], _ = jax.block_until_ready(in_place(holder[0]))
        return (time.perf_counter() - begin) / STEPS

    return {
        "dense products": _repeated(dense, inputs, weights),
        "routed experts": _repeated(routed, normal(rows, config.expert_width), picks, packs),
        "recurrent states": advanced,
        "latent attention": _repeated(attention, pages, mlas),
    }


def _repeated(function: Callable[..., Any], *args: Any) -> Callable[[], float]:
    """Times `STEPS` repetitions of a function in one program, each after the one before."""

    def loop(*args: Any) -> Any:
        def body(_: jax.Array, results: Any) -> Any:
            # Tied to the results before, or XLA would compute what stays the same only once.
            tied, results = jax.lax.optimization_barrier((args, results))
            return jax.tree.map(lambda new, old: new + 1e-9 * old, function(*tied), results)

        shapes = jax.eval_shape(function, *args)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.fori_loop(0, STEPS, body, nothing)

    run = jax.jit(loop, compiler_options=COMPILER_OPTIONS)

    def seconds() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(*args))
        return (time.perf_counter() - begin) / STEPS

    return seconds


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each part and of whole steps, all in turns."""
    config = small_config()
    params = random_params(config, "float32")
    cases = {
        "step of 1 row": loop_case(params, config, 1, 4 * STEPS).run,
        f"step of {rows} rows": loop_case(params, config, rows, STEPS).run,
        **parts(params, config, rows),
    }
    for run in cases.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            times[name].append(run())
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print the parts, their sum and what the wanted multiple of one row leaves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=count, default=16)
    parser.add_argument(
        "--times", type=float, default=5.0, help="wanted multiple of one row's rate"
    )
    parser.add_argument("--rounds", type=count, default=9, help="repetitions of everything")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.rows < 2 or not args.times > 0:
        parser.error("--rows is at least 2, --times above 0")
    keep_freed_memory()
    found = measure(args.rows, args.rounds)
    one, many, *alone = found.values()
    found["sum of the parts"] = sum(alone)
    found[f"at {args.times:g} x one row's rate"] = args.rows * one / args.times
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, milliseconds in found.items():
        print(f"{name:<28}{milliseconds:8.1f} ms")
    print(f"{args.rows} rows are {args.rows * one / many:.1f} x one row's rate")


if __name__ == "__main__":
    main()
