"""Reading whole prefixes out of the engine's state and writing them back, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3jax.engine.step import (
    jitted_read_pages,
    jitted_read_slot,
    jitted_write_pages,
    jitted_write_slot,
)
from k3jax.state import DecodeState
from k3jax.state.transfer import PAGES_AT_ONCE, PrefixArrays


def read_prefix(state: DecodeState, slot: int, pages: Sequence[int]) -> PrefixArrays:
    """Copies of `slot` and `pages` as dispatched steps leave them, padded, on the device."""
    copies = []
    if state.latent.pages:
        for at in range(0, len(pages), PAGES_AT_ONCE):
            copies.append(jitted_read_pages(state.latent, _padded(pages, at)))
    return PrefixArrays(jitted_read_slot(state.recurrent, np.int32(slot)), tuple(copies))


def write_prefix(
    state: DecodeState, slot: int, pages: Sequence[int], arrays: PrefixArrays, skip: int = 0
) -> DecodeState:
    """`state` (donated) with a prefix in `slot` and `pages`, the first `skip` pages left alone."""
    latent, ids = state.latent, [*[-1] * skip, *pages[skip:]]
    for number, values in enumerate(arrays.pages):
        at = number * PAGES_AT_ONCE
        if at + PAGES_AT_ONCE <= skip:
            continue
        missing = PAGES_AT_ONCE - values.shape[1]
        if missing:
            values = np.pad(np.asarray(values), ((0, 0), (0, missing), (0, 0), (0, 0)))
        latent = jitted_write_pages(latent, _padded(ids, at), values)
    recurrent = jitted_write_slot(state.recurrent, np.int32(slot), arrays.slot)
    return state.replace(latent=latent, recurrent=recurrent)


def _padded(pages: Sequence[int], at: int) -> np.ndarray:
    ids = np.full(PAGES_AT_ONCE, -1, np.int32)
    piece = pages[at : at + PAGES_AT_ONCE]
    ids[: len(piece)] = piece
    return ids
