"""The things k3-nano can do, each as a generator of exercises with their right answers."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scripts.nano import words
from scripts.nano.toolbox import TOOLS, Rng, Tool, Value, draw, json_type, pick, some_words

Message = dict[str, Any]

HELD_OUT = 10
"""One exercise in this many, by hash of its content, is kept out of training."""


@dataclass(frozen=True)
class Exercise:
    """A request with its right reply.

    `messages` are in OpenAI form, alternating user (or tool) and assistant; the last one is the
    reply that evaluation judges. Every assistant message carries `reasoning_content`, which
    `Corpus` drops when thinking is off. `tools` and `response_format` are what this exercise needs
    declared.
    """

    task: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    response_format: Message | None = None


@dataclass(frozen=True)
class Draw:
    """Where an exercise may come from.

    `held_out` selects the side of the split. `size` in 0..1 scales the notes of a recall exercise
    (1 = more than 400 tokens). `tools` are the tools declared in the conversation at hand.
    Without `thinking` a sum's working is part of the reply: the model adds no better in its head
    than it could on paper.
    """

    rng: Rng
    held_out: bool = False
    size: float = 1.0
    tools: tuple[Tool, ...] = ()
    thinking: bool = True

    def admits(self, *content: object) -> bool:
        """Whether an exercise with this content lies on the wanted side of the split."""
        return is_held_out(*content) == self.held_out

    def choice(self, *items: Any) -> Any:
        """One of `items`, uniformly."""
        return items[int(self.rng.integers(len(items)))]


def is_held_out(*content: object) -> bool:
    """The split, a pure function of the content."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


def accepts(exercise: Exercise, reply: Mapping[str, Any]) -> bool:
    """Whether `reply` (an OpenAI assistant message) answers the exercise.

    Calls must agree in number, name and arguments; JSON as values; any other text exactly.
    Reasoning is not judged.
    """
    expected = exercise.messages[-1]
    if _calls(expected) != _calls(reply):
        return False
    said, wanted = reply.get("content") or "", expected["content"]
    if exercise.response_format is None:
        return said == wanted
    try:
        value = json.loads(said)
    except ValueError:
        return False
    return _typed(value) == _typed(json.loads(wanted))


def _calls(message: Mapping[str, Any]) -> list[tuple[str, object]]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append((function["name"], _typed(arguments)))
    return calls


def _typed(value: object) -> object:
    """A form in which True, 1 and "1" differ and the order of keys does not count."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str, thought: str) -> Message:
    """An assistant message with its reasoning."""
    return {"role": "assistant", "reasoning_content": thought, "content": content}


def pair_is_held_out(a: int, b: int) -> bool:
    """The split of sums, the same for both orders."""
    return is_held_out("sum", min(a, b), max(a, b))


def sum_pair(source: Draw) -> tuple[int, int]:
    """Two numbers, mostly of two digits, a few of one or three."""
    rng = source.rng
    while True:
        kind = rng.random()
        if source.held_out or kind < 0.75:
            a, b = (int(x) for x in rng.integers(10, 100, 2))
        elif kind < 0.93:
            a, b = (int(x) for x in rng.integers(0, 100, 2))
        else:
            a, b = (int(x) for x in rng.integers(0, 1000, 2))
        if pair_is_held_out(a, b) == source.held_out:
            return a, b


def carry_steps(a: int, b: int) -> str:
    """Column by column from the right, each with its carry: "7+8=15, 2+1+1=4"."""
    steps, carry = [], 0
    while a or b or not steps:
        total = a % 10 + b % 10 + carry
        steps.append(f"{a % 10}+{b % 10}{'+1' if carry else ''}={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return ", ".join(steps)


def add(source: Draw) -> Exercise:
    """One sum, worked out column by column in the thought or, without one, in the reply."""
    a, b = sum_pair(source)
    request = source.choice(
        f"What is {a}+{b}?", f"{a}+{b}", f"Add {a} and {b}.", f"What is {a} plus {b}?"
    )
    return Exercise("sum", (user(request), _worked(source, f"{a}+{b}={a + b}", carry_steps(a, b))))


def add_many(source: Draw) -> Exercise:
    """Several sums in one turn: dense practice."""
    pairs = [sum_pair(source) for _ in range(int(source.rng.integers(2, 5)))]
    asked = ", ".join(f"{a}+{b}" for a, b in pairs)
    told = ", ".join(f"{a}+{b}={a + b}" for a, b in pairs)
    working = "; ".join(carry_steps(a, b) for a, b in pairs)
    return Exercise("sums", (user(f"What is {asked}?"), _worked(source, told, working)))


def _worked(source: Draw, result: str, working: str) -> Message:
    return assistant(result if source.thinking else f"{working}: {result}", working)


def _word_list(source: Draw, kind: str) -> list[str]:
    while True:
        chosen = some_words(source.rng, 2, 6)
        if source.admits(kind, *chosen):
            return chosen


def reverse(source: Draw) -> Exercise:
    """Words in the opposite order."""
    given = _word_list(source, "reverse")
    text = " ".join(given)
    request = source.choice(f"Reverse: {text}", f"Reverse the words: {text}")
    thought = f"The last word is {given[-1]}."
    return Exercise("reverse", (user(request), assistant(" ".join(given[::-1]), thought)))


def sort(source: Draw) -> Exercise:
    """Words in alphabetical order; the thought puts each behind its first letter."""
    given = _word_list(source, "sort")
    text, ordered = " ".join(given), sorted(given)
    request = source.choice(f"Sort: {text}", f"Sort the words: {text}")
    thought = ", ".join(f"{word[0]} {word}" for word in ordered)
    return Exercise("sort", (user(request), assistant(" ".join(ordered), thought)))


RECALL_PAIRS = (104, 112)
"""Entries of full-size notes: over 400 tokens, at four each."""


def notes(source: Draw) -> dict[str, str]:
    """Key words with a word each; held-out notes are always full-size.

    A value of several tokens would be found by its first one alone: the short convolutions, which
    tell a token its neighbours, do not reach back to the key from the second.
    """
    low, high = RECALL_PAIRS
    if source.size < 1.0:
        high = max(3, int(high * source.size))
        low = max(2, high // 4)
    count = int(source.rng.integers(low, high + 1))
    keys = some_words(source.rng, count, count)
    values = (*words.NAMES, *words.CITIES, *words.COLORS, *words.JOBS)
    return {key: pick(source.rng, values) for key in keys}


def recall(source: Draw, *, turns: int = 1) -> Exercise:
    """A value out of notes; further `turns` ask the same notes again, often for several keys."""
    while True:
        known = notes(source)
        if source.admits("recall", *known.items()):
            break
    listed = ", ".join(f"{key}={value}" for key, value in known.items())
    messages: list[Message] = []
    for turn in range(turns):
        several = 1 if turns == 1 else source.choice(1, 1, 2, 4, 8, 12)
        order = source.rng.permutation(len(known))[:several]
        keys = [list(known)[i] for i in order]
        request = f"What is {', '.join(keys)}?"
        messages += [
            user(request if turn else f"Notes: {listed}. {request}"),
            assistant(", ".join(f"{key}={known[key]}" for key in keys), f"Look for {keys[0]}."),
        ]
    return Exercise("recall", tuple(messages))


def call(source: Draw) -> Exercise:
    """A request that one of the declared tools serves: the reply is the call."""
    return _tool_use(source, answered=False)


def tool_answer(source: Draw) -> Exercise:
    """The same, followed by the tool's result and the reply that tells it."""
    return _tool_use(source, answered=True)


def declare(rng: Rng) -> tuple[Tool, ...]:
    """One to three tools; at least one takes values from a range wide enough to hold some out."""
    while True:
        chosen = rng.choice(len(TOOLS), int(rng.integers(1, 4)), replace=False)
        tools = tuple(TOOLS[i] for i in chosen)
        if any(WIDE_KINDS & set(tool.parameters.values()) for tool in tools):
            return tools


WIDE_KINDS = {"noun", "text", "number", "big"}


def _request(source: Draw, content: str) -> tuple[Tool, str, dict[str, Value], dict[str, Value]]:
    """A tool, the user's sentence, the arguments and a result, on the wanted side of the split."""
    while True:
        tool: Tool = source.choice(*source.tools)
        request: str | tuple[str, dict[str, Value]] = source.choice(*tool.requests)
        fixed: dict[str, Value] = {}
        if isinstance(request, tuple):
            request, fixed = request
        arguments = draw(source.rng, tool.parameters) | fixed
        result = draw(source.rng, tool.result)
        key = (content, tool.name, arguments, result if content == "tool_answer" else None)
        # A tool without parameters has one single call: it belongs to training.
        if source.admits(*key) if arguments else not source.held_out:
            return tool, request.format(**arguments), arguments, result


def _tool_use(source: Draw, *, answered: bool) -> Exercise:
    task = "tool_answer" if answered else "call"
    tool, request, arguments, result = _request(source, task)
    number = int(source.rng.integers(1000))
    function = {"name": tool.name, "arguments": arguments}
    messages = [
        user(request),
        assistant("", f"I call {tool.name}.")
        | {"tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]},
    ]
    if answered:
        reply = tool.answer.format(**(arguments | result))
        thought = "I tell the result."
        if source.rng.random() < 0.08:
            reason = source.choice("busy", "not found", "no access")
            result, reply, thought = (
                {"error": reason},
                f"That failed: {reason}.",
                "There is an error.",
            )
        separators = source.choice((", ", ": "), (", ", ": "), (",", ":"))
        text = json.dumps(result, separators=separators)
        messages += [
            {"role": "tool", "tool_call_id": f"call_{number}", "name": tool.name, "content": text},
            assistant(reply, thought),
        ]
    declared = tuple(one.declaration() for one in source.tools)
    return Exercise(task, tuple(messages), tools=declared)


def no_tool(source: Draw) -> Exercise:
    """A request for something that no declared tool does."""
    others = tuple(tool for tool in TOOLS if tool not in source.tools)
    _, request, _, _ = _request(replace(source, tools=others), "call")
    declared = tuple(one.declaration() for one in source.tools)
    reply = assistant("I have no tool for that.", "No tool fits.")
    return Exercise("no_tool", (user(request), reply), tools=declared)


FACTS: dict[str, tuple[str, dict[bool | None, tuple[str, ...]]]] = {
    "age": ("number", {None: ("I am {} years old.", "My age is {}.")}),
    "city": ("city", {None: ("I live in {}.", "My city is {}.")}),
    "color": ("color", {None: ("My favorite color is {}.", "I like {} best.")}),
    "day": ("day", {None: ("I come on {}.", "We meet on {}.")}),
    "friend": ("name", {None: ("My friend is {}.", "I come with {}.")}),
    "has_car": ("flag", {True: ("I have a car.",), False: ("I have no car.",)}),
    "item": ("noun", {None: ("I buy the {}.", "I want the {}.")}),
    "job": ("job", {None: ("I work as a {}.", "My job is {}.")}),
    "married": ("flag", {True: ("I am married.",), False: ("I am not married.",)}),
    "name": ("name", {None: ("My name is {}.", "I am {}.")}),
    "price": ("big", {None: ("It costs {} euros.", "The price is {}.")}),
    "vegan": ("flag", {True: ("I am vegan.",), False: ("I eat meat.",)}),
}
"""What a schema may ask: kind of value, and the sentences that state it (per value for flags)."""


def fill_schema(source: Draw) -> Exercise:
    """JSON with the properties that a schema asks for, out of a user's sentences."""
    rng = source.rng
    while True:
        stated = [
            str(key) for key in rng.choice(list(FACTS), int(rng.integers(2, 6)), replace=False)
        ]
        asked = sorted(stated[: int(rng.integers(2, 5))])
        known = draw(rng, {key: FACTS[key][0] for key in stated})
        if source.admits("json", *sorted(known.items())):
            break
    sentences = []
    for key in rng.permutation(stated):
        value, forms = known[str(key)], FACTS[str(key)][1]
        chosen = forms[value] if isinstance(value, bool) else forms[None]
        sentences.append(source.choice(*chosen).format(value))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: {"type": json_type(FACTS[key][0])} for key in asked},
        "required": asked,
    }
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    if rng.random() < 0.1:
        del schema["required"]
    content = json.dumps({key: known[key] for key in asked}, separators=(",", ":"))
    return Exercise(
        "json",
        (user(" ".join(sentences)), assistant(content, f"The keys are {', '.join(asked)}.")),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "facts", "schema": schema},
        },
    )


TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Good morning!"), "A greeting.",
     "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?"), "They ask who I am.",
     "I am k3-nano, a very small model built like Kimi K3."),
    (("What can you do?", "Help", "How can you help me?"), "They ask what I can do.",
     "I can add numbers, sort and reverse words, look up notes, call tools and write JSON."),
    (("How are you?", "How are you today?"), "A greeting.", "I am fine, thank you!"),
    (("Thanks!", "Thank you!", "Thank you very much."), "They are happy.", "You are welcome!"),
    (("Bye", "Goodbye!", "See you!"), "They leave.", "Goodbye!"),
    (("Who made you?", "Where do you come from?"), "They ask who made me.",
     "I was trained by the k3jax project on two CPU cores."),
    (("How big are you?", "How large are you?"), "They ask for my size.",
     "I have about five million weights."),
    (("Tell me a joke.", "Be funny."), "They want a joke.",
     "Why did the model sort its words? It wanted to be in order."),
    (("Are you Kimi K3?", "Are you a large model?"), "They ask who I am.",
     "No, I am k3-nano. I have the same parts, but I am very small."),
)  # fmt: skip
"""Small talk: ways to say it, the thought, the reply. Learnt by heart, so nothing is held out."""


def talk(source: Draw) -> Exercise:
    """Small talk, or a question beyond a very small model."""
    if source.rng.random() < 0.2:
        (word,) = some_words(source.rng, 1, 1)
        request = source.choice(f"Tell me about the {word}.", f"Why is there a {word}?")
        return Exercise("talk", (user(request), assistant("I do not know that.", "I do not know.")))
    asked, thought, reply = source.choice(*TALK)
    return Exercise("talk", (user(source.choice(*asked)), assistant(reply, thought)))


TASKS: dict[str, Callable[[Draw], Exercise]] = {
    "sum": add,
    "reverse": reverse,
    "sort": sort,
    "recall": recall,
    "call": call,
    "tool_answer": tool_answer,
    "no_tool": no_tool,
    "json": fill_schema,
    "talk": talk,
}
"""What evaluation measures, in the order of its table."""
