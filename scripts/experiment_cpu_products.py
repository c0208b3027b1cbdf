"""Compare ways to write a product on XLA's CPU back end, for the row counts of decoding.

Each way runs a chain of layers whose weights exceed the last-level cache, interleaved with the
others and with two limits measured in the same seconds: the read bandwidth and the float32 GEMM
rate. Reported are the shortest wall time and the shortest process CPU time divided by the cores,
in milliseconds per 100 million weights; on a busy machine only the CPU times compare. `reading`
is what reading those weights once would take at the measured bandwidth. Forms marked * are the
ones that `pallas_kernels` uses for some row count.

  python scripts/experiment_cpu_products.py
  python scripts/experiment_cpu_products.py --part int8 --rows 1,2,4 --seconds 10 --json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.engine.host import COMPILER_OPTIONS
from k3jax.quant import quantize
from pallas_kernels.linear import decode_int8
from pallas_kernels.linear.linear_xla import padded_rows, side_by_side, streamed
from pallas_kernels.moe.blocks_xla import experts_by_block
from pallas_kernels.moe.pairs_xla import experts_by_pair
from pallas_kernels.moe.reference import Weight
from pallas_kernels.moe.routing import sort_pairs

OUT, IN, LAYERS = 3072, 768, 16
EXPERTS, CHOICES, WIDTH, LATENT, EXPERT_LAYERS = 32, 4, 256, 384, 4
CONTRACT = (((1,), (1,)), ((), ()))

Product = Callable[..., jax.Array]
Timed = tuple[Callable[..., jax.Array], tuple]

barrier = jax.lax.optimization_barrier


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """The plain dot: YNNPACK packs w, a transposed copy, at every call."""
    return jax.lax.dot_general(x, w, CONTRACT)


def dot_turned(x: jax.Array, w: jax.Array) -> jax.Array:
    """w as the left operand; the barrier keeps XLA from swapping the operands back."""
    return barrier(jax.lax.dot_general(w, x, CONTRACT)).T


def dot_per_row(x: jax.Array, w: jax.Array) -> jax.Array:
    """One matrix-vector product per row."""
    return jnp.concatenate([dot(x[i : i + 1], w) for i in range(x.shape[0])])


def broadcast_sum(x: jax.Array, w: jax.Array) -> jax.Array:
    """The sum of a broadcast product without barriers: neighbours may join its fusion."""
    return (w[None] * x[:, None]).sum(-1)


def streamed_padded(x: jax.Array, w: jax.Array) -> jax.Array:
    """The form in use, with rows padded where eight at a time are cheaper."""
    rows = x.shape[0]
    return streamed(jnp.pad(x, ((0, padded_rows(rows) - rows), (0, 0))), w)[:rows]


def int8_dot(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """int8 × int8 with activations in 8 bits."""
    rounded, step = _to_int8(x)
    out = jax.lax.dot_general(rounded, values, CONTRACT, preferred_element_type=jnp.int32)
    return out.astype(jnp.float32) * step * scales


def int8_dot_split(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """int8 × int8 with activations as the sum of two 8-bit parts: twice the rows."""
    high, step = _to_int8(x)
    low, small_step = _to_int8(x - high * step)
    both = jnp.concatenate([high, low])
    out = jax.lax.dot_general(both, values, CONTRACT, preferred_element_type=jnp.int32)
    out = barrier(out).astype(jnp.float32)
    return (out[: len(x)] * step + out[len(x) :] * small_step) * scales


def int8_convert(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Weights converted inside YNNPACK's fusion."""
    return streamed(x, values.astype(jnp.float32)) * scales


def int8_sums(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Integer sums, two outputs side by side; activations rounded to 14 bits."""
    step = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / 2**14
    rounded = barrier(jnp.round(x / step).astype(jnp.int32))
    runs = values.astype(jnp.int32).reshape(2, -1, values.shape[1])
    products = tuple(run * rounded[:, None] for run in runs)
    sums = jax.lax.reduce(
        products, (jnp.int32(0),) * 2, lambda a, b: (a[0] + b[0], a[1] + b[1]), (2,)
    )
    return jnp.concatenate(sums, axis=1).astype(jnp.float32) * step * scales


def int8_floats(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Weights converted inside the loop of float sums side by side."""
    return side_by_side(x, values.astype(jnp.float32)) * scales


def int8_decode(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Decoded once per call, when its input is there."""
    x, values, scales = barrier((x, values, scales))
    return streamed(x, barrier(decode_int8(values, scales)))


def int8_decode_early(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    """Decoded whenever XLA likes, which is all layers first."""
    return streamed(x, barrier(decode_int8(values, scales)))


def _to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    step = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / 127
    return jnp.round(x / step).astype(jnp.int8), step


def copied_experts(
    x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """Gathers the chosen experts' weights, then multiplies: XLA copies them first."""
    assert isinstance(gate_up, jax.Array) and isinstance(down, jax.Array)
    chosen, rows = indices.reshape(-1), jnp.repeat(x, CHOICES, axis=0)
    gate, up = jnp.split(jnp.einsum("pol,pl->po", gate_up[chosen], rows), 2, axis=-1)
    y = jnp.einsum("plo,po->pl", down[chosen], _activation(gate, up))
    return (y.reshape(*indices.shape, -1) * weights[..., None]).sum(1)


def pair_experts(
    x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight
) -> jax.Array:
    """Every pair reads its expert in place."""
    routing = sort_pairs(indices, weights, jnp.ones(len(x), jnp.bool_), EXPERTS)
    return experts_by_pair(x, routing, gate_up, down, _activation)


def block_experts(block: int) -> Product:
    """Every expert in use is fetched once and multiplies blocks of so many rows."""

    def run(
        x: jax.Array, indices: jax.Array, weights: jax.Array, gate_up: Weight, down: Weight
    ) -> jax.Array:
        routing = sort_pairs(indices, weights, jnp.ones(len(x), jnp.bool_), EXPERTS)
        return experts_by_block(x, routing, gate_up, down, _activation, EXPERTS, block)

    return run


def _activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def float_cases(rows: int, rng: np.random.Generator) -> dict[str, Timed]:
    """Float forms of `x wᵀ` at this many rows."""
    weights = [(_normal(rng, OUT, IN) / 28,) for _ in range(LAYERS)]
    forms: dict[str, Product] = {
        "dot*": dot,
        "dot, operands turned": dot_turned,
        "broadcast sum": broadcast_sum,
        "streamed*": streamed,
    }
    if rows <= 8:
        forms["sums side by side*"] = side_by_side
    if rows <= 4:
        forms["dot per row"] = dot_per_row
    if padded_rows(rows) != rows:
        forms["streamed, padded*"] = streamed_padded
    return {name: (_chain(form), (_normal(rng, rows, IN), weights)) for name, form in forms.items()}


def int8_cases(rows: int, rng: np.random.Generator) -> dict[str, Timed]:
    """int8-weight forms at this many rows."""
    weights = [quantize(_normal(rng, OUT, IN) / 28, "int8").pair for _ in range(LAYERS)]
    forms: dict[str, Product] = {
        "8-bit rows": int8_dot,
        "8+8-bit rows": int8_dot_split,
        "converted in the dot": int8_convert,
        "integer sums": int8_sums,
        "float sums*": int8_floats,
        "decoded first*": int8_decode,
        "decoded early": int8_decode_early,
    }
    if rows == 1:
        del forms["8-bit rows"]
    return {name: (_chain(form), (_normal(rng, rows, IN), weights)) for name, form in forms.items()}


def expert_cases(rows: int, rng: np.random.Generator) -> dict[str, Timed]:
    """Forms of the routed experts at this many rows, float, int8 and MXFP4 weights."""
    floats = [
        (_normal(rng, EXPERTS, 2 * WIDTH, LATENT) / 20, _normal(rng, EXPERTS, LATENT, WIDTH) / 16)
        for _ in range(EXPERT_LAYERS)
    ]
    packed = {
        form: [tuple(quantize(w, form).pair for w in layer) for layer in floats]
        for form in ("int8", "mxfp4")
    }
    indices = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(rows)])
    routed = jnp.asarray(indices, jnp.int32), jnp.full((rows, CHOICES), 0.25)
    block = 8 if rows <= 32 else 16 if rows <= 128 else 32
    cases: dict[str, Timed] = {}
    for name, form, weights in (
        ("copied, float", copied_experts, floats),
        ("pairs, float*", pair_experts, floats),
        ("blocks, float*", block_experts(block), floats),
        ("pairs, int8*", pair_experts, packed["int8"]),
        ("blocks, int8*", block_experts(block), packed["int8"]),
        ("pairs, mxfp4*", pair_experts, packed["mxfp4"]),
        ("blocks, mxfp4*", block_experts(block), packed["mxfp4"]),
    ):
        if rows > 16 and name.startswith("copied"):
            continue
        cases[name] = _expert_chain(form), (_normal(rng, rows, LATENT), *routed, weights)
    return cases


def _chain(form: Product) -> Callable[..., jax.Array]:
    def run(x: jax.Array, weights: Sequence[tuple]) -> jax.Array:
        for weight in weights:
            y = form(x, *weight)
            x = y.reshape(len(x), OUT // IN, IN).sum(1) * 0.5
        return x

    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


def _expert_chain(form: Product) -> Callable[..., jax.Array]:
    def run(
        x: jax.Array, indices: jax.Array, weights: jax.Array, layers: Sequence[tuple]
    ) -> jax.Array:
        for gate_up, down in layers:
            x = x + 0.1 * form(x, indices, weights, gate_up, down)
        return x

    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))


def shortest(cases: dict[str, Timed], seconds: float) -> dict[str, tuple[float, float]]:
    """Shortest wall and CPU seconds of each case, run in turn for about `seconds` in all."""
    cores = len(os.sched_getaffinity(0))
    for run, arguments in cases.values():
        jax.block_until_ready(run(*arguments))
    best = dict.fromkeys(cases, (np.inf, np.inf))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, (run, arguments) in cases.items():
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(run(*arguments))
            wall, cpu = time.perf_counter() - wall, (time.process_time() - cpu) / cores
            best[name] = min(best[name][0], wall), min(best[name][1], cpu)
    return best


def compare(part: str, rows: int, seconds: float) -> list[dict[str, float | str]]:
    """One record per form of `part` at this many rows."""
    rng = np.random.default_rng(rows)
    make = {"float": float_cases, "int8": int8_cases, "experts": expert_cases}[part]
    cases = make(rows, rng)
    array, square = jnp.ones(2**26, jnp.float32), jnp.ones((1024, 1024), jnp.float32)
    best = shortest(
        {
            **cases,
            "read": (jax.jit(lambda a: a.sum()), (array,)),
            "gemm": (jax.jit(lambda a: a @ a), (square,)),
        },
        seconds,
    )
    bandwidth, rate = array.nbytes / best.pop("read")[0], 2 * 1024**3 / best.pop("gemm")[0]
    layers = EXPERT_LAYERS if part == "experts" else LAYERS
    size = EXPERTS * 3 * WIDTH * LATENT if part == "experts" else OUT * IN
    scale = 1e3 * 1e8 / (layers * size)
    return [
        {
            "part": part,
            "rows": rows,
            "form": name,
            "wall_ms": wall * scale,
            "cpu_ms": cpu * scale,
            "read_gb_s": bandwidth / 1e9,
            "gemm_gflop_s": rate / 1e9,
        }
        for name, (wall, cpu) in best.items()
    ]


def show(records: Sequence[dict[str, float | str]]) -> None:
    """Print one row count's forms."""
    first = records[0]
    print(
        f"\n{first['part']}, {first['rows']} rows "
        f"(reading {first['read_gb_s']:.0f} GB/s, GEMM {first['gemm_gflop_s']:.0f} GFLOP/s)"
    )
    for record in records:
        print(f"  {record['form']:<24}{record['wall_ms']:8.1f} ms{record['cpu_ms']:8.1f} CPU ms")


def main() -> None:
    """Run the parts and row counts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("float", "int8", "experts", "all"), default="all")
    parser.add_argument("--rows", default="1,2,4,8,16,32", help="row counts, by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="per part and row count")
    parser.add_argument("--json", action="store_true", help="print one JSON array instead")
    args = parser.parse_args()
    parts = ("float", "int8", "experts") if args.part == "all" else (args.part,)
    everything = []
    for part in parts:
        for rows in map(int, args.rows.split(",")):
            records = compare(part, rows, args.seconds)
            everything += records
            if not args.json:
                show(records)
    if args.json:
        print(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
