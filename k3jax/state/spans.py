"""Which tokens of which sequences a step computes, and where their state lives."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int32

HostOrDevice = Array | np.ndarray
"""Inputs are packed with NumPy on the host and traced as JAX arrays."""


class Spans(struct.PyTreeNode):
    """One span of consecutive tokens per row, right-padded to the batch's width.

    A row with length 0 is padding: it reads and writes nothing. Without a state (`forward` of a
    fresh batch) only `lengths` is read.
    """

    lengths: Int32[HostOrDevice, "row"]
    """Tokens of this row that are real."""
    starts: Int32[HostOrDevice, "row"]
    """Tokens of the sequence that precede the span."""
    read_slots: Int32[HostOrDevice, "row"]
    """Recurrent slot the span continues from; negative means a fresh sequence."""
    write_slots: Int32[HostOrDevice, "row"]
    """Recurrent slot that receives the state after the span; negative means it is dropped."""
    page_table: Int32[HostOrDevice, "row page"]
    """Pages of the sequence in order, enough for `starts + lengths` tokens; the rest is ignored."""

    def token_mask(self, width: int) -> Bool[Array, "row token"]:
        """Which of `width` padded positions hold a real token."""
        return jnp.arange(width) < self.lengths[:, None]

    @classmethod
    def fresh(cls, lengths: Int32[HostOrDevice, "row"]) -> Spans:
        """Whole sequences from their first token, with no state kept."""
        rows = lengths.shape[0]
        none = jnp.full((rows,), -1, jnp.int32)
        return cls(
            lengths=lengths,
            starts=jnp.zeros((rows,), jnp.int32),
            read_slots=none,
            write_slots=none,
            page_table=jnp.zeros((rows, 0), jnp.int32),
        )
