"""What `k3jax demo` asks k3-nano, and what it should answer: none of it was in its training."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3jax.chat import ParsedOutput


@dataclass(frozen=True)
class Item:
    """One exercise.

    Attributes:
        title: what it shows.
        question: the user's message.
        expected: the final answer; JSON text is compared as a value where a schema is given.
        thinking: whether the model may think first.
        tools: declared functions.
        call: the call that should come first, with `result` to be sent back.
        response_format: as in a chat request.
        follow_up: a second question of the same conversation, and its final answer.
    """

    title: str
    question: str
    expected: str
    thinking: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    call: tuple[str, Mapping[str, Any]] | None = None
    result: str = ""
    response_format: Mapping[str, Any] | None = None
    follow_up: tuple[str, str] | None = None

    @property
    def wanted(self) -> str:
        """All answers."""
        return self.expected if self.follow_up is None else f"{self.expected}, {self.follow_up[1]}"

    def accepts(self, reply: ParsedOutput, expected: str | None = None) -> bool:
        """Whether this is the final answer, or the one to the follow-up that is `expected`."""
        expected = self.expected if expected is None else expected
        if reply.tool_calls or reply.finish_reason != "stop":
            return False
        if self.response_format is None:
            return reply.content == expected
        return _value(reply.content) == _value(expected)

    def accepts_call(self, reply: ParsedOutput) -> bool:
        """Whether this is the one expected call and nothing else."""
        if self.call is None or len(reply.tool_calls) != 1:
            return False
        call = reply.tool_calls[0]
        name, arguments = self.call
        return call.name == name and _value(call.arguments) == dict(arguments)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


_NOTES = """\
queen=black, egg=Berlin, hammer=Lima, fork=Max, rope=Athens, jar=green, pencil=Milan, star=Paul,
spider=Vienna, piano=Dublin, corn=Zurich, boat=Vienna, pocket=baker, box=Prague, horse=black,
marble=black, paper=pink, radio=Berlin, gold=Lily, button=Lisbon, rabbit=Boston, ship=Maria,
card=Leo, berry=brown, bridge=Milan, cotton=white, chain=Lisbon, bird=Nina, orange=red,
plum=Dublin, copper=Adam, jacket=Emma, maple=Lima, bag=Emma, basket=pink, lion=Grace, bottle=Delhi,
hat=Paris, candle=Anna, bread=green, desk=Clara, flag=Felix, cat=Ben, bone=teacher, honey=Berlin,
bench=Rosa, wagon=Laura, book=cook, nest=Oslo, ocean=teacher, paint=teacher, cheese=red,
violin=brown, stone=Sam, bamboo=Paul, valley=Anna, coin=green, mirror=Geneva, door=baker,
pepper=Dublin, leaf=Adam, glove=Adam, goat=pink, tower=baker, wolf=Rosa, harbor=Grace, coat=Carla,
grape=Paris, owl=purple, pearl=Lily, clock=Jack, eagle=Athens, salt=green, cloud=Delhi,
engine=Geneva, island=Milan, train=Lima, chair=Lima, ice=Clara, arrow=Rosa, brush=Milan, duck=Ben,
pillow=pink, fern=Felix, wheel=Adam, planet=Paris, rocket=Prague, bell=Oslo, needle=London,
gate=Seoul, knife=Rosa, window=Clara, nut=Zurich, tiger=Leo, dog=Clara, drum=Leo, garden=baker,
apple=pink, camera=Emma, lemon=blue, turtle=London, kite=blue, badge=Zurich, zebra=singer,
flute=Oslo"""

_FACTS = {
    "type": "object",
    "properties": {
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "name": {"type": "string"},
    },
    "required": ["age", "city", "name"],
}

ITEMS: tuple[Item, ...] = (
    Item("A sum, with thinking", "What is 28+85?", "28+85=113"),
    Item(
        "A declared tool, and the answer from its result",
        "What does the violin cost?",
        "The violin costs 88 euros.",
        tools=(
            _tool("get_price", "Get the price of an item.", item="string"),
            _tool("set_timer", "Start a timer.", minutes="integer"),
        ),
        call=("get_price", {"item": "violin"}),
        result='{"price": 88}',
    ),
    Item(
        "A value out of 105 notes, then another one: the notes are in the prefix cache by then",
        f"Notes: {_NOTES.replace('\n', ' ')}. What is badge?",
        "badge=Zurich",
        thinking=False,
        follow_up=("What is flute?", "flute=Oslo"),
    ),
    Item(
        "JSON for a schema",
        "My name is Emma. I live in Rome. I am 33 years old.",
        '{"age":33,"city":"Rome","name":"Emma"}',
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "facts", "schema": _FACTS},
        },
    ),
)
