import pytest

from k3jax.chat.options import ChatOptions
from k3jax.chat.validate import validate_messages, validate_options

USER = {"role": "user", "content": "a"}
WEATHER = {"type": "function", "function": {"name": "weather"}}


def call(**function):
    return {"id": "a", "type": "function", "function": {"name": "f", **function}}


def assistant(*calls, **fields):
    return {"role": "assistant", "tool_calls": list(calls), **fields}


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (7, "must be an object, not int"),
        ({"content": "a"}, r"role must be one of system, user, assistant, tool, not None"),
        ({"role": "critic", "content": "a"}, "role must be .*'critic'"),
        ({"role": "user"}, "content is missing"),
        ({"role": "system", "content": None}, "content is missing"),
        ({"role": "assistant"}, "content is missing"),
        ({"role": "user", "content": 3}, "content must be a string or a list of parts"),
        ({"role": "user", "content": ["a"]}, r"content\[0\].type must be text"),
        ({"role": "user", "content": [{"type": "video"}]}, r"content\[0\].type .*'video'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].text must be a string"),
        ({"role": "system", "content": [{"type": "image"}]}, "system message cannot hold"),
        ({"role": "user", "content": "a", "name": 3}, "name must be a string, not int"),
        (assistant(content="a", reasoning_content=3), "reasoning_content must be a string"),
        ({"role": "assistant", "content": "a", "tool_calls": "f"}, "tool_calls must be a list"),
        ({"role": "assistant", "content": "a", "tool_calls": {}}, "tool_calls must be a list"),
        (assistant("f"), r"tool_calls\[0\] must be an object"),
        (assistant({"type": "custom"}), r"tool_calls\[0\].type must be 'function', not 'custom'"),
        (assistant({"function": "f"}), r"tool_calls\[0\].function must be an object"),
        (assistant(call(), call(name="")), r"tool_calls\[1\].function.name must be a non-empty"),
        (assistant(call(arguments="[1]")), r"tool_calls\[0\]: .* must be a JSON object"),
        (assistant(call(arguments=3)), r"tool_calls\[0\]: .* object or a JSON string, not 3"),
        (assistant(call(arguments={"a": {1}})), "function.arguments cannot be written as JSON"),
        ({"role": "tool", "content": "a"}, "answers no tool call and has no name"),
        ({"role": "tool", "content": "a", "tool_call_id": "z"}, "tool_call_id 'z' is no call"),
        ({"role": "tool", "name": "f"}, "content is missing"),
        ({"role": "system", "tools": [{"type": "web"}]}, r"tools\[0\].type .*'web'"),
    ],
)
def test_a_bad_message_is_named_by_its_index(message, complaint):
    with pytest.raises(ValueError, match=rf"^messages\[1\].*{complaint}"):
        validate_messages([USER, message])


@pytest.mark.parametrize("messages", [[], (), "hello", None, {"role": "user"}])
def test_no_conversation_is_an_error(messages):
    with pytest.raises(ValueError, match="messages"):
        validate_messages(messages)


@pytest.mark.parametrize(
    "messages",
    [
        [assistant(call(arguments='{"a": '), content=None)],
        [assistant({"name": "flat", "arguments": {}})],
        [{"role": "assistant", "reasoning": "hm"}],
        [assistant(call()), {"role": "tool", "content": "", "tool_call_id": "a"}],
        [assistant(call()), {"role": "tool", "content": []}],
        [{"role": "tool", "content": "a", "tool_call_id": "z", "name": "f"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "", "name": None}],
    ],
)
def test_unusual_but_meaningful_messages_pass(messages):
    assert validate_messages(messages) == messages


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"effort": "medium"}, "effort must be one of low, high, max, not 'medium'"),
        ({"tools": "f"}, "tools must be a list, not str"),
        ({"tools": [7]}, r"tools\[0\] must be an object"),
        ({"tools": [{"function": {"name": "f"}}]}, r"tools\[0\].type must be 'function', not None"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function must be an object"),
        ({"tools": [WEATHER, WEATHER]}, r"tools\[1\].function.name 'weather' is declared twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "parameters must be a JSON schema object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "x": float("nan")}}]},
            r"tools\[0\] cannot be written as JSON",
        ),
        ({"tool_choice": "required"}, "tool_choice 'required' needs at least one tool"),
        ({"tool_choice": "any"}, "tool_choice must be auto, none, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [WEATHER]},
            "tool_choice must name a declared function",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type must be .*'xml'"),
        ({"response_format": {"json": 1}}, "response_format.type must be .*None"),
        ({"response_format": "json_schema"}, "json_schema.name is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "json_schema.name is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "json_schema.schema is missing",
        ),
    ],
)
def test_a_bad_option_is_named(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        validate_options(ChatOptions(**options), [USER])


def test_tools_declared_in_a_message_can_be_required():
    messages = validate_messages([{"role": "system", "tools": [WEATHER]}, USER])
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        validate_options(ChatOptions(tool_choice=choice), messages)
    validate_options(ChatOptions(thinking=False, effort=None, response_format="text"), messages)
