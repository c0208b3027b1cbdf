"""Tool calls and tool results in the form the chat encoder writes them (encoding_k3.py)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def call_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `{name, arguments}` part of a call, which may also be flat."""
    return call.get("function", call)


def parse_arguments(arguments: Any) -> dict[str, Any] | str:
    """A call's arguments as an object, or as the raw text when they are not JSON.

    Raises:
        ValueError: JSON that is no object, or a value that is neither object, string nor None.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise ValueError(
            f"tool call arguments must be an object or a JSON string, not {arguments!r:.60}"
        )
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict):
        raise ValueError(f"tool call arguments must be a JSON object, not {arguments!r:.60}")
    return parsed


def argument_type(value: Any) -> str:
    """The `type` attribute of an argument element."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def order_tool_results(messages: Sequence[Any]) -> list[Any]:
    """Sort each run of tool messages into the order of the calls they answer.

    A run is sorted, and takes its calls' function names, only if every message in it names (by
    `tool_call_id`, else `id`) a call of the latest assistant message; otherwise it stays as is.
    """
    ordered: list[Any] = []
    calls: dict[str, tuple[int, Any]] = {}
    for run in _runs(messages):
        if not _has_role(run[0], "tool"):
            ordered += run
            if _has_role(run[0], "assistant"):
                calls = calls_by_id(run[0])
            continue
        answers = [(answered_call(message, calls), message) for message in run]
        matched = [(call, message) for call, message in answers if call is not None]
        if len(matched) < len(run):
            ordered += run
            continue
        matched.sort(key=lambda pair: pair[0][0])
        ordered += [
            message if name is None else {**message, "tool": name} for (_, name), message in matched
        ]
    return ordered


def calls_by_id(message: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """Call id to (position, function name) of an assistant message; the first of equal ids."""
    calls: dict[str, tuple[int, Any]] = {}
    for position, call in enumerate(message.get("tool_calls") or []):
        if call.get("id") is not None:
            calls.setdefault(str(call["id"]), (position, call_function(call).get("name")))
    return calls


def answered_call(
    message: Mapping[str, Any], calls: Mapping[str, tuple[int, Any]]
) -> tuple[int, Any] | None:
    """The entry of `calls_by_id` whose id a tool message names, or None."""
    call_id = message.get("tool_call_id", message.get("id"))
    return None if call_id is None else calls.get(str(call_id))


def result_name(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], position: int
) -> str | None:
    """The function a tool message answers: its own name, else that of the call at `position`."""
    for key in ("tool", "name"):
        if message.get(key) is not None:
            return str(message[key])
    return call_function(calls[position])["name"] if position < len(calls) else None


def _has_role(message: Any, role: str) -> bool:
    return isinstance(message, Mapping) and message.get("role") == role


def _runs(messages: Sequence[Any]) -> Iterator[list[Any]]:
    """Consecutive tool messages together, every other message alone."""
    run: list[Any] = []
    for message in messages:
        if not _has_role(message, "tool"):
            if run:
                yield run
                run = []
            yield [message]
        else:
            run.append(message)
    if run:
        yield run
