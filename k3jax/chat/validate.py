"""Checks of a chat request before it is encoded; every error names the field that is wrong."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from k3jax.chat.json_schema import check_schema
from k3jax.chat.options import ChatOptions, check_effort
from k3jax.chat.tool_messages import answered_call, calls_by_id, parse_arguments, result_name
from k3jax.chat.xtml import IMAGE_PARTS

ROLES = ("system", "user", "assistant", "tool")


def validate_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation and return it with `developer` messages renamed to `system`.

    Raises:
        ValueError: no messages, an unknown role or part type, missing content, a malformed tool
            call, or a tool result that answers nothing; begins with `messages[i]`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; at least one message is needed")
    checked: list[dict[str, Any]] = []
    calls: Sequence[Mapping[str, Any]] = ()
    results = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} must be an object, not {type(message).__name__}")
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ROLES:
            raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}")
        _check_text(message.get("name"), f"{where}.name")
        if role == "assistant":
            _check_assistant(message, where)
            calls, results = message.get("tool_calls") or (), 0
        elif role == "tool":
            _check_tool_result(message, calls, results, where)
            results += 1
        elif role == "system" and message.get("tools"):
            check_tools(message["tools"], f"{where}.tools")
        else:
            _check_content(message, where, images=role == "user")
        checked.append({**message, "role": role})
    return checked


def validate_options(options: ChatOptions, messages: Sequence[Mapping[str, Any]]) -> None:
    """Check the options against each other and against tools declared in system messages.

    Raises:
        ValueError: naming effort, tools, tool_choice or response_format.
    """
    check_effort(options)
    names: list[str] = []
    if options.tools is not None:
        names += check_tools(options.tools, "tools")
    for message in messages:
        if message["role"] == "system":
            names += [tool["function"]["name"] for tool in message.get("tools") or ()]
    _check_choice(options.tool_choice, names)
    _check_format(options.response_format)


def check_tools(tools: Any, where: str) -> list[str]:
    """Check a list of tool declarations and return the function names.

    Raises:
        ValueError: an unknown tool type, a missing or repeated name, parameters that are no schema
            or cannot be written as JSON.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise ValueError(f"{where} must be a list, not {type(tools).__name__}")
    names: list[str] = []
    for index, tool in enumerate(tools):
        at = f"{where}[{index}]"
        if not isinstance(tool, Mapping):
            raise ValueError(f"{at} must be an object, not {type(tool).__name__}")
        if tool.get("type") != "function":
            raise ValueError(f"{at}.type must be 'function', not {tool.get('type')!r}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ValueError(f"{at}.function must be an object")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{at}.function.name must be a non-empty string")
        if name in names:
            raise ValueError(f"{at}.function.name {name!r} is declared twice in {where}")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise ValueError(f"{at}.function.parameters must be a JSON schema object")
        _check_json(tool, at)
        if function.get("parameters") is not None:
            check_schema(function["parameters"], f"{at}.function.parameters")
        names.append(name)
    return names


def _check_content(message: Mapping[str, Any], where: str, *, images: bool) -> None:
    content = message.get("content")
    if content is None:
        raise ValueError(f"{where}.content is missing")
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}.content must be a string or a list of parts")
    for index, part in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_PARTS:
            if not images:
                raise ValueError(f"{at}: a {message['role']} message cannot hold an image")
        elif kind != "text":
            raise ValueError(f"{at}.type must be text, image or image_url, not {kind!r}")
        elif not isinstance(part.get("text"), str):
            raise ValueError(f"{at}.text must be a string")


def _check_assistant(message: Mapping[str, Any], where: str) -> None:
    for key in ("reasoning_content", "reasoning"):
        _check_text(message.get(key), f"{where}.{key}")
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence | None) or isinstance(calls, str | bytes):
        raise ValueError(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
    for index, call in enumerate(calls or ()):
        _check_call(call, f"{where}.tool_calls[{index}]")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if message.get("content") is not None or not (calls or thought):
        _check_content(message, where, images=False)


def _check_call(call: Any, where: str) -> None:
    if not isinstance(call, Mapping):
        raise ValueError(f"{where} must be an object, not {type(call).__name__}")
    if call.get("type", "function") != "function":
        raise ValueError(f"{where}.type must be 'function', not {call['type']!r}")
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{where}.function.name must be a non-empty string")
    try:
        arguments = parse_arguments(function.get("arguments"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _check_json(arguments, f"{where}.function.arguments")


def _check_tool_result(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], position: int, where: str
) -> None:
    _check_content(message, where, images=True)
    _check_text(message.get("tool"), f"{where}.tool")
    if answered_call(message, calls_by_id({"tool_calls": calls})) is not None:
        return
    call_id = message.get("tool_call_id", message.get("id"))
    if call_id is not None and result_name(message, (), 0) is None:
        raise ValueError(
            f"{where}.tool_call_id {call_id!r} is no call of the latest assistant message"
        )
    if result_name(message, calls, position) is None:
        raise ValueError(f"{where} answers no tool call and has no name")


def _check_choice(choice: Any, names: Sequence[str]) -> None:
    if choice in (None, "auto", "none"):
        return
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or name not in names:
            raise ValueError(f"tool_choice must name a declared function, not {dict(choice)!r}")
    elif choice != "required":
        raise ValueError(
            f"tool_choice must be auto, none, required or a named function, not {choice!r}"
        )
    elif not names:
        raise ValueError("tool_choice 'required' needs at least one tool")


def _check_format(wanted: Any) -> None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind not in (None, "text", "json_object", "json_schema") or (wanted and kind is None):
        raise ValueError(
            f"response_format.type must be text, json_object or json_schema, not {kind!r}"
        )
    if kind != "json_schema":
        return
    outer = wanted.get("json_schema") if isinstance(wanted, Mapping) else None
    if not isinstance(outer, Mapping) or not isinstance(outer.get("name"), str):
        raise ValueError("response_format.json_schema.name is missing")
    if not isinstance(outer.get("schema"), Mapping):
        raise ValueError("response_format.json_schema.schema is missing")
    _check_json(outer["schema"], "response_format.json_schema.schema")
    check_schema(outer["schema"], "response_format.json_schema.schema")


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str | None):
        raise ValueError(f"{where} must be a string, not {type(value).__name__}")


def _check_json(value: Any, where: str) -> None:
    """JSON can be written: string keys (so that they sort), finite numbers, plain types."""
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from None
