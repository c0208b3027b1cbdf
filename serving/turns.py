"""Where in K3's chat format a prompt leaves off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from k3jax.chat.encoder import XTML_MARKERS
from k3jax.chat.tokenizer import Tokenizer

Channel = Literal["think", "response"]


def open_channel(tokenizer: Tokenizer, prompt: Sequence[int]) -> Channel | None:
    """The channel that a prompt's last ids open, None for a prompt that is no chat."""
    if not all(marker in tokenizer.special_ids for marker in XTML_MARKERS):
        return None
    for channel in ("think", "response"):
        opening = tokenizer.encode_control(f"<|open|>{channel}<|sep|>")
        if tuple(prompt[-len(opening) :]) == tuple(opening):
            return channel
    return None
