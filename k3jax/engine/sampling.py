"""Choosing the next token of each row on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from k3jax.engine.request import SamplingParams
from k3jax.state.spans import HostOrDevice
from pallas_kernels.implementation import device_platform

_COLDEST = 1e-20
"""Colder temperatures count as this one, which already leaves only exact ties."""


class SamplingInputs(struct.PyTreeNode):
    """`SamplingParams` of every row as arrays."""

    temperature: Float32[HostOrDevice, "row"]
    top_k: Int32[HostOrDevice, "row"]
    top_p: Float32[HostOrDevice, "row"]
    min_p: Float32[HostOrDevice, "row"]
    repetition_penalty: Float32[HostOrDevice, "row"]
    presence_penalty: Float32[HostOrDevice, "row"]
    frequency_penalty: Float32[HostOrDevice, "row"]
    seed: UInt32[HostOrDevice, "row 2"]
    """High and low half of the request's seed."""
    generated: Int32[HostOrDevice, "row"]
    """Tokens the row has generated before this one: its place in the row's random stream."""

    def penalized(self) -> Bool[Array, "row"]:
        """Rows whose logits depend on the tokens so far."""
        repeated = jnp.asarray(self.repetition_penalty) != 1.0
        return repeated | (self.presence_penalty != 0.0) | (self.frequency_penalty != 0.0)

    @classmethod
    def pack(cls, params: Sequence[SamplingParams], generated: Sequence[int]) -> SamplingInputs:
        """Arrays for one row per entry."""

        def column(name: str, dtype: type) -> np.ndarray:
            return np.array([getattr(p, name) for p in params], dtype)

        seeds = [(p.seed >> 32, p.seed & 0xFFFFFFFF) for p in params]
        return cls(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            frequency_penalty=column("frequency_penalty", np.float32),
            seed=np.array(seeds, np.uint32).reshape(-1, 2),
            generated=np.array(generated, np.int32),
        )


class TokenHistory(struct.PyTreeNode):
    """Which tokens each lane's sequence contains; only penalties need it."""

    prompt: Bool[Array, "lane vocab"]
    output: Int32[Array, "lane vocab"]

    @classmethod
    def init(cls, num_lanes: int, vocab_size: int) -> TokenHistory:
        """Empty histories."""
        shape = (num_lanes, vocab_size)
        return cls(prompt=jnp.zeros(shape, jnp.bool_), output=jnp.zeros(shape, jnp.int32))

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], vocab_size: int) -> TokenHistory:
        """Histories of prompts to which nothing has been added yet, one lane each."""
        prompt = np.zeros((len(prompts), vocab_size), np.bool_)
        for lane, tokens in enumerate(prompts):
            prompt[lane, list(tokens)] = True
        return cls(jnp.asarray(prompt), jnp.zeros(prompt.shape, jnp.int32))


def penalize(
    logits: Float32[Array, "row vocab"],
    inputs: SamplingInputs,
    prompt: Bool[Array, "row vocab"],
    output: Int32[Array, "row vocab"],
) -> Float32[Array, "row vocab"]:
    """Logits after repetition, presence and frequency penalties (see `SamplingParams`)."""
    repeated = inputs.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / repeated, logits * repeated)
    logits = jnp.where(prompt | (output > 0), scaled, logits)
    logits = logits - inputs.presence_penalty[:, None] * (output > 0)
    return logits - inputs.frequency_penalty[:, None] * output


def sample(logits: Float32[Array, "row vocab"], inputs: SamplingInputs) -> Int32[Array, "row"]:
    """One token per row: the likeliest at temperature 0, else a draw from the filtered softmax.

    A row's draw depends on its own logits, seed and count of generated tokens, on nothing else.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        # The likeliest at 0 and a smallest divisor: no temperature makes it overflow to NaN.
        warm = jnp.maximum(inputs.temperature, _COLDEST)[:, None]
        scaled = (logits - logits.max(-1, keepdims=True)) / warm
        filtering = (inputs.min_p > 0) | (inputs.top_k > 0) | (inputs.top_p < 1)
        # A branch that returned the logits as they are would copy them.
        everything = jnp.full(scaled.shape[0], -jnp.inf)
        cutoff = jax.lax.cond(filtering.any(), lambda: _cutoff(scaled, inputs), lambda: everything)
        scaled = jnp.where(scaled < cutoff[:, None], -jnp.inf, scaled)
        seed, generated = jnp.asarray(inputs.seed), jnp.asarray(inputs.generated)
        noise = jax.vmap(_noise)(scaled, seed, generated)
        drawn = jnp.argmax(scaled + noise, -1)
        return jnp.where(inputs.temperature > 0, drawn.astype(jnp.int32), greedy)

    return jax.lax.cond((inputs.temperature > 0).any(), draw, lambda: greedy)


def masked(
    logits: Float32[Array, "row vocab"], masks: UInt32[HostOrDevice, "row word"] | None
) -> Float32[Array, "row vocab"]:
    """Logits of the tokens whose bit (i % 32 of word i // 32) is set; None: of all."""
    if masks is None:
        return logits
    words = jnp.asarray(masks)

    def only_allowed() -> Array:
        bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] == 1
        return jnp.where(allowed, logits, -jnp.inf)

    return if_any(words != jnp.uint32(0xFFFFFFFF), only_allowed, logits)


def if_any(wanted: Array, changed: Callable[[], Array], logits: Array) -> Array:
    """`changed()`, which leaves the logits of rows that do not want it as they are.

    On a CPU skipping it saves time. Elsewhere a branch would copy the logits to hand them on, while
    the change is computed where they are read.
    """
    if device_platform() != "cpu":
        return changed()
    return jax.lax.cond(wanted.any(), changed, lambda: logits)


def top_logprobs(
    logits: Float32[Array, "row vocab"], chosen: Int32[Array, "row"], count: int
) -> tuple[Float32[Array, "row"], Int32[Array, "row top"], Float32[Array, "row top"]]:
    """Log-probability of the chosen tokens, and the `count` likeliest ids with theirs."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, chosen[:, None], axis=-1)[:, 0]
    values, ids = jax.lax.top_k(logprobs, count)
    return own, ids.astype(jnp.int32), values


def _noise(
    logits: Float[Array, "vocab"], seed: UInt32[Array, "2"], generated: Int32[Array, ""]
) -> Float[Array, "vocab"]:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, generated), logits.shape, jnp.float32)


def _cutoff(logits: Float32[Array, "row vocab"], inputs: SamplingInputs) -> Float32[Array, "row"]:
    """The least logit of each row that min-p, top-k and top-p leave in.

    The likeliest token survives every filter, and tokens that tie at a filter's edge all do.
    """
    vocab = logits.shape[-1]
    # Comparing logits avoids a softmax: p >= min_p * p_max bounds the difference of logits.
    floor = logits.max(-1) + jnp.log(jnp.maximum(inputs.min_p, 1e-38))
    floor = jnp.where(inputs.min_p > 0, floor, -jnp.inf)
    ranked = -jnp.sort(-jnp.where(logits < floor[:, None], -jnp.inf, logits), axis=-1)
    limit = jnp.where(inputs.top_k > 0, inputs.top_k, vocab)[:, None]
    ranked = jnp.where(jnp.arange(vocab) < limit, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    within = (before < inputs.top_p[:, None]) | (inputs.top_p >= 1)[:, None]
    within = within & (ranked > -jnp.inf)
    kept = jnp.maximum(within.sum(-1), 1)
    return jnp.take_along_axis(ranked, kept[:, None] - 1, axis=-1)[:, 0]
