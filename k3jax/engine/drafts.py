"""Decoding with drafts on the host: who proposes tokens, and the loop that verifies them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from k3jax.config import K3Config
from k3jax.engine.sampling import SamplingInputs
from k3jax.engine.step import StepState
from k3jax.engine.verify import VerifyInputs, jitted_verify_step
from k3jax.model.params import K3Params
from k3jax.state import Spans
from pallas_kernels.kda.verify import MAX_TOKENS

Drafter = Callable[[Sequence[int], int], Sequence[int]]
"""From the tokens of a sequence so far, its prompt too: at most so many that may come next."""

LOOKUP_SIZES = (4, 3, 2)
"""How many last tokens `prompt_lookup` looks for, in this order."""


def prompt_lookup(tokens: Sequence[int], limit: int) -> list[int]:
    """What followed when the sequence's last tokens stood in it before, the latest time.

    A drafter without a model: right where text repeats its prompt or itself.
    """
    tokens = list(tokens)
    for size in LOOKUP_SIZES:
        end = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == end:
                return tokens[start + size : start + size + limit]
    return []


@dataclass
class DraftedRow:
    """One row of the loop."""

    tokens: list[int]
    """Prompt and output; all but the last are in the state. Grows."""
    prompt: int
    """How many of them are the prompt."""
    room: int
    """Tokens that may still come; 0 where the row has ended."""


def decode_with_drafts(
    params: K3Params,
    config: K3Config,
    draft: Drafter,
    rows: Sequence[DraftedRow],
    sampling: SamplingInputs,
    stop_ids: np.ndarray,
    table: Callable[[int], Array],
    state: StepState,
) -> StepState:
    """Let all rows grow until they end; row n lives in slot n.

    `table` gives a page table for a context of so many tokens; `state` is donated. Raises
    ValueError naming the row whose draft is too long or holds an id outside the vocabulary.
    """
    slots = np.arange(len(rows), dtype=np.int32)
    while any(row.room for row in rows):
        tokens, lengths = _packed(config, draft, rows)
        starts = np.array([len(row.tokens) - 1 if row.room else 0 for row in rows], np.int32)
        generated = np.array([len(row.tokens) - row.prompt for row in rows], np.int32)
        inputs = VerifyInputs(
            tokens=tokens,
            spans=Spans(lengths, starts, slots, slots, table(int((starts + lengths).max()))),
            lanes=slots,
            sampling=sampling.replace(generated=generated),
            stop_ids=stop_ids,
        )
        output, state = jitted_verify_step(params, config, inputs, state)
        found, counts = jax.device_get((output.tokens, output.counts))
        for row, new, count, stops in zip(rows, found, counts, stop_ids, strict=True):
            if row.room:
                row.tokens += new[:count].tolist()
                row.room = 0 if row.tokens[-1] in stops else row.room - int(count)
    return state


def _packed(
    config: K3Config, draft: Drafter, rows: Sequence[DraftedRow]
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's last token and drafts, padded to a power of two, and how many they are."""
    spans = [
        [row.tokens[-1], *_proposed(config, draft, row, number)] if row.room else []
        for number, row in enumerate(rows)
    ]
    lengths = np.array([len(span) for span in spans], np.int32)
    width = 1 << int(lengths.max() - 1).bit_length()
    tokens = np.zeros((len(rows), width), np.int32)
    for number, span in enumerate(spans):
        tokens[number, : len(span)] = span
    return tokens, lengths


def _proposed(config: K3Config, draft: Drafter, row: DraftedRow, number: int) -> list[int]:
    limit = min(row.room, MAX_TOKENS) - 1
    if not limit:
        return []
    tokens = [operator.index(token) for token in draft(row.tokens, limit)]
    if len(tokens) > limit:
        raise ValueError(f"the draft for prompt {number} has {len(tokens)} tokens, at most {limit}")
    for token in tokens:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"the draft for prompt {number} holds {token}; the vocabulary is "
                f"0..{config.vocab_size - 1}"
            )
    return tokens
