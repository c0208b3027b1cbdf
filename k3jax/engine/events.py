"""What the engine tells of a sequence, token by token."""

from __future__ import annotations

from typing import Any

from k3jax.engine.request import FinishReason, RequestTiming, TokenEvent, TokenLogprobs
from k3jax.engine.sequence import Emission, Sequence


def token_event(
    sequence: Sequence, token: int | None, logprobs: TokenLogprobs | None = None
) -> TokenEvent:
    """The event of one token, after which more will come."""
    return TokenEvent(
        request_id=sequence.request.id,
        choice=sequence.choice,
        token=token,
        logprobs=logprobs,
        finish_reason=None,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.cached_tokens or 0,
        timing=None,
    )


def last_event(
    sequence: Sequence,
    reason: FinishReason,
    now: float,
    token: int | None = None,
    logprobs: TokenLogprobs | None = None,
    error: str = "",
) -> TokenEvent:
    """The event that ends a choice; with times if it has produced anything."""
    timing = None
    if sequence.admitted is not None and sequence.first_token is not None:
        timing = RequestTiming(
            submitted=sequence.submitted,
            admitted=sequence.admitted,
            first_token=sequence.first_token,
            finished=now,
        )
    event = token_event(sequence, token, logprobs)
    return event._replace(finish_reason=reason, timing=timing, error=error)


def wanted_logprobs(emission: Emission, found: Any) -> TokenLogprobs | None:
    """What the request asked for out of a step's (chosen, ids, values), by row of the step."""
    wanted = emission.sequence.sampling.logprobs
    if wanted is None:
        return None
    chosen, ids, values = (array[emission.row] for array in found)
    top = zip(ids[:wanted].tolist(), values[:wanted].tolist(), strict=True)
    return TokenLogprobs(float(chosen), tuple(top))
