"""Decoding on the device: the step under `lax.while_loop` until every row has ended."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.config import K3Config
from k3jax.engine.host import COMPILER_OPTIONS
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepInputs, StepOutput, StepState, step
from k3jax.model.params import K3Params
from k3jax.state import Spans


class Loop(struct.PyTreeNode):
    """What the rows have generated; `limit` bounds the tokens of any row."""

    tokens: Int32[Array, "row"]
    """Each row's newest token."""
    positions: Int32[Array, "row"]
    """Tokens of the row that are in the state."""
    counts: Int32[Array, "row"]
    """Tokens the row has generated."""
    done: Bool[Array, "row"]
    output: Int32[Array, "row limit"]
    logprobs: Float32[Array, "row limit"] | None
    top_ids: Int32[Array, "row limit top"] | None
    top_logprobs: Float32[Array, "row limit top"] | None

    @classmethod
    def init(
        cls,
        lengths: Int32[np.ndarray, "row"],
        done: Bool[np.ndarray, "row"],
        *,
        limit: int,
        top: int | None,
    ) -> Loop:
        """Nothing generated yet after prompts of `lengths` tokens; `top` None: no logprobs."""
        shape = (len(lengths), limit)
        return cls(
            tokens=jnp.zeros(len(lengths), jnp.int32),
            positions=jnp.asarray(lengths),
            counts=jnp.zeros(len(lengths), jnp.int32),
            done=jnp.asarray(done),
            output=jnp.zeros(shape, jnp.int32),
            logprobs=None if top is None else jnp.zeros(shape, jnp.float32),
            top_ids=None if top is None else jnp.zeros((*shape, top), jnp.int32),
            top_logprobs=None if top is None else jnp.zeros((*shape, top), jnp.float32),
        )


class RowLimits(struct.PyTreeNode):
    """What ends each row."""

    stop_ids: Int32[Array, "row stop"]
    """Negative entries are padding."""
    budgets: Int32[Array, "row"]
    """Tokens the row may generate."""


@partial(jax.jit, donate_argnums=0)
def record(loop: Loop, output: StepOutput, emits: Bool[Array, "row"], limits: RowLimits) -> Loop:
    """Write the emitted tokens of rows that are not done, and find which rows are done now.

    `loop` is donated.
    """
    rows = jnp.arange(emits.shape[0])
    emits = emits & ~loop.done
    column = jnp.where(emits, loop.counts, loop.output.shape[1])
    tokens = jnp.where(emits, output.tokens, loop.tokens)
    counts = loop.counts + emits
    stopped = (tokens[:, None] == limits.stop_ids).any(-1) | (counts >= limits.budgets)

    def put(target: Array | None, value: Array | None) -> Array | None:
        if target is None or value is None:
            return None
        return target.at[rows, column].set(value, mode="drop")

    return Loop(
        tokens=tokens,
        positions=loop.positions,
        counts=counts,
        done=loop.done | (emits & stopped),
        output=loop.output.at[rows, column].set(tokens, mode="drop"),
        logprobs=put(loop.logprobs, output.logprobs),
        top_ids=put(loop.top_ids, output.top_ids),
        top_logprobs=put(loop.top_logprobs, output.top_logprobs),
    )


@partial(
    jax.jit,
    static_argnames=("config", "logprobs"),
    donate_argnames=("loop", "state"),
    compiler_options=COMPILER_OPTIONS,
)
def decode_loop(
    params: K3Params,
    config: K3Config,
    sampling: SamplingInputs,
    page_table: Int32[Array, "row page"],
    limits: RowLimits,
    steps: Int32[Array, ""],
    loop: Loop,
    state: StepState,
    *,
    logprobs: int | None,
) -> tuple[Loop, StepState]:
    """At most `steps` tokens for every row that is not done; row n lives in slot n.

    `page_table` must cover every position that those steps write. `loop` and `state` are donated.
    """
    slots = jnp.arange(page_table.shape[0], dtype=jnp.int32)

    def unfinished(carry: tuple[Array, Loop, StepState]) -> Array:
        return (carry[0] < steps) & ~carry[1].done.all()

    def body(carry: tuple[Array, Loop, StepState]) -> tuple[Array, Loop, StepState]:
        number, loop, state = carry
        # Tied to the loop, or XLA decodes int8 and casts bfloat16 weights ahead of it, all at once.
        weights, loop = jax.lax.optimization_barrier((params, loop))
        live = ~loop.done
        inputs = StepInputs(
            tokens=loop.tokens[:, None],
            spans=Spans(
                lengths=live.astype(jnp.int32),
                starts=loop.positions,
                read_slots=slots,
                write_slots=slots,
                page_table=page_table,
            ),
            lanes=slots,
            emits=live,
            sampling=sampling.replace(generated=loop.counts),
        )
        output, state = step(weights, config, inputs, state, logprobs=logprobs)
        loop = loop.replace(positions=loop.positions + live)
        return number + 1, record(loop, output, live, limits), state

    _, loop, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), loop, state))
    return loop, state
