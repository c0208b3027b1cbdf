"""Reads the tools that a prompt declares, for the checks that the gateway leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence

from k3jax.chat.encoder import XTML_MARKERS
from k3jax.chat.tokenizer import Tokenizer
from k3jax.chat.validate import check_tools
from serving.wire import FieldError

_OPENING = '<|open|>message role="system" type="tool-declare"<|sep|>'


def check_declared_tools(tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
    """Raise FieldError naming a tool whose name is taken, or whose parameters are no schema.

    What is looked at is the message that a chat prompt with tools begins with; a prompt that is no
    chat, or whose declarations cannot be read, is left alone.
    """
    if not all(marker in tokenizer.special_ids for marker in XTML_MARKERS):
        return
    opening = tokenizer.encode_control(_OPENING)
    if list(prompt[: len(opening)]) != list(opening):
        return
    start = len(opening)
    try:
        end = prompt.index(tokenizer.special_ids["<|close|>"], start)
        fenced = tokenizer.decode(prompt[start:end]).partition("```json\n")[2]
        tools = json.loads(fenced.rpartition("\n```")[0])
    except (ValueError, RecursionError):
        return
    try:
        check_tools(tools, "tools")
    except ValueError as error:
        raise FieldError("prompt", str(error)) from None
