"""Prints the least time of a decode step of the released K3, part by part, on NVIDIA GPUs.

Examples:
    python scripts/gpu_floors.py
    python scripts/gpu_floors.py --rows 1 16 --context 131072

Every weight in use, state and cached latent is read once at the maker's bandwidth, or its products
run at the maker's dense bfloat16 peak, whichever takes longer; communication is free. The whole
model does not fit one of these GPUs: divide by their number for a perfect split.
"""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp

from k3jax.config import K3Config, k3
from k3jax.model import params
from pallas_kernels.shapes import DECODE_ROWS, ModelShape
from scripts.gpu.floors import SPEEDS, Part, decode_step_parts, floor_us


def main(argv: list[str] | None = None) -> int:
    """Print the table in Markdown."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=list(DECODE_ROWS))
    parser.add_argument("--context", type=int, default=8192, help="cached tokens per row")
    options = parser.parse_args(argv)
    devices = ("h200", "b200")
    print(f"| rows | part | GB | TFLOP | {' | '.join(f'{name.upper()} ms' for name in devices)} |")
    print("|---|---|---|---|" + "---|" * len(devices))
    for rows in options.rows:
        for part in step_parts(k3(), rows, options.context):
            times = (
                floor_us(part.least_bytes, part.operations, SPEEDS[name]) / 1e3 for name in devices
            )
            cells = " | ".join(f"{time:.2f}" for time in times)
            size, work = part.least_bytes / 1e9, part.operations / 1e12
            print(f"| {rows} | {part.name} | {size:.2f} | {work:.2f} | {cells} |")
    return 0


def step_parts(config: K3Config, rows: int, context: int) -> list[Part]:
    """Bytes and operations of a decode step of this model."""
    weights = params.abstract(config, jnp.bfloat16)
    experts = [
        leaf
        for layer in weights.layers
        if isinstance(layer.ffn, params.MoEParams)
        for leaf in jax.tree.leaves((layer.ffn.gate_up, layer.ffn.down))
    ]
    unused = [*experts, weights.embed, *jax.tree.leaves(weights.vision)]
    return decode_step_parts(
        ModelShape.of(config, "bfloat16", 64),
        kda_layers=len(config.kda_layers),
        mla_layers=len(config.mla_layers),
        sparse_layers=sum(config.is_sparse(layer) for layer in range(config.num_layers)),
        mixed_sums=_mixed_sums(config),
        other_weights=_numbers(jax.tree.leaves(weights)) - _numbers(unused),
        rows=rows,
        context=context,
    )


def _mixed_sums(config: K3Config) -> int:
    """Hidden rows that the steps between sublayers read (bank, sum, output) and write (two)."""
    total = bank = 0
    for layer in range(config.num_layers):
        restart = config.starts_depth_block(layer)
        total += bank + 2 + 2 * (layer > 0)  # before the mixer; nothing is added at first
        bank += restart
        total += bank + (2 if restart else 4)
    return total + bank + 3  # before the head, where only the input is needed


def _numbers(leaves: list[jax.Array]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves)


if __name__ == "__main__":
    sys.exit(main())
