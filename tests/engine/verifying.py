"""Rows that have been prefilled, plain steps from there, and drafts against them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.engine.request import SamplingParams
from k3jax.engine.sampling import SamplingInputs, TokenHistory
from k3jax.engine.step import StepInputs, StepState, jitted_step
from k3jax.engine.verify import VerifyInputs, VerifyOutput, jitted_verify_step
from k3jax.model.params import K3Params
from k3jax.state import DecodeState, Spans

PAGE, ENTRIES, WIDTH = 4, 6, 8


class Rows(NamedTuple):
    """Rows of a model, each with a prompt, in slot and lane of its number."""

    weights: K3Params
    config: K3Config
    prompts: list[list[int]]
    sampling: list[SamplingParams]

    @property
    def table(self) -> np.ndarray:
        """Scattered pages, disjoint; some belong to nobody."""
        count = len(self.prompts)
        pages = np.random.default_rng(5).permutation(count * ENTRIES + 3)
        return pages[: count * ENTRIES].reshape(count, ENTRIES).astype(np.int32)

    @property
    def anything(self) -> np.ndarray:
        """Masks that allow every token."""
        shape = (len(self.prompts), -(-self.config.vocab_size // 32))
        return np.full(shape, 0xFFFFFFFF, np.uint32)

    def spans(self, lengths: list[int], starts: list[int], read: int, write: int) -> Spans:
        """Spans of slots from `read` (negative: fresh rows) to slots from `write` on."""
        numbers = np.arange(len(lengths), dtype=np.int32)
        return Spans(
            lengths=np.array(lengths, np.int32),
            starts=np.array(starts, np.int32),
            read_slots=numbers + read if read >= 0 else np.full_like(numbers, -1),
            write_slots=numbers + write,
            page_table=self.table,
        )

    def prefilled(self) -> tuple[np.ndarray, StepState]:
        """Each row's first token, and the state; what no row owns is NaN."""
        count = len(self.prompts)
        decode = DecodeState.init(
            self.config, num_slots=2 * count + 1, num_pages=count * ENTRIES + 3, page_size=PAGE
        )
        state = StepState(
            decode=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), decode),
            history=TokenHistory.of_prompts(self.prompts, self.config.vocab_size),
            last_tokens=jnp.zeros(count, jnp.int32),
        )
        lengths = [len(prompt) for prompt in self.prompts]
        tokens = np.zeros((count, max(lengths)), np.int32)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        return self.step(tokens, self.spans(lengths, [0] * count, -1, 0), 0, self.anything, state)

    def step(
        self,
        tokens: np.ndarray,
        spans: Spans,
        generated: int,
        masks: np.ndarray,
        state: StepState,
    ) -> tuple[np.ndarray, StepState]:
        """One plain step of all rows."""
        count = len(self.prompts)
        inputs = StepInputs(
            tokens=tokens,
            spans=spans,
            lanes=np.arange(count, dtype=np.int32),
            emits=np.asarray(spans.lengths) > 0,
            sampling=SamplingInputs.pack(self.sampling, [generated] * count),
            masks=masks,
        )
        output, state = jitted_step(self.weights, self.config, inputs, state)
        return np.asarray(output.tokens), state

    def decoded(
        self, first: np.ndarray, state: StepState, steps: int, masks: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[StepState]]:
        """Tokens [row, 1 + steps] of plain steps, and copies of the state before and after each."""
        lengths = [len(prompt) for prompt in self.prompts]
        ones, tokens, states = [1] * len(lengths), [first], [copied(state)]
        state = copied(state)
        for number in range(steps):
            spans = self.spans(ones, [n + number for n in lengths], 0, 0)
            mask = self.anything if masks is None else masks[:, number]
            found, state = self.step(tokens[-1][:, None], spans, number + 1, mask, state)
            tokens.append(found)
            states.append(copied(state))
        return np.stack(tokens, 1), states

    def verified(
        self,
        tokens: np.ndarray,
        lengths: list[int],
        state: StepState,
        *,
        write: int,
        masks: np.ndarray | None = None,
        stop_ids: dict[int, list[int]] | None = None,
    ) -> tuple[VerifyOutput, StepState]:
        """Verify what follows each row's first token; new states go to the slots from `write` on.

        Padded to all rows and 8 tokens, so that one program serves all tests.
        """
        count = len(self.prompts)
        padded = np.zeros((count, WIDTH), np.int32)
        padded[: tokens.shape[0], : tokens.shape[1]] = tokens
        allowed = np.repeat(self.anything[:, None], WIDTH, 1)
        if masks is not None:
            allowed[: masks.shape[0], : masks.shape[1]] = masks
        stops = np.full((count, 2), -1, np.int32)
        for row, ids in (stop_ids or {}).items():
            stops[row, -len(ids) :] = ids
        lengths = [*lengths, *[0] * (count - len(lengths))]
        inputs = VerifyInputs(
            tokens=padded,
            spans=self.spans(lengths, [len(prompt) for prompt in self.prompts], 0, write),
            lanes=np.arange(count, dtype=np.int32),
            sampling=SamplingInputs.pack(self.sampling, [1] * count),
            masks=allowed,
            stop_ids=stops,
        )
        output, new = jitted_verify_step(self.weights, self.config, inputs, copied(state))
        return jax.tree.map(np.asarray, output), new


def copied(state: StepState) -> StepState:
    """A copy that a donation of the other does not take away."""
    return jax.tree.map(jnp.copy, state)


def drafted(tokens: np.ndarray, right: list[int], lengths: list[int], vocab: int) -> np.ndarray:
    """Each row's first of `tokens`, as many of the next as `right` says, and wrong ones.

    Padding would be right, but for its place.
    """
    drafts = (tokens[: len(right), :WIDTH] + 1) % vocab
    for row, count in enumerate(right):
        drafts[row, : count + 1] = tokens[row, : count + 1]
        drafts[row, lengths[row] :] = tokens[row, lengths[row] : WIDTH]
    return drafts
