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
    """

    title: str
    question: str
    expected: str
    thinking: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    call: tuple[str, Mapping[str, Any]] | None = None
    result: str = ""
    response_format: Mapping[str, Any] | None = None

    def accepts(self, reply: ParsedOutput) -> bool:
        """Whether this is the final answer."""
        if reply.tool_calls or reply.finish_reason != "stop":
            return False
        if self.response_format is None:
            return reply.content == self.expected
        return _value(reply.content) == _value(self.expected)

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
chair=37, rabbit=88, zebra=84, piano=56, tree=73, basket=11, lion=56, pearl=37, silver=92, bench=17,
engine=32, boat=19, card=50, eagle=72, ice=53, corn=43, kite=25, ship=70, fox=28, dog=51, cat=66,
book=93, desk=10, forest=31, orange=45, owl=19, gold=36, clock=30, pencil=79, duck=90, coat=49,
cheese=18, egg=92, arrow=10, cable=85, marble=23, ocean=27, feather=18, jacket=92, crow=77,
honey=62, spider=76, flute=20, glass=31, nut=20, rocket=28, butter=50, castle=25, cotton=52, bag=14,
bread=98, key=52, cloud=26, moon=93, oak=23, cup=82, horse=72, hammer=43, coin=61, fork=53,
planet=22, paper=78, goat=36, tiger=54, drum=30, salt=32, door=55, melon=97, wheel=28, train=38,
maple=75, flag=80, pillow=54, wagon=91, tower=16, lemon=48, chain=54, paint=88, brush=63, window=30,
queen=55, stone=73, ladder=30, grape=34"""

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
        "A value out of 84 notes, without thinking",
        f"Notes: {_NOTES.replace('\n', ' ')}. What is honey?",
        "honey=62",
        thinking=False,
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
