"""The least time an op can take on a device: its bytes at full bandwidth, or products at peak."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.shapes import ModelShape


class Speed(NamedTuple):
    """A maker's figures."""

    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 operations per second."""


SPEEDS = {
    "h100": Speed(3.35e12, 989e12),
    "h200": Speed(4.8e12, 989e12),
    "b200": Speed(8.0e12, 2250e12),
}


def floor_us(least_bytes: int, operations: int, speed: Speed) -> float:
    """Microseconds."""
    return 1e6 * max(least_bytes / speed.bandwidth, operations / speed.flops)


def speed_of(device_kind: str) -> Speed | None:
    """The figures of a device by JAX's name for it, such as "NVIDIA H200"."""
    kind = device_kind.lower()
    return next((speed for name, speed in SPEEDS.items() if name in kind), None)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one kind of sublayer needs in a decode step, over all its layers."""

    name: str
    least_bytes: int
    operations: int


def decode_step_parts(
    shape: ModelShape,
    *,
    kda_layers: int,
    mla_layers: int,
    sparse_layers: int,
    other_weights: int,
    mixed_sums: int,
    rows: int,
    context: int,
) -> list[Part]:
    """Bytes and operations of one decode step, each weight and state read once.

    `other_weights` are those of dense matrices (bfloat16), used by every row. `mixed_sums` counts
    what residual mixes read and write, in hidden rows of bfloat16. Experts in use are the expected
    number of different ones under uniform routing.
    """
    state = rows * shape.kda_heads * shape.kda_head**2
    width = shape.latent + shape.shared_key
    expert = 3 * shape.expert_in * shape.expert_width
    missed = (1 - shape.choices / shape.experts) ** rows if shape.experts else 1.0
    used = round(shape.experts * (1 - missed))
    return [
        Part("KDA states", kda_layers * 2 * 4 * state, kda_layers * 7 * state),
        Part(
            "MLA latents",
            mla_layers * 2 * rows * context * width,
            mla_layers * 2 * rows * shape.mla_heads * context * (width + shape.latent),
        ),
        Part(
            "routed experts",
            sparse_layers * used * expert * 17 // 32,
            sparse_layers * 2 * rows * shape.choices * expert,
        ),
        Part(
            "residual mixes",
            2 * rows * mixed_sums * shape.hidden,
            8 * rows * mixed_sums * shape.hidden,
        ),
        Part("dense matrices", 2 * other_weights, 2 * rows * other_weights),
    ]
