"""Routed experts: each row through its chosen gated MLPs, summed with weights."""

from pallas_kernels.moe.dispatch import experts
from pallas_kernels.moe.reference import experts_dense

__all__ = ["experts", "experts_dense"]
