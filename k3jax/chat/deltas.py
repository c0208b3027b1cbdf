"""What the output parser emits, and the whole reply that the emitted deltas add up to."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

DeltaKind = Literal[
    "reasoning",
    "content",
    "call_start",
    "call_arguments",
    "call_end",
    "retract_reasoning",
    "finish",
]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of a streamed reply.

    Attributes:
        kind: `reasoning` and `content` carry `text`. `call_start` carries the whole `name` and the
            `call_id`, `call_arguments` a piece of the arguments' JSON as `text`, `call_end` says
            that the call is complete; all three carry `index`. `retract_reasoning` says that all
            reasoning so far was the answer; the same text follows as content. `finish` is last
            and carries `finish_reason` and `reasoning_tokens`.
        index: 0-based number of the call in this reply, -1 outside calls.
    """

    kind: DeltaKind
    text: str = ""
    index: int = -1
    name: str = ""
    call_id: str = ""
    finish_reason: FinishReason | None = None
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it; `arguments` is JSON text, of a partial call its beginning."""

    index: int
    call_id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object.

        Raises:
            ValueError: they are no JSON object; the model wrote a broken `json` block.
        """
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments of call {self.index} to {self.name!r}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(
                f"arguments of call {self.index} to {self.name!r} are no object: "
                f"{self.arguments!r:.60}"
            )
        return value


@dataclass(frozen=True)
class ParsedOutput:
    """A whole reply.

    Attributes:
        reasoning, content: text of the two channels.
        tool_calls: complete calls only.
        partial_call: a call that the reply ended in; not to be executed.
        finish_reason: None while the reply has not finished.
        reasoning_tokens: text tokens of the thinking channel, markers not counted.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    partial_call: ToolCall | None = None
    finish_reason: FinishReason | None = None
    reasoning_tokens: int = 0

    def message(self) -> dict[str, Any]:
        """The reply as an assistant message for the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def collect(deltas: Iterable[Delta]) -> ParsedOutput:
    """Add up a reply's deltas, in order; any prefix of them gives the reply so far."""
    text = {"reasoning": [], "content": [], "arguments": []}
    calls: list[ToolCall] = []
    partial: ToolCall | None = None
    finish = Delta("finish")
    for delta in deltas:
        match delta.kind:
            case "reasoning" | "content":
                text[delta.kind].append(delta.text)
            case "retract_reasoning":
                text["reasoning"].clear()
            case "call_start":
                partial = ToolCall(delta.index, delta.call_id, delta.name, "")
                text["arguments"].clear()
            case "call_arguments":
                text["arguments"].append(delta.text)
            case "call_end" if partial is not None:
                calls.append(replace(partial, arguments="".join(text["arguments"])))
                partial = None
            case "finish":
                finish = delta
    if partial is not None:
        partial = replace(partial, arguments="".join(text["arguments"]))
    return ParsedOutput(
        reasoning="".join(text["reasoning"]),
        content="".join(text["content"]),
        tool_calls=tuple(calls),
        partial_call=partial,
        finish_reason=finish.finish_reason,
        reasoning_tokens=finish.reasoning_tokens,
    )
