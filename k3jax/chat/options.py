"""What a chat request asks for besides its messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

Effort = Literal["low", "high", "max"]
EFFORTS: tuple[Effort, ...] = ("low", "high", "max")


@dataclass(frozen=True)
class ChatOptions:
    """Options of one turn, in OpenAI's shapes. Defaults are those of the released template.

    Attributes:
        thinking: the turn starts in the thinking channel; past turns show theirs.
        effort: announced thinking effort; None announces nothing. Unused without thinking.
        tools: tool declarations, `{"type": "function", "function": {name, description,
            parameters}}` each.
        tool_choice: "auto", "none", "required" or a named function; only "none" and "required"
            show in the prompt.
        response_format: `{"type": "text" | "json_object" | "json_schema", "json_schema": …}`.
        add_generation_prompt: end with the opening of the assistant's turn.
    """

    thinking: bool = True
    effort: Effort | None = "max"
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: str | Mapping[str, Any] | None = None
    add_generation_prompt: bool = True


DEFAULT_OPTIONS = ChatOptions()
"""Thinking at effort max, no tools."""


def thinking_from_openai(
    reasoning_effort: str | None = None, thinking: Mapping[str, Any] | None = None
) -> tuple[bool, Effort | None]:
    """Map a request's reasoning controls to `(thinking, effort)` of `ChatOptions`.

    Args:
        reasoning_effort: OpenAI's field: none, low, high or max; absent means max.
        thinking: Moonshot's object `{type: enabled | disabled, effort, keep}`; its effort wins.
            `keep` may be absent or "all": past reasoning is always kept.

    Raises:
        ValueError: any other value, naming the field.
    """
    effort, field = reasoning_effort, "reasoning_effort"
    if thinking is not None:
        kind = thinking.get("type", "enabled")
        if kind not in ("enabled", "disabled"):
            raise ValueError(f"thinking.type must be enabled or disabled, not {kind!r}")
        if thinking.get("keep") not in (None, "all"):
            raise ValueError(f"thinking.keep must be 'all' or absent, not {thinking['keep']!r}")
        if thinking.get("effort") is not None:
            effort, field = thinking["effort"], "thinking.effort"
    if effort not in (None, "none", *EFFORTS):
        raise ValueError(f"{field} must be one of none, low, high, max, not {effort!r}")
    if effort == "none" or (thinking is not None and thinking.get("type") == "disabled"):
        return False, None
    return True, "max" if effort is None else cast(Effort, effort)


def check_effort(options: ChatOptions) -> None:
    """Raise ValueError for an effort the model was not trained with (medium among them)."""
    if options.thinking and options.effort is not None and options.effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, not {options.effort!r}")
