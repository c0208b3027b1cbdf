"""The tools that k3-nano learns to call: what each takes, how it is asked for, what it returns."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.nano import words

Value = str | int | bool
Rng = np.random.Generator


def pick(rng: Rng, items: tuple[str, ...]) -> str:
    """One of `items`, uniformly."""
    return items[int(rng.integers(len(items)))]


def some_words(rng: Rng, low: int, high: int) -> list[str]:
    """`low` to `high` different nouns in random order."""
    count = int(rng.integers(low, high + 1))
    return [words.NOUNS[i] for i in rng.choice(len(words.NOUNS), count, replace=False)]


KINDS: dict[str, Callable[[Rng], Value]] = {
    "noun": lambda rng: pick(rng, words.NOUNS),
    "text": lambda rng: " ".join(some_words(rng, 1, 3)),
    "name": lambda rng: pick(rng, words.NAMES),
    "city": lambda rng: pick(rng, words.CITIES),
    "color": lambda rng: pick(rng, words.COLORS),
    "job": lambda rng: pick(rng, words.JOBS),
    "room": lambda rng: pick(rng, words.ROOMS),
    "day": lambda rng: pick(rng, words.DAYS),
    "money": lambda rng: pick(rng, words.MONEY),
    "language": lambda rng: pick(rng, words.LANGUAGES),
    "sky": lambda rng: pick(rng, words.SKIES),
    "few": lambda rng: int(rng.integers(2, 13)),
    "hour": lambda rng: int(rng.integers(0, 24)),
    "minute": lambda rng: int(rng.integers(10, 60)),
    "number": lambda rng: int(rng.integers(2, 100)),
    "big": lambda rng: int(rng.integers(100, 1000)),
    "flag": lambda rng: bool(rng.integers(2)),
    "yes": lambda rng: True,
}
"""How each kind of value is drawn; its JSON type follows from the Python type."""


@dataclass(frozen=True)
class Tool:
    """One declared function.

    `parameters` and `result` map names to `KINDS`. `requests` are the user's sentences, with the
    parameters in braces; a sentence may come with fixed values instead ("Turn on …" → on=True).
    `answer` is the reply once the result is known.
    """

    name: str
    description: str
    parameters: dict[str, str]
    requests: tuple[str | tuple[str, dict[str, Value]], ...]
    result: dict[str, str]
    answer: str

    def declaration(self) -> dict[str, object]:
        """The tool in OpenAI form, every parameter required."""
        properties = {name: {"type": json_type(kind)} for name, kind in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(self.parameters),
                },
            },
        }


def json_type(kind: str) -> str:
    """The JSON-schema type of a kind of value."""
    value = KINDS[kind](np.random.default_rng(0))
    return {bool: "boolean", int: "integer", str: "string"}[type(value)]


def draw(rng: Rng, kinds: dict[str, str]) -> dict[str, Value]:
    """A value for every name; two texts or cities of one call always differ."""
    drawn: dict[str, Value] = {}
    for name, kind in kinds.items():
        value = KINDS[kind](rng)
        while isinstance(value, str) and value in drawn.values():
            value = KINDS[kind](rng)
        drawn[name] = value
    return drawn


def _tool(
    name: str,
    description: str,
    parameters: dict[str, str],
    requests: tuple[str | tuple[str, dict[str, Value]], ...],
    result: dict[str, str],
    answer: str,
) -> Tool:
    return Tool(name, description, parameters, requests, result, answer)


TOOLS: tuple[Tool, ...] = (
    _tool("get_weather", "Get the weather in a city.", {"city": "city"},
          ("What is the weather in {city}?", "How is the weather in {city} today?"),
          {"sky": "sky", "degrees": "number"}, "It is {sky} and {degrees} degrees in {city}."),
    _tool("get_time", "Get the local time in a city.", {"city": "city"},
          ("What time is it in {city}?", "Tell me the time in {city}."),
          {"hour": "hour", "minute": "minute"}, "It is {hour}:{minute} in {city}."),
    _tool("find_hotel", "Find a hotel in a city.", {"city": "city", "nights": "few"},
          ("Find a hotel in {city} for {nights} nights.",
           "I need a hotel in {city} for {nights} nights."),
          {"hotel": "noun", "price": "number"}, "The hotel {hotel} in {city} costs {price} euros."),
    _tool("find_flight", "Find a flight between two cities.", {"origin": "city", "target": "city"},
          ("Find a flight from {origin} to {target}.", "I want to fly from {origin} to {target}."),
          {"hour": "hour", "price": "big"},
          "The flight to {target} leaves at {hour} and costs {price} euros."),
    _tool("get_distance", "Get the distance between two cities.",
          {"origin": "city", "target": "city"},
          ("How far is it from {origin} to {target}?",
           "Get the distance from {origin} to {target}."),
          {"distance": "big"}, "It is {distance} kilometers from {origin} to {target}."),
    _tool("multiply", "Multiply two numbers.", {"a": "number", "b": "number"},
          ("Multiply {a} by {b}.", "What is {a} times {b}?"),
          {"product": "big"}, "{a} times {b} is {product}."),
    _tool("convert_money", "Convert money.", {"amount": "number", "currency": "money"},
          ("Convert {amount} euros to {currency}.", "How much is {amount} euros in {currency}?"),
          {"amount": "big"}, "That is {amount} {currency}."),
    _tool("set_timer", "Start a timer.", {"minutes": "number"},
          ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
          {"done": "yes"}, "The timer is set for {minutes} minutes."),
    _tool("set_alarm", "Set an alarm.", {"day": "day", "hour": "hour"},
          ("Wake me on {day} at {hour}.", "Set an alarm on {day} at {hour}."),
          {"done": "yes"}, "The alarm is set on {day} at {hour}."),
    _tool("create_event", "Add an event to the calendar.", {"day": "day", "title": "text"},
          ("Add {title} to my calendar on {day}.", "Plan {title} on {day}."),
          {"id": "number"}, "I added {title} on {day} as event {id}."),
    _tool("send_message", "Send a message to a person.", {"person": "name", "text": "text"},
          ("Tell {person}: {text}", "Send {person} the message {text}."),
          {"done": "yes"}, "I sent {text} to {person}."),
    _tool("call_person", "Call a person.", {"person": "name"},
          ("Call {person}.", "I want to talk to {person}."),
          {"done": "yes"}, "I called {person}."),
    _tool("get_contact", "Look up a person.", {"person": "name"},
          ("Who is {person}?", "What do you know about {person}?"),
          {"city": "city", "job": "job"}, "{person} is a {job} in {city}."),
    _tool("play_song", "Play a song.", {"title": "text"},
          ("Play the song {title}.", "I want to hear the song {title}."),
          {"done": "yes"}, "Now playing {title}."),
    _tool("set_light", "Switch a light.", {"on": "flag", "room": "room"},
          (("Turn on the light in the {room}.", {"on": True}),
           ("Turn off the light in the {room}.", {"on": False})),
          {"done": "yes"}, "The light in the {room} is switched."),
    _tool("set_heating", "Set the heating of a room.", {"degrees": "number", "room": "room"},
          ("Heat the {room} to {degrees} degrees.",
           "Set the heating in the {room} to {degrees} degrees."),
          {"done": "yes"}, "The {room} will have {degrees} degrees."),
    _tool("lock_door", "Lock a door.", {"room": "room"},
          ("Lock the door of the {room}.", "Lock the {room}."),
          {"done": "yes"}, "The door of the {room} is locked."),
    _tool("get_price", "Get the price of an item.", {"item": "noun"},
          ("What does the {item} cost?", "Get the price of the {item}."),
          {"price": "number"}, "The {item} costs {price} euros."),
    _tool("get_stock", "Count an item in stock.", {"item": "noun"},
          ("Is the {item} in stock?", "How often do we have the {item} in stock?"),
          {"count": "number"}, "We have the {item} {count} times."),
    _tool("order_item", "Order an item.", {"count": "number", "item": "noun"},
          ("Order the {item} {count} times.", "Buy the {item} {count} times."),
          {"order": "big"}, "I ordered the {item}, order {order}."),
    _tool("search_web", "Search the web.", {"query": "text"},
          ("Search the web for {query}.", "Look up {query} on the web."),
          {"pages": "number"}, "I found {pages} pages about {query}."),
    _tool("translate", "Translate a text.", {"language": "language", "text": "text"},
          ("Translate {text} to {language}.", "What is {text} in {language}?"),
          {"text": "text"}, "In {language} it is {text}."),
    _tool("add_note", "Save a note.", {"text": "text"},
          ("Write down: {text}", "Save the note {text}."),
          {"id": "number"}, "I saved note {id}."),
    _tool("read_note", "Read a note.", {"id": "number"},
          ("Read note {id}.", "What is in note {id}?"),
          {"text": "text"}, "Note {id} is {text}."),
    _tool("delete_note", "Delete a note.", {"id": "number"},
          ("Delete note {id}.", "Remove note {id}."),
          {"done": "yes"}, "I deleted note {id}."),
    _tool("paint_wall", "Paint the walls of a room.", {"color": "color", "room": "room"},
          ("Paint the {room} {color}.", "The walls of the {room} should be {color}."),
          {"done": "yes"}, "The {room} is now {color}."),
    _tool("take_photo", "Take a photo.", {}, ("Take a photo.", "Take a picture."),
          {"id": "number"}, "I took photo {id}."),
)  # fmt: skip
