"""Chat format of Kimi-Linear checkpoints (K2's markers): plain conversations only.

A checkpoint's Jinja template is not executed. No default system message is added.
"""

from collections.abc import Sequence
from typing import Any

from k3jax.chat.options import ChatOptions
from k3jax.chat.segments import Segment, control, plain

_ROLE_MARKERS = {
    "system": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
}
MARKERS = (*_ROLE_MARKERS.values(), "<|im_middle|>", "<|im_end|>")


def build_segments(messages: Sequence[dict[str, Any]], options: ChatOptions) -> list[Segment]:
    """Write validated system, user and assistant messages as segments.

    The format has no thinking channel: `thinking` and `effort` do not apply and past reasoning is
    left out.

    Raises:
        ValueError: tools, tool calls or results, response formats or images, none of which this
            encoder supports.
    """
    for field in ("tools", "tool_choice", "response_format"):
        value = getattr(options, field)
        if value and value not in ("auto", "none", "text", {"type": "text"}):
            raise ValueError(f"{field} is not supported for checkpoints with Kimi-Linear's markers")
    segments: list[Segment] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLE_MARKERS or message.get("tool_calls") or message.get("tools"):
            raise ValueError(
                f"messages[{index}]: tools are not supported for checkpoints with Kimi-Linear's "
                "markers; use plain system, user and assistant messages"
            )
        segments += _opening(role, message.get("name") or role)
        segments += plain(_text(message.get("content"), index)) + control("<|im_end|>")
    if options.add_generation_prompt:
        segments += _opening("assistant", "assistant")
    return segments


def _opening(role: str, name: str) -> list[Segment]:
    return [*control(_ROLE_MARKERS[role]), *plain(name), *control("<|im_middle|>")]


def _text(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] != "text" for part in content):
        raise ValueError(f"messages[{index}]: Kimi-Linear checkpoints have no vision")
    return "".join(part["text"] for part in content)
