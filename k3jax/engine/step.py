"""The one step that serves prefill spans and decode rows: forward, then one token per row."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from k3jax.config import K3Config
from k3jax.engine.host import COMPILER_OPTIONS
from k3jax.engine.sampling import (
    SamplingInputs,
    TokenHistory,
    if_any,
    masked,
    penalize,
    sample,
    top_logprobs,
)
from k3jax.model import backbone
from k3jax.model.params import K3Params
from k3jax.model.vision import merge_features
from k3jax.state import DecodeState, LatentCache, RecurrentState, Spans
from k3jax.state.latent import copy_pages
from k3jax.state.spans import HostOrDevice
from k3jax.state.transfer import SlotCopy, read_pages, read_slot, write_pages, write_slot


class ImageInputs(struct.PyTreeNode):
    """Image features that replace media tokens of the spans."""

    features: Float[HostOrDevice, "feature hidden"]
    first: Int32[HostOrDevice, "row"]
    """Index of the feature that the row's first media token of this span takes."""


class StepInputs(struct.PyTreeNode):
    """One step's work, padded to a bucket."""

    tokens: Int32[HostOrDevice, "row token"]
    spans: Spans
    lanes: Int32[HostOrDevice, "row"]
    """Where the row's sequence keeps its last token and history; padding rows are out of range."""
    emits: Bool[HostOrDevice, "row"]
    """Rows whose sampled token is the next of their sequence (not so inside a longer prompt)."""
    sampling: SamplingInputs
    decodes: Bool[HostOrDevice, "row"] | None = None
    """Rows whose first token is the last one of their lane, whatever `tokens` says."""
    page_copies: Int32[HostOrDevice, "row 2"] | None = None
    """A page to copy before the step and where to; a negative source copies nothing."""
    masks: UInt32[HostOrDevice, "row word"] | None = None
    """Bit i % 32 of word i // 32: whether token i may be sampled."""
    wants_logprobs: Bool[HostOrDevice, "row"] | None = None
    """With `logprobs` set: compute them only if some row wants them (None: always)."""
    images: ImageInputs | None = None


class StepState(struct.PyTreeNode):
    """The model's state and, by lane, the last token and (for penalties) the token history."""

    decode: DecodeState
    history: TokenHistory | None = None
    last_tokens: Int32[Array, "lane"] | None = None


class StepOutput(struct.PyTreeNode):
    """What a step found after each row's last real token."""

    tokens: Int32[Array, "row"]
    logprobs: Float32[Array, "row"] | None
    top_ids: Int32[Array, "row top"] | None
    top_logprobs: Float32[Array, "row top"] | None


def step(
    params: K3Params,
    config: K3Config,
    inputs: StepInputs,
    state: StepState,
    *,
    logprobs: int | None = None,
) -> tuple[StepOutput, StepState]:
    """Run the spans, sample one token per row, return the state after them.

    `logprobs` (static) adds that many alternatives per row; None leaves log-probabilities out.
    """
    spans = inputs.spans
    tokens = _tokens(inputs, state)
    decode = state.decode
    if inputs.page_copies is not None:
        pages = tuple(copy_pages(pool, inputs.page_copies) for pool in decode.latent.pages)
        decode = decode.replace(latent=decode.latent.replace(pages=pages))
    x = backbone.embed(params, tokens)
    if inputs.images is not None:
        assert config.vision is not None
        x = merge_features(
            x,
            tokens,
            jnp.asarray(inputs.images.features),
            config.vision.media_token_id,
            jnp.asarray(inputs.images.first),
        )
    hidden, _, decode = backbone.forward(params, config, x, spans, decode)
    assert decode is not None
    last = jnp.maximum(spans.lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    raw = backbone.logits(params, hidden).astype(jnp.float32)
    adjusted = raw if state.history is None else _penalized(raw, inputs, state.history)
    chosen = sample(masked(adjusted, inputs.masks), inputs.sampling)
    found = (None, None, None)
    if logprobs is not None:
        found = _logprobs(raw, chosen, logprobs, inputs.wants_logprobs)
    return StepOutput(chosen, *found), StepState(
        decode=decode,
        history=None if state.history is None else _noted(inputs, chosen, state.history),
        last_tokens=None
        if state.last_tokens is None
        else state.last_tokens.at[_emitting(inputs)].set(chosen, mode="drop"),
    )


@partial(
    jax.jit,
    static_argnames=("config", "logprobs"),
    donate_argnames=("state",),
    compiler_options=COMPILER_OPTIONS,
)
def jitted_step(
    params: K3Params,
    config: K3Config,
    inputs: StepInputs,
    state: StepState,
    *,
    logprobs: int | None = None,
) -> tuple[StepOutput, StepState]:
    """`step`, compiled per bucket; `state` is donated and updated in place."""
    return step(params, config, inputs, state, logprobs=logprobs)


def _tokens(inputs: StepInputs, state: StepState) -> Int32[Array, "row token"]:
    tokens = jnp.asarray(inputs.tokens)
    if inputs.decodes is None or state.last_tokens is None:
        return tokens
    last = jnp.take(state.last_tokens, inputs.lanes, mode="clip")
    return tokens.at[:, 0].set(jnp.where(inputs.decodes, last, tokens[:, 0]))


def _emitting(inputs: StepInputs) -> Int32[Array, "row"]:
    """Lanes of the rows that emit; any other row is out of range."""
    return jnp.where(inputs.emits, inputs.lanes, jnp.iinfo(jnp.int32).max)


def _penalized(
    logits: Float32[Array, "row vocab"], inputs: StepInputs, history: TokenHistory
) -> Float32[Array, "row vocab"]:
    """Logits under each row's penalties."""

    def penalized() -> Array:
        prompt = jnp.take(history.prompt, inputs.lanes, axis=0, mode="clip")
        output = jnp.take(history.output, inputs.lanes, axis=0, mode="clip")
        return penalize(logits, inputs.sampling, prompt, output)

    return if_any(inputs.sampling.penalized(), penalized, logits)


def _noted(inputs: StepInputs, tokens: Int32[Array, "row"], history: TokenHistory) -> TokenHistory:
    """The history with the tokens that this step emits."""
    lanes = jnp.where(inputs.sampling.penalized(), _emitting(inputs), jnp.iinfo(jnp.int32).max)
    return history.replace(output=history.output.at[lanes, tokens].add(1, mode="drop"))


def _logprobs(
    logits: Float32[Array, "row vocab"],
    chosen: Int32[Array, "row"],
    count: int,
    wants: Bool[HostOrDevice, "row"] | None,
) -> tuple[Float32[Array, "row"], Int32[Array, "row top"], Float32[Array, "row top"]]:
    if wants is None:
        return top_logprobs(logits, chosen, count)
    rows = logits.shape[0]
    nothing = (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, count), jnp.int32),
        jnp.zeros((rows, count), jnp.float32),
    )
    return jax.lax.cond(
        jnp.asarray(wants).any(), lambda: top_logprobs(logits, chosen, count), lambda: nothing
    )


@partial(jax.jit, donate_argnames=("state",))
def jitted_history(
    state: StepState,
    lane: Int32[HostOrDevice, ""],
    prompt: Bool[HostOrDevice, "vocab"],
    output: Int32[HostOrDevice, "vocab"],
) -> StepState:
    """`state` (donated) with the history of a sequence that begins or comes back in `lane`."""
    assert state.history is not None
    return state.replace(
        history=TokenHistory(
            prompt=state.history.prompt.at[lane].set(prompt),
            output=state.history.output.at[lane].set(output),
        )
    )


@jax.jit
def jitted_read_slot(state: RecurrentState, slot: Int32[HostOrDevice, ""]) -> SlotCopy:
    """`read_slot`, compiled."""
    return read_slot(state, slot)


@partial(jax.jit, donate_argnames=("state",))
def jitted_write_slot(
    state: RecurrentState, slot: Int32[HostOrDevice, ""], copy: SlotCopy
) -> RecurrentState:
    """`write_slot`, compiled; `state` is donated."""
    return write_slot(state, slot, copy)


@jax.jit
def jitted_read_pages(
    cache: LatentCache, pages: Int32[HostOrDevice, "page"]
) -> Float[Array, "layer page position latent"]:
    """`read_pages`, compiled for one number of pages."""
    return read_pages(cache, pages)


@partial(jax.jit, donate_argnames=("cache",))
def jitted_write_pages(
    cache: LatentCache,
    pages: Int32[HostOrDevice, "page"],
    values: Float[HostOrDevice, "layer page position latent"],
) -> LatentCache:
    """`write_pages`, compiled for one number of pages; `cache` is donated."""
    return write_pages(cache, pages, values)
