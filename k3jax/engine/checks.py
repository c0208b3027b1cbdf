"""What is asked of a request before it may take part in anybody's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from numbers import Integral

import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.engine.request import Request, SamplingParams, check_prompt, check_stop_ids


def checked_request(
    request: Request, config: K3Config, *, max_context: int, max_choices: int
) -> Request:
    """The request with its prompt as a tuple of plain integers.

    Raises ValueError naming the request and the field that is wrong, and how.
    """
    if not isinstance(request.id, str):
        raise ValueError(f"request id {request.id!r}, expected a string")
    name = f"request {request.id!r}"
    if not isinstance(request.sampling, SamplingParams):
        raise ValueError(f"{name}: sampling = {request.sampling!r}, expected SamplingParams")
    for field in ("n", "priority"):
        value = getattr(request, field)
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name}: {field} = {value!r}, expected a whole number")
    if not 1 <= request.n <= max_choices:
        raise ValueError(f"{name}: n = {request.n}, expected 1..{max_choices}")
    if isinstance(request.prompt, str | bytes) or not isinstance(request.prompt, Iterable):
        raise ValueError(f"{name}: the prompt is {type(request.prompt).__name__}, not token ids")
    prompt = tuple(request.prompt)
    check_prompt(prompt, vocab_size=config.vocab_size, max_context=max_context, name=name)
    check_stop_ids(request.sampling, vocab_size=config.vocab_size, name=name)
    request = dataclasses.replace(request, prompt=tuple(int(token) for token in prompt))
    _check_images(request, config, name)
    return request


def _check_images(request: Request, config: K3Config, name: str) -> None:
    if request.images is None:
        media = 0 if config.vision is None else request.prompt.count(config.vision.media_token_id)
        if media:
            raise ValueError(f"{name} has {media} media tokens, but its images have 0 features")
        return
    if config.vision is None:
        raise ValueError(f"{name} has images, but the model has no vision tower")
    media = request.prompt.count(config.vision.media_token_id)
    features = request.images.features
    shape, dtype = np.shape(features), getattr(features, "dtype", None)
    given = shape[0] if shape else 0
    if media != given:
        raise ValueError(f"{name} has {media} media tokens, but its images have {given} features")
    if shape != (media, config.hidden_size):
        raise ValueError(
            f"{name}: image features of shape {shape}, expected {(media, config.hidden_size)}"
        )
    if dtype is None or not (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    ):
        raise ValueError(f"{name}: image features of dtype {dtype}, expected real numbers")
