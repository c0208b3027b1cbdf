"""The one step that serves prefill spans and decode rows: forward, then one token per row."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int32

from k3jax.config import K3Config
from k3jax.engine.sampling import SamplingInputs, TokenHistory, penalize, sample, top_logprobs
from k3jax.model import backbone
from k3jax.model.params import K3Params
from k3jax.model.vision import merge_features
from k3jax.state import DecodeState, Spans
from k3jax.state.recurrent import read_slots, write_slots
from k3jax.state.spans import HostOrDevice


class ImageInputs(struct.PyTreeNode):
    """Image features that replace media tokens of the spans."""

    features: Float[HostOrDevice, "feature hidden"]
    first: Int32[HostOrDevice, "row"]
    """Index of the feature that the row's first media token of this span takes."""


class StepInputs(struct.PyTreeNode):
    """One step's work, padded to a bucket."""

    tokens: Int32[HostOrDevice, "row token"]
    spans: Spans
    emits: Bool[HostOrDevice, "row"]
    """Rows whose sampled token is the next of their sequence (not so inside a longer prompt)."""
    sampling: SamplingInputs
    images: ImageInputs | None = None


class StepState(struct.PyTreeNode):
    """The model's state and, where penalties are in use, token histories by recurrent slot."""

    decode: DecodeState
    history: TokenHistory | None = None


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
    tokens = jnp.asarray(inputs.tokens)
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
    hidden, _, decode = backbone.forward(params, config, x, spans, state.decode)
    assert decode is not None
    last = jnp.maximum(spans.lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    raw = backbone.logits(params, hidden).astype(jnp.float32)
    if state.history is None:
        chosen, history = sample(raw, inputs.sampling), None
    else:
        chosen, history = _sample_with_history(raw, inputs, state.history)
    found = (None, None, None) if logprobs is None else top_logprobs(raw, chosen, logprobs)
    output = StepOutput(chosen, *found)
    return output, StepState(decode=decode, history=history)


@partial(jax.jit, static_argnames=("config", "logprobs"), donate_argnames=("state",))
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


def _sample_with_history(
    logits: Float32[Array, "row vocab"], inputs: StepInputs, history: TokenHistory
) -> tuple[Int32[Array, "row"], TokenHistory]:
    """Sample under penalties and note this step's prompt and output tokens."""
    spans = inputs.spans
    rows = jnp.arange(logits.shape[0])
    prompt = read_slots(history.prompt, spans.read_slots)
    output = read_slots(history.output, spans.read_slots)
    prefill = (inputs.sampling.generated == 0)[:, None]
    seen = jnp.where(
        spans.token_mask(inputs.tokens.shape[1]) & prefill, inputs.tokens, logits.shape[1]
    )
    prompt = prompt.at[rows[:, None], seen].set(True, mode="drop")
    tokens = sample(penalize(logits, inputs.sampling, prompt, output), inputs.sampling)
    output = output.at[rows, tokens].add(inputs.emits.astype(jnp.int32))
    writes = jnp.where(spans.lengths > 0, spans.write_slots, -1)
    return tokens, TokenHistory(
        prompt=write_slots(history.prompt, writes, prompt),
        output=write_slots(history.output, writes, output),
    )
