"""Jitted batch inference: the serving step under `lax.while_loop`, for prompts known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from k3jax.config import K3Config
from k3jax.engine.decode_loop import Loop, RowLimits, decode_loop, record
from k3jax.engine.drafts import DraftedRow, Drafter, decode_with_drafts
from k3jax.engine.kernel_plan import kernel_plan
from k3jax.engine.request import (
    Completion,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    check_prompt,
    check_stop_ids,
)
from k3jax.engine.sampling import SamplingInputs, TokenHistory
from k3jax.engine.step import ImageInputs, StepInputs, StepState, jitted_step
from k3jax.model.params import K3Params
from k3jax.state import DecodeState, Spans
from pallas_kernels.implementation import KernelPlan, use_plan

PAGE_SIZE = 64
MAX_SPAN = 512
"""Prompt tokens per row that one prefill step takes."""
MIN_SPAN = 16
MIN_CONTEXT = 1024
"""Attention looks at this many positions, then at 4 times as many, and so on, as rows grow."""


@dataclass(frozen=True)
class PromptImages:
    """Features of a prompt's images, in order, one per media token of the prompt."""

    features: np.ndarray | Array


def generate(
    params: K3Params,
    config: K3Config,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    images: Sequence[PromptImages | None] | None = None,
    dtype: jnp.dtype | None = None,
    plan: KernelPlan | None = None,
    draft: Drafter | None = None,
) -> list[Completion]:
    """Complete every prompt; one result per prompt, in order.

    `prompts` are token ids of any lengths, `sampling` one setting for all or one per prompt
    (default: greedy, 256 tokens). Sequences end at the config's end-of-sequence ids, at their own
    `stop_ids`, after `max_tokens`, or at the model's context. `dtype` is that of the state
    (default: that of the weights); `plan` says what kernels run (default: as for `Engine`, one per
    call). Shapes are padded to powers of two, so calls of similar size
    share compiled programs. Raises ValueError naming the prompt that is empty, too long or holds
    an id outside the vocabulary, the stop id that can never come, or the images that do not fit.

    `draft` proposes up to 7 tokens for a row at a time, such as `prompt_lookup`: the same tokens
    come out in fewer steps where it is right, and in longer ones where it is not. It gives no
    log-probabilities.
    """
    if not prompts:
        return []
    settings = _per_prompt(sampling, len(prompts))
    if images is not None and len(images) != len(prompts):
        raise ValueError(f"{len(images)} entries of images for {len(prompts)} prompts")
    for number, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        _check(config, prompt, setting, f"prompt {number}")
        if draft is not None and setting.logprobs is not None:
            raise ValueError(f"prompt {number} asks for log-probabilities, which drafts give none")
    batch = _Batch(params, config, prompts, settings, images, dtype, plan)
    batch.prefill()
    if draft is None:
        batch.decode()
    else:
        batch.decode_with(draft)
    return batch.completions()


def stream(
    params: K3Params,
    config: K3Config,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    images: PromptImages | None = None,
    dtype: jnp.dtype | None = None,
    plan: KernelPlan | None = None,
) -> Iterator[tuple[int, FinishReason | None]]:
    """Complete one prompt, yielding each token as it comes and, with the last, why it ended.

    Yields nothing for `max_tokens` 0. Arguments and errors are those of `generate`; the errors
    come with the first token.
    """
    setting = sampling or SamplingParams()
    _check(config, prompt, setting, "prompt")
    batch = _Batch(params, config, [prompt], [setting], [images], dtype, plan)
    if batch.budgets[0] == 0:
        return
    batch.prefill()
    for count in range(1, int(batch.budgets[0]) + 1):
        token = int(np.asarray(batch.loop.tokens)[0])
        reason = batch.finish_reason(0, count, token)
        yield token, reason
        if reason is not None:
            return
        batch.decode(limit=1)


class _Batch:
    """One call's rows: their padded arrays, and the prefill and decode phases over them."""

    def __init__(
        self,
        params: K3Params,
        config: K3Config,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SamplingParams],
        images: Sequence[PromptImages | None] | None,
        dtype: jnp.dtype | None,
        plan: KernelPlan | None,
    ):
        self.params, self.config = params, config
        self.prompts, self.settings = prompts, settings
        self.images = images
        self.rows = _bucket(len(prompts), 1)
        self.plan = plan or kernel_plan(params, config, page_size=PAGE_SIZE, batch=self.rows)
        padding = self.rows - len(prompts)
        self.lengths = np.array([len(p) for p in prompts] + [0] * padding, np.int32)
        self.budgets = np.array(
            [
                min(s.max_tokens, config.max_context - len(p))
                for p, s in zip(prompts, settings, strict=True)
            ]
            + [0] * padding,
            np.int32,
        )
        wanted = [s.logprobs for s in settings if s.logprobs is not None]
        self.top = max(wanted) if wanted else None
        padded = [*settings, *[SamplingParams()] * padding]
        self.stop_ids = _stop_ids(padded, config.eos_token_ids)
        # On the device once: a streaming caller passes them with every token.
        self.limits = RowLimits(jnp.asarray(self.stop_ids), jnp.asarray(self.budgets))
        self.sampling = jax.device_put(SamplingInputs.pack(padded, [0] * self.rows))
        pages = _bucket(_pages(int((self.lengths + self.budgets).max())), 1)
        table = np.arange(self.rows * pages, dtype=np.int32).reshape(self.rows, pages)
        self.page_table, self.cut_tables = table, {}
        penalized = any(s.penalized for s in settings)
        self.state = StepState(
            decode=DecodeState.init(
                config,
                num_slots=self.rows,
                num_pages=self.rows * pages,
                page_size=PAGE_SIZE,
                dtype=dtype or params.embed.dtype,
            ),
            history=TokenHistory.of_prompts([*prompts, *[()] * padding], config.vocab_size)
            if penalized
            else None,
        )
        limit = _bucket(int(self.budgets.max()), 16)
        self.loop = Loop.init(self.lengths, self.budgets == 0, limit=limit, top=self.top)
        self.decoded = 1  # tokens per row that prefill and the steps so far may have produced

    def prefill(self) -> None:
        """Run all prompts in spans of at most `MAX_SPAN` tokens and keep each row's first token."""
        longest = int(self.lengths.max())
        features, taken = self._image_features()
        for start in range(0, longest, MAX_SPAN):
            span = np.clip(self.lengths - start, 0, MAX_SPAN)
            width = min(_bucket(int(span.max()), MIN_SPAN), MAX_SPAN)
            tokens = np.zeros((self.rows, width), np.int32)
            for row, prompt in enumerate(self.prompts):
                tokens[row, : span[row]] = prompt[start : start + span[row]]
            emits = (span > 0) & (start + span == self.lengths)
            slots = np.arange(self.rows, dtype=np.int32)
            inputs = StepInputs(
                tokens=tokens,
                spans=Spans(
                    lengths=span,
                    starts=np.full(self.rows, start, np.int32),
                    read_slots=slots if start else np.full(self.rows, -1, np.int32),
                    write_slots=slots,
                    page_table=self._table(start + width),
                ),
                lanes=slots,
                emits=emits,
                sampling=self.sampling,
                images=None if features is None else ImageInputs(features, taken),
            )
            if features is not None and self.config.vision is not None:
                real = np.arange(width) < span[:, None]
                media = (tokens == self.config.vision.media_token_id) & real
                taken = taken + media.sum(1).astype(np.int32)
            with use_plan(self.plan):
                output, self.state = jitted_step(
                    self.params, self.config, inputs, self.state, logprobs=self.top
                )
            self.loop = record(self.loop, output, emits, self.limits)

    def decode(self, limit: int | None = None) -> None:
        """Generate until every row is done, or `limit` tokens per row."""
        most = int(self.budgets.max())
        end = most if limit is None else min(most, self.decoded + limit)
        while self.decoded < end:
            if limit is None and self.decoded > 1 and bool(self.loop.done.all()):
                return
            # The step that produces token n of a row writes position length + n - 2.
            longest = int(self.lengths[self.budgets > self.decoded].max())
            table = self._table(longest + self.decoded)
            steps = end - self.decoded
            if table.shape[1] < self.page_table.shape[1]:
                steps = min(steps, table.shape[1] * PAGE_SIZE - longest - self.decoded + 1)
            with use_plan(self.plan):
                self.loop, self.state = decode_loop(
                    self.params,
                    self.config,
                    self.sampling,
                    table,
                    self.limits,
                    steps,
                    self.loop,
                    self.state,
                    logprobs=self.top,
                )
            self.decoded += steps

    def decode_with(self, draft: Drafter) -> None:
        """Generate until every row is done, by verifying drafts."""
        found = jax.device_get(self.loop)
        rows = []
        for row in range(self.rows):
            prompt = self.prompts[row] if row < len(self.prompts) else ()
            count = int(found.counts[row])
            room = 0 if found.done[row] else int(self.budgets[row]) - count
            rows.append(
                DraftedRow([*prompt, *found.output[row, :count].tolist()], len(prompt), room)
            )
        with use_plan(self.plan):
            self.state = decode_with_drafts(
                self.params, self.config, draft, rows, self.sampling, self.stop_ids, self._table,
                self.state,
            )  # fmt: skip
        output = np.zeros_like(found.output)
        for number, row in enumerate(rows):
            output[number, : len(row.tokens) - row.prompt] = row.tokens[row.prompt :]
        counts = np.array([len(row.tokens) - row.prompt for row in rows], np.int32)
        self.loop = self.loop.replace(output=output, counts=counts)

    def finish_reason(self, row: int, count: int, token: int) -> FinishReason | None:
        """Why the row ended with this token, or None while it goes on."""
        if token in self.stop_ids[row]:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.budgets[row] else None

    def completions(self) -> list[Completion]:
        """The rows' results on the host."""
        loop = jax.device_get(self.loop)
        results = []
        for row, (prompt, setting) in enumerate(zip(self.prompts, self.settings, strict=True)):
            count = int(loop.counts[row])
            tokens = tuple(int(t) for t in loop.output[row, :count])
            reason = self.finish_reason(row, count, tokens[-1]) if tokens else None
            logprobs = None
            if setting.logprobs is not None:
                logprobs = tuple(
                    TokenLogprobs(
                        chosen=float(loop.logprobs[row, i]),
                        top=tuple(
                            (int(t), float(v))
                            for t, v in zip(
                                loop.top_ids[row, i, : setting.logprobs],
                                loop.top_logprobs[row, i, : setting.logprobs],
                                strict=True,
                            )
                        ),
                    )
                    for i in range(count)
                )
            results.append(Completion(len(prompt), tokens, reason or FinishReason.LENGTH, logprobs))
        return results

    def _table(self, context: int) -> Array:
        """The page table as far as `context` tokens need it: attention costs what it covers."""
        width = MIN_CONTEXT
        while width < context:
            width *= 4
        pages = min(_pages(width), self.page_table.shape[1])
        if pages not in self.cut_tables:
            self.cut_tables[pages] = jnp.asarray(self.page_table[:, :pages])
        return self.cut_tables[pages]

    def _image_features(self) -> tuple[Array | None, np.ndarray]:
        """All rows' features in one array, and where each row's begin."""
        first = np.zeros(self.rows, np.int32)
        if self.images is None or all(image is None for image in self.images):
            return None, first
        if self.config.vision is None:
            raise ValueError("images were given, but the model has no vision tower")
        parts, total = [], 0
        for row, image in enumerate(self.images):
            media = list(self.prompts[row]).count(self.config.vision.media_token_id)
            given = 0 if image is None else image.features.shape[0]
            if media != given:
                raise ValueError(
                    f"prompt {row} has {media} media tokens, but its images have {given} features"
                )
            first[row] = total
            if image is not None:
                parts.append(jnp.asarray(image.features))
                total += given
        features = jnp.concatenate(parts)
        padding = _bucket(total, MIN_SPAN) - total
        return jnp.pad(features, ((0, padding), (0, 0))), first


def _check(config: K3Config, prompt: Sequence[int], setting: SamplingParams, name: str) -> None:
    vocab_size = config.vocab_size
    check_prompt(prompt, vocab_size=vocab_size, max_context=config.max_context, name=name)
    check_stop_ids(setting, vocab_size=vocab_size, name=name)


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(f"{len(sampling)} sampling settings for {count} prompts")
    return sampling


def _stop_ids(settings: Sequence[SamplingParams], eos: tuple[int, ...]) -> np.ndarray:
    """One row per setting, padded with -1."""
    per_row = [(*s.stop_ids, *(() if s.ignore_eos else eos)) for s in settings]
    width = _bucket(max(map(len, per_row)), 1)
    return np.array([[*ids, *[-1] * (width - len(ids))] for ids in per_row], np.int32)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _bucket(value: int, minimum: int) -> int:
    """The smallest power of two that holds `value` and is at least `minimum`."""
    return max(minimum, 1 << max(value - 1, 0).bit_length())
