"""K3's chat format ("XTML"): messages and options to segments, as encoding_k3.py does it.

This is the lenient reference behaviour: unknown roles are skipped and little is checked. Callers
with untrusted input go through `k3jax.chat.encoder.encode_chat`, which validates first.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k3jax.chat.options import ChatOptions, check_effort
from k3jax.chat.segments import Segment, close_tag, control, end_of_message, open_tag, plain
from k3jax.chat.tool_messages import (
    argument_type,
    call_function,
    order_tool_results,
    parse_arguments,
    result_name,
)

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
"""Stands for an image in text. It is no token of the vocabulary."""

IMAGE_PARTS = ("image", "image_url")

_TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS_TEXT = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICE_TEXT = (
    "The system is invoked with `tool_choice={choice}`.\nYou MUST {must} in the next message."
)
_FORMAT_TEXT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)


def build_segments(
    messages: Sequence[Any],
    options: ChatOptions,
    image_prompts: Sequence[str] | None = None,
    *,
    text_placeholders: bool = True,
) -> list[Segment]:
    """Write a conversation as segments.

    Args:
        messages: OpenAI-style messages; other roles and non-mappings are skipped.
        options: tools, effort, tool choice, response format, thinking, generation prompt.
        image_prompts: one prompt text per image in order (`ProcessedImage.prompt`); None leaves
            `IMAGE_PLACEHOLDER` in their place.
        text_placeholders: with image prompts, a literal placeholder in any text also takes one,
            as in the release. False for untrusted text: there it stays plain text.

    Raises:
        ValueError: an effort outside low, high, max; arguments that are no JSON object; a tool
            result without a resolvable name; image prompts left over or too few.
    """
    return _Writer(image_prompts, options.thinking, text_placeholders).conversation(
        messages, options
    )


class _Writer:
    """Appends segments; owns the queue of image prompts."""

    def __init__(
        self, image_prompts: Sequence[str] | None, thinking: bool, text_placeholders: bool
    ) -> None:
        self._prompts = image_prompts
        self._used = 0
        self._thinking = thinking
        self._text_placeholders = text_placeholders and image_prompts is not None
        self._segments: list[Segment] = []

    def conversation(self, messages: Sequence[Any], options: ChatOptions) -> list[Segment]:
        check_effort(options)
        if options.tools:
            self._system("tool-declare", _TOOLS_TEXT + _fenced(options.tools))
        if options.thinking and options.effort:
            self._system("thinking-effort", _EFFORT_TEXT.format(effort=options.effort))
        self._messages(order_tool_results(messages))
        self._constraints(options)
        if options.add_generation_prompt:
            self._add(open_tag("message", [("role", "assistant")]))
            self._add(open_tag("think" if options.thinking else "response"))
        if self._prompts is not None and self._used != len(self._prompts):
            raise ValueError(
                f"{len(self._prompts)} image prompts for {self._used} image places in the messages"
            )
        return self._segments

    def _messages(self, messages: Sequence[Any]) -> None:
        calls: Sequence[Mapping[str, Any]] = ()
        results = 0
        for message in messages:
            role = message.get("role") if isinstance(message, Mapping) else None
            if role == "system" and message.get("tools"):
                self._system("tool-declare", _MORE_TOOLS_TEXT + _fenced(message["tools"]))
            elif role in ("user", "system"):
                self._message(message, [("role", role), *_name(message)])
            elif role == "assistant":
                calls, results = message.get("tool_calls") or (), 0
                self._assistant(message, calls)
            elif role == "tool":
                name = result_name(message, calls, results)
                if name is None:
                    raise ValueError(f"tool result {results} has no name and answers no call")
                results += 1
                self._message(message, [("role", role), ("tool", name), ("index", results)])

    def _message(
        self, message: Mapping[str, Any], attributes: Sequence[tuple[str, object]]
    ) -> None:
        self._add(open_tag("message", attributes))
        self._content(message.get("content"))
        self._add(close_tag("message"), end_of_message())

    def _assistant(self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> None:
        self._add(open_tag("message", [("role", "assistant"), *_name(message)]))
        if self._thinking:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            self._add(open_tag("think"))
            self._text(reasoning if str(reasoning).strip() else "")
            self._add(close_tag("think"))
        self._add(open_tag("response"))
        self._content(message.get("content"))
        self._add(close_tag("response"))
        if calls:
            self._add(open_tag("tools"))
            for index, call in enumerate(calls, 1):
                self._call(call_function(call), index)
            self._add(close_tag("tools"))
        self._add(close_tag("message"), end_of_message())

    def _call(self, function: Mapping[str, Any], index: int) -> None:
        self._add(open_tag("call", [("tool", function["name"]), ("index", index)]))
        arguments = parse_arguments(function.get("arguments"))
        if isinstance(arguments, str):
            self._add(open_tag("json", [("type", "object")]))
            self._text(arguments)
            self._add(close_tag("json"))
        else:
            for key, value in arguments.items():
                self._add(open_tag("argument", [("key", key), ("type", argument_type(value))]))
                self._text(
                    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                )
                self._add(close_tag("argument"))
        self._add(close_tag("call"))

    def _constraints(self, options: ChatOptions) -> None:
        choice, wanted = options.tool_choice, options.response_format
        if choice in ("required", "none"):
            must = "call tools" if choice == "required" else "NOT call any tools"
            self._system("tool-choice", _CHOICE_TEXT.format(choice=choice, must=must))
        kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
        if kind not in ("json_object", "json_schema"):
            return
        body = _FORMAT_TEXT.format(kind=kind)
        if kind == "json_schema":
            body += "\nThe JSON data must match the following schema:\n"
            body += _fenced(_schema(wanted))
        self._system("response-format", body)

    def _content(self, content: Any) -> None:
        if content is None or isinstance(content, str):
            self._text(content or "")
            return
        for part in content:
            if part["type"] in IMAGE_PARTS:
                self._image()
            else:
                self._text(part["text"])

    def _text(self, text: object) -> None:
        pieces = str(text).split(IMAGE_PLACEHOLDER) if self._text_placeholders else [str(text)]
        for index, piece in enumerate(pieces):
            if index:
                self._image()
            self._add(plain(piece))

    def _image(self) -> None:
        if self._prompts is None:
            self._add(control(IMAGE_PLACEHOLDER))
            return
        if self._used == len(self._prompts):
            raise ValueError(f"more image places in the messages than the {self._used} images")
        self._add(control(self._prompts[self._used]))
        self._used += 1

    def _system(self, kind: str, body: str) -> None:
        self._add(open_tag("message", [("role", "system"), ("type", kind)]))
        self._add(plain(body), close_tag("message"), end_of_message())

    def _add(self, *groups: Iterable[Segment]) -> None:
        for group in groups:
            self._segments.extend(group)


def _name(message: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [("name", message["name"])] if message.get("name") else []


def _fenced(value: Any) -> str:
    """JSON with keys sorted at every depth and no spaces, in a code fence."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return f"```json\n{text}\n```"


def _schema(response_format: Any) -> Any:
    wanted = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if not isinstance(wanted, Mapping):
        return wanted
    return wanted.get("schema", wanted.get("json_schema", wanted))
