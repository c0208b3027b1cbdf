"""From a checked request to the sequences that will answer it."""

from __future__ import annotations

import dataclasses
import hashlib
import time

import numpy as np

from k3jax.config import K3Config
from k3jax.engine.request import MAX_SEED, Request, SamplingParams
from k3jax.engine.sequence import Sequence


def choices_of(
    request: Request, config: K3Config, *, max_context: int, share_prompt: bool, arrival: int
) -> list[Sequence]:
    """One sequence per choice, numbered from `arrival` on.

    With `share_prompt` the others wait for the first, whose prompt they share. Raises ValueError
    if the request's constraint cannot be forked.
    """
    budget = min(request.sampling.max_tokens, max_context - len(request.prompt))
    stop_ids = frozenset(request.sampling.stop_ids)
    if not request.sampling.ignore_eos:
        stop_ids |= frozenset(config.eos_token_ids)
    keys = cache_keys(request, config)
    now = time.monotonic()
    try:
        constraints = [request.constraint and request.constraint.fork() for _ in range(request.n)]
    except Exception as error:
        raise ValueError(f"request {request.id!r}: its constraint raised {error!r}") from error
    choices: list[Sequence] = []
    for choice, constraint in enumerate(constraints):
        tokens = list(request.prompt)
        choices.append(
            Sequence(
                request,
                choice,
                _sampling_of(request, choice),
                arrival + choice,
                budget,
                stop_ids,
                tokens,
                tokens if keys is None else list(keys),
                constraint,
                leader=choices[0] if choices and share_prompt else None,
                submitted=now,
            )
        )
    return choices


def cache_keys(request: Request, config: K3Config) -> list[int] | None:
    """The prompt with every media token replaced by what it shows, or None without images."""
    if request.images is None or config.vision is None:
        return None
    features = np.ascontiguousarray(request.images.features)
    keys, number = list(request.prompt), 0
    for position, token in enumerate(keys):
        if token == config.vision.media_token_id:
            digest = hashlib.blake2b(features[number].tobytes(), digest_size=7).digest()
            keys[position] = -1 - int.from_bytes(digest, "little")
            number += 1
    return keys


def _sampling_of(request: Request, choice: int) -> SamplingParams:
    """Choice k draws with seed + k, which starts again at 0 after the largest seed."""
    seed = (int(request.sampling.seed) + choice) % (MAX_SEED + 1)
    return dataclasses.replace(request.sampling, seed=seed)
