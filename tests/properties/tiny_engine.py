"""One small engine for all laws: few buckets, few pages, four slots; freed places become NaN.

Compiling dominates, so every engine here has the same pools and the same few buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from k3jax.engine.step import StepState
from k3jax.model.params import K3Params
from tests.helpers import tiny_config
from tests.random_weights import random_weights

CONFIG = tiny_config()
PAGE = 8
CONTEXT = 64
ROWS = 3
WIDE = ((1, 16), (2, 16))
NARROW = ((1, 5),)
ATOL = 2e-4
"""Of log-probabilities: batches and spans differ in the order of float32 sums."""


@cache
def weights() -> K3Params:
    """Random, with slow gates."""
    return random_weights(CONFIG, seed=11)


def make_engine(**changes) -> Engine:
    """An engine with fresh pools."""
    settings = {
        "max_rows": ROWS,
        "max_context": CONTEXT,
        "page_size": PAGE,
        "num_pages": 12,
        "num_slots": 4,
        "contexts": (CONTEXT,),
        "prefill_shapes": WIDE,
        "decode_rows": (ROWS,),
    }
    return Engine(weights(), CONFIG, EngineConfig(**{**settings, **changes}))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens, none of which ends a sequence."""
    return tuple(np.random.default_rng([seed, length]).integers(0, 89, length).tolist())


def free(**changes) -> SamplingParams:
    """Greedy, with log-probabilities, and not stopped by an id that comes up by chance."""
    return SamplingParams(
        **{"max_tokens": 5, "ignore_eos": True, "logprobs": 20, **changes},
    )


@dataclass
class Answer:
    """What came of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    cached: int = 0

    def add(self, event: TokenEvent) -> None:
        """Take in one event, of which there are none after the end."""
        assert self.reason is None, "an event after the last"
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        self.reason, self.cached = event.finish_reason, event.cached_tokens


Answers = dict[tuple[str, int], Answer]


def run(engine: Engine, requests: Sequence[Request] = ()) -> Answers:
    """Submit and step to the end, poisoning and checking after every step."""
    for request in requests:
        engine.submit(request)
    answers: Answers = {}
    while engine.has_work:
        step(engine, answers)
    return answers


def step(engine: Engine, answers: Answers) -> None:
    """One checked step; what nobody holds is poisoned."""
    for event in engine.step():
        answers.setdefault((event.request_id, event.choice), Answer()).add(event)
    engine.scheduler.check()
    poison_free(engine)


def ask(engine: Engine, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Answer:
    """One request, run to its end."""
    return run(engine, [Request("solo", tuple(prompt), sampling or free())])["solo", 0]


def same(found: Answer, expected: Answer) -> None:
    """Equal tokens and ends; equal log-probabilities but for rounding."""
    assert (found.tokens, found.reason) == (expected.tokens, expected.reason)
    assert len(found.logprobs) == len(expected.logprobs)
    for a, b in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(a.chosen, b.chosen, atol=ATOL)
        np.testing.assert_allclose(
            [value for _, value in a.top], [value for _, value in b.top], atol=ATOL
        )


def cached_state(engine: Engine, tokens: Sequence[int]) -> list[np.ndarray]:
    """State matrices, windows and latents of a cached prefix, layer by layer."""
    entry = next(e for e in engine.store.tree.entries() if e.tokens == tuple(tokens))
    decode = engine.state.decode
    slots = [np.asarray(pool)[entry.slot] for pool in jax.tree.leaves(decode.recurrent)]
    latents = [np.asarray(pool)[list(entry.pages)] for pool in decode.latent.pages]
    flat = [rows.reshape(-1, rows.shape[-1])[: len(tokens)] for rows in latents]
    return slots + flat


def poison_free(engine: Engine) -> None:
    """NaN in every slot and page that nobody holds, nonsense in every lane without a sequence."""
    settings = engine.settings
    slots = np.zeros(settings.num_slots, np.bool_)
    slots[list(engine.store.slots.free_ids())] = True
    pages = np.zeros(settings.num_pages, np.bool_)
    pages[list(engine.store.pages.free_ids())] = True
    lanes = np.ones(settings.max_rows, np.bool_)
    lanes[[sequence.lane for sequence in engine.scheduler.running]] = False
    engine.state = _poison(engine.state, slots, pages, lanes)


@jax.jit
def _poison(state: StepState, slots: jax.Array, pages: jax.Array, lanes: jax.Array) -> StepState:
    def ruin(pool: jax.Array, which: jax.Array, value: float) -> jax.Array:
        mask = which.reshape(-1, *[1] * (pool.ndim - 1))
        return jnp.where(mask, jnp.asarray(value, pool.dtype), pool)

    decode, history = state.decode, state.history
    assert history is not None and state.last_tokens is not None
    recurrent = jax.tree.map(lambda pool: ruin(pool, slots, jnp.nan), decode.recurrent)
    latent = jax.tree.map(lambda pool: ruin(pool, pages, jnp.nan), decode.latent)
    return StepState(
        decode=decode.replace(recurrent=recurrent, latent=latent),
        history=history.replace(
            prompt=ruin(history.prompt, lanes, True), output=ruin(history.output, lanes, 77)
        ),
        last_tokens=ruin(state.last_tokens, lanes, 88),
    )
