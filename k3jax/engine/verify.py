"""The step of speculative decoding: which proposed tokens are those that decoding would give."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from k3jax.config import K3Config
from k3jax.engine.host import COMPILER_OPTIONS
from k3jax.engine.sampling import SamplingInputs, TokenHistory, if_any, masked, penalize, sample
from k3jax.engine.step import StepState
from k3jax.model import backbone
from k3jax.model.params import K3Params
from k3jax.state import Spans
from k3jax.state.spans import HostOrDevice
from pallas_kernels.kda.verify import MAX_TOKENS

NOTHING = -1
"""Stands in a row's output from its count on."""


class VerifyInputs(struct.PyTreeNode):
    """One step's drafts, padded to a bucket of at most `MAX_TOKENS` tokens per row."""

    tokens: Int32[HostOrDevice, "row token"]
    """The last token of each row's sequence, which the state does not hold yet, then its drafts."""
    spans: Spans
    """`lengths` are 1 and the number of drafts, 0 in padding rows."""
    lanes: Int32[HostOrDevice, "row"]
    """As in `StepInputs`."""
    sampling: SamplingInputs
    """`generated` counts the tokens before the first one that this step finds."""
    masks: UInt32[HostOrDevice, "row token word"] | None = None
    """`StepInputs.masks` for what follows each token, should the drafts up to it be right."""
    stop_ids: Int32[HostOrDevice, "row stop"] | None = None
    """What ends a row; negative ids are padding. None leaves it to the caller to stop."""


class VerifyOutput(struct.PyTreeNode):
    """The tokens that each row goes on with."""

    tokens: Int32[Array, "row token"]
    """`NOTHING` from the row's count on."""
    counts: Int32[Array, "row"]
    """Right drafts and one more, or as many as a stop id lets through; 0 in padding rows."""


def verify_step(
    params: K3Params, config: K3Config, inputs: VerifyInputs, state: StepState
) -> tuple[VerifyOutput, StepState]:
    """Find up to one token more than there are drafts, and the state of having decoded them.

    The model runs over the last token and all drafts of a row. After each it chooses as a plain
    step would there: greedily, or with the noise that the row's seed has for that count of tokens,
    under the penalties and mask that hold if the drafts so far are right. A draft is right if it is
    the token chosen in its place; the right ones before the first wrong one come out, and then the
    token chosen next. So a row's tokens, sampled or not, are those of plain steps one for one,
    whatever the drafts were, and their distribution is the model's without further ado. (Products
    over more tokens sum in another order: two tokens that all but tie may still change places.)

    The state is that after as many plain steps: all tokens but the last that came out are in it.
    With `stop_ids` nothing comes out, or is in the state, past a stop. To keep a limit of tokens,
    give fewer drafts. A draft outside the vocabulary is never right. Raises ValueError naming the
    input whose shape does not fit.
    """
    _check(inputs, config.vocab_size)
    x = backbone.embed(params, jnp.asarray(inputs.tokens))
    hidden, traces, decode = backbone.verify(params, config, x, inputs.spans, state.decode)
    chosen = _choose(backbone.logits(params, hidden).astype(jnp.float32), inputs, state.history)
    counts = _counts(chosen, inputs)
    kept = jnp.arange(chosen.shape[1]) < counts[:, None]
    new = state.replace(
        decode=backbone.replay(traces, counts, inputs.spans, decode),
        history=_noted(chosen, kept, inputs, state.history),
        last_tokens=_last(chosen, counts, inputs, state.last_tokens),
    )
    return VerifyOutput(jnp.where(kept, chosen, NOTHING), counts), new


@partial(
    jax.jit,
    static_argnames=("config",),
    donate_argnames=("state",),
    compiler_options=COMPILER_OPTIONS,
)
def jitted_verify_step(
    params: K3Params, config: K3Config, inputs: VerifyInputs, state: StepState
) -> tuple[VerifyOutput, StepState]:
    """`verify_step`, compiled per bucket; `state` is donated and updated in place."""
    return verify_step(params, config, inputs, state)


def _choose(
    logits: Float32[Array, "row token vocab"], inputs: VerifyInputs, history: TokenHistory | None
) -> Int32[Array, "row token"]:
    """The token after each token, were all drafts right; every place is a row to `sample`."""
    rows, tokens, vocab = logits.shape

    def places(x: HostOrDevice) -> Array:
        return jnp.repeat(jnp.asarray(x), tokens, axis=0)

    sampling: SamplingInputs = jax.tree.map(places, inputs.sampling)
    later = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), rows)
    sampling = sampling.replace(generated=sampling.generated + later)
    flat = logits.reshape(rows * tokens, vocab)
    if history is not None:

        def penalized() -> Array:
            prompt, output = (
                jnp.take(x, inputs.lanes, axis=0, mode="clip")
                for x in (history.prompt, history.output)
            )
            output = (output[:, None] + _drafted(inputs.tokens, vocab)).reshape(flat.shape)
            return penalize(flat, sampling, places(prompt), output)

        flat = if_any(sampling.penalized(), penalized, flat)
    masks = None if inputs.masks is None else inputs.masks.reshape(rows * tokens, -1)
    return sample(masked(flat, masks), sampling).reshape(rows, tokens)


def _drafted(
    tokens: Int32[HostOrDevice, "row token"], vocab: int
) -> Int32[Array, "row token vocab"]:
    """How often the drafts up to each token hold each id."""
    tokens = jnp.asarray(tokens)
    width = tokens.shape[1]
    ids, later = jnp.arange(vocab), jnp.arange(width)[:, None]
    counts = jnp.zeros((tokens.shape[0], width, vocab), jnp.int32)
    for place in range(1, width):
        counts += (tokens[:, place, None, None] == ids) & (place <= later)
    return counts


def _counts(chosen: Int32[Array, "row token"], inputs: VerifyInputs) -> Int32[Array, "row"]:
    """How many of the chosen tokens come out."""
    lengths, places = jnp.asarray(inputs.spans.lengths), jnp.arange(1, chosen.shape[1])
    drafts = jnp.asarray(inputs.tokens)[:, 1:]
    goes_on = (chosen[:, :-1] == drafts) & (places < lengths[:, None])
    if inputs.stop_ids is not None:
        stops = (chosen[:, :-1, None] == jnp.asarray(inputs.stop_ids)[:, None]).any(-1)
        goes_on &= ~stops
    right = jnp.cumprod(goes_on.astype(jnp.int32), axis=1).sum(1)
    return jnp.where(lengths > 0, right + 1, 0).astype(jnp.int32)


def _noted(
    chosen: Int32[Array, "row token"],
    kept: Bool[Array, "row token"],
    inputs: VerifyInputs,
    history: TokenHistory | None,
) -> TokenHistory | None:
    """The history with the tokens that come out of penalised rows."""
    if history is None:
        return None
    counted = kept & inputs.sampling.penalized()[:, None]
    lanes = jnp.where(counted, jnp.asarray(inputs.lanes)[:, None], _NO_LANE)
    return history.replace(output=history.output.at[lanes, chosen].add(1, mode="drop"))


def _last(
    chosen: Int32[Array, "row token"],
    counts: Int32[Array, "row"],
    inputs: VerifyInputs,
    last_tokens: Int32[Array, "lane"] | None,
) -> Int32[Array, "lane"] | None:
    if last_tokens is None:
        return None
    newest = jnp.take_along_axis(chosen, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    lanes = jnp.where(counts > 0, inputs.lanes, _NO_LANE)
    return last_tokens.at[lanes].set(newest, mode="drop")


_NO_LANE = jnp.iinfo(jnp.int32).max


def _check(inputs: VerifyInputs, vocab: int) -> None:
    shape = inputs.tokens.shape
    if len(shape) != 2 or not 1 <= shape[1] <= MAX_TOKENS:
        raise ValueError(f"tokens have shape {shape}; they must be [row, 1 to {MAX_TOKENS}]")
    if inputs.masks is not None and inputs.masks.shape != (*shape, -(-vocab // 32)):
        raise ValueError(
            f"masks have shape {inputs.masks.shape}; a vocabulary of {vocab} and tokens {shape} "
            f"want {(*shape, -(-vocab // 32))}"
        )
    stops = inputs.stop_ids
    if stops is not None and (stops.ndim != 2 or stops.shape[0] != shape[0]):
        raise ValueError(f"stop_ids have shape {stops.shape}; tokens have {shape[0]} rows")
