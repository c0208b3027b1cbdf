"""Jitted batch inference: the serving step under `lax.while_loop`, for prompts known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.config import K3Config
from k3jax.engine.request import (
    Completion,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    check_prompt,
)
from k3jax.engine.sampling import SamplingInputs, TokenHistory
from k3jax.engine.step import (
    ImageInputs,
    StepInputs,
    StepOutput,
    StepState,
    jitted_step,
    step,
)
from k3jax.model.params import K3Params
from k3jax.state import DecodeState, Spans

PAGE_SIZE = 64
MAX_SPAN = 512
"""Prompt tokens per row that one prefill step takes."""
MIN_SPAN = 16


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
) -> list[Completion]:
    """Complete every prompt; one result per prompt, in order.

    `prompts` are token ids of any lengths, `sampling` one setting for all or one per prompt
    (default: greedy, 256 tokens). Sequences end at the config's end-of-sequence ids, at their own
    `stop_ids`, after `max_tokens`, or at the model's context. `dtype` is that of the state
    (default: that of the weights). Shapes are padded to powers of two, so calls of similar size
    share compiled programs. Raises ValueError naming the prompt that is empty, too long or holds
    an id outside the vocabulary.
    """
    if not prompts:
        return []
    settings = _per_prompt(sampling, len(prompts))
    for number, prompt in enumerate(prompts):
        check_prompt(
            prompt,
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            name=f"prompt {number}",
        )
    batch = _Batch(params, config, prompts, settings, images, dtype)
    batch.prefill()
    batch.decode()
    return batch.completions()


def stream(
    params: K3Params,
    config: K3Config,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    images: PromptImages | None = None,
    dtype: jnp.dtype | None = None,
) -> Iterator[tuple[int, FinishReason | None]]:
    """Complete one prompt, yielding each token as it comes and, with the last, why it ended."""
    setting = sampling or SamplingParams()
    check_prompt(
        prompt, vocab_size=config.vocab_size, max_context=config.max_context, name="prompt"
    )
    batch = _Batch(params, config, [prompt], [setting], [images], dtype)
    if batch.budgets[0] == 0:
        return
    batch.prefill()
    while True:
        token = int(batch.loop.tokens[0])
        reason = batch.finish_reason(0, int(batch.loop.counts[0]), token)
        yield token, reason
        if reason is not None:
            return
        batch.decode(limit=1)


class _Loop(struct.PyTreeNode):
    """What the decode loop carries besides the step's state."""

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
    ):
        self.params, self.config = params, config
        self.prompts, self.settings = prompts, settings
        self.images = images
        self.rows = _bucket(len(prompts), 1)
        padding = self.rows - len(prompts)
        self.lengths = np.array([len(p) for p in prompts] + [0] * padding, np.int32)
        self.padded_settings = [*settings, *[SamplingParams()] * padding]
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
        longest = int((self.lengths + self.budgets).max())
        pages = _bucket(-(-longest // PAGE_SIZE), 1)
        self.page_table = np.arange(self.rows * pages, dtype=np.int32).reshape(self.rows, pages)
        penalized = any(s.penalized for s in settings)
        self.state = StepState(
            decode=DecodeState.init(
                config,
                num_slots=self.rows,
                num_pages=self.rows * pages,
                page_size=PAGE_SIZE,
                dtype=dtype or params.embed.dtype,
            ),
            history=TokenHistory.init(self.rows, config.vocab_size) if penalized else None,
        )
        self.stop_ids = self._stop_ids()
        self.loop = self._empty_loop()

    def _stop_ids(self) -> np.ndarray:
        per_row = [
            (*s.stop_ids, *(() if s.ignore_eos else self.config.eos_token_ids))
            for s in self.padded_settings
        ]
        width = _bucket(max(map(len, per_row)), 1)
        return np.array([[*ids, *[-1] * (width - len(ids))] for ids in per_row], np.int32)

    def _empty_loop(self) -> _Loop:
        limit = _bucket(int(self.budgets.max()), 16)
        shape = (self.rows, limit)
        top = None if self.top is None else (*shape, self.top)
        return _Loop(
            tokens=jnp.zeros(self.rows, jnp.int32),
            positions=jnp.asarray(self.lengths),
            counts=jnp.zeros(self.rows, jnp.int32),
            done=jnp.asarray(self.budgets == 0),
            output=jnp.zeros(shape, jnp.int32),
            logprobs=None if top is None else jnp.zeros(shape, jnp.float32),
            top_ids=None if top is None else jnp.zeros(top, jnp.int32),
            top_logprobs=None if top is None else jnp.zeros(top, jnp.float32),
        )

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
                    page_table=self.page_table,
                ),
                emits=emits,
                sampling=SamplingInputs.pack(self.padded_settings, [0] * self.rows),
                images=None if features is None else ImageInputs(features, taken),
            )
            if features is not None and self.config.vision is not None:
                real = np.arange(width) < span[:, None]
                media = (tokens == self.config.vision.media_token_id) & real
                taken = taken + media.sum(1).astype(np.int32)
            output, self.state = jitted_step(
                self.params, self.config, inputs, self.state, logprobs=self.top
            )
            self.loop = _record(self.loop, output, emits, self.stop_ids, self.budgets)

    def decode(self, limit: int | None = None) -> None:
        """Generate until every row is done, or `limit` tokens per row."""
        sampling = SamplingInputs.pack(self.padded_settings, [0] * self.rows)
        steps = int(self.budgets.max()) if limit is None else limit
        self.loop, self.state = _decode_loop(
            self.params,
            self.config,
            sampling,
            self.page_table,
            self.stop_ids,
            self.budgets,
            steps,
            self.loop,
            self.state,
            logprobs=self.top,
        )

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


@partial(jax.jit, donate_argnums=0)
def _record(
    loop: _Loop,
    output: StepOutput,
    emits: Bool[Array, "row"],
    stop_ids: Int32[Array, "row stop"],
    budgets: Int32[Array, "row"],
) -> _Loop:
    """Write the emitted tokens of rows that are not done, and find which rows are done now."""
    rows = jnp.arange(emits.shape[0])
    emits = emits & ~loop.done
    column = jnp.where(emits, loop.counts, loop.output.shape[1])
    tokens = jnp.where(emits, output.tokens, loop.tokens)
    counts = loop.counts + emits
    stopped = (tokens[:, None] == stop_ids).any(-1) | (counts >= budgets)

    def put(target: Array | None, value: Array | None) -> Array | None:
        if target is None or value is None:
            return None
        return target.at[rows, column].set(value, mode="drop")

    return _Loop(
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
)
def _decode_loop(
    params: K3Params,
    config: K3Config,
    sampling: SamplingInputs,
    page_table: Int32[Array, "row page"],
    stop_ids: Int32[Array, "row stop"],
    budgets: Int32[Array, "row"],
    steps: Int32[Array, ""],
    loop: _Loop,
    state: StepState,
    *,
    logprobs: int | None,
) -> tuple[_Loop, StepState]:
    slots = jnp.arange(page_table.shape[0], dtype=jnp.int32)

    def unfinished(carry: tuple[Array, _Loop, StepState]) -> Array:
        return (carry[0] < steps) & ~carry[1].done.all()

    def body(carry: tuple[Array, _Loop, StepState]) -> tuple[Array, _Loop, StepState]:
        number, loop, state = carry
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
            emits=live,
            sampling=sampling.replace(generated=loop.counts),
        )
        output, state = step(params, config, inputs, state, logprobs=logprobs)
        loop = loop.replace(positions=loop.positions + live)
        return number + 1, _record(loop, output, live, stop_ids, budgets), state

    _, loop, state = jax.lax.while_loop(unfinished, body, (jnp.int32(0), loop, state))
    return loop, state


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise ValueError(f"{len(sampling)} sampling settings for {count} prompts")
    return sampling


def _bucket(value: int, minimum: int) -> int:
    """The smallest power of two that holds `value` and is at least `minimum`."""
    return max(minimum, 1 << max(value - 1, 0).bit_length())
