"""Streams a call's argument elements as the text of one JSON object."""

import json
from typing import Literal, NoReturn


class ArgumentsWriter:
    """Every method returns the JSON text that became certain.

    String values stream as they come. Other values are held until their element closes, because
    one that turns out not to be JSON is written as a string. A `json` element holds the whole
    arguments and passes through as it is, broken or not. A call uses one of the two forms; the
    other's elements are ignored.
    """

    def __init__(self) -> None:
        self._form: Literal["none", "arguments", "json"] = "none"
        self._element: Literal["none", "string", "value", "json", "ignored"] = "none"
        self._held: list[str] = []
        self._blank = True

    def open_argument(self, key: str | None, kind: str | None) -> str:
        """Begin `<argument key type>`; one without key is ignored."""
        if self._form == "json" or key is None:
            self._element = "ignored"
            return ""
        before = "{" if self._form == "none" else ", "
        self._form = "arguments"
        self._element = "string" if kind == "string" else "value"
        quote = '"' if kind == "string" else ""
        return f"{before}{json.dumps(key, ensure_ascii=False)}: {quote}"

    def open_json(self) -> str:
        """Begin a `json` element."""
        self._element = "json" if self._form == "none" else "ignored"
        if self._form == "none":
            self._form = "json"
        return ""

    def text(self, text: str) -> str:
        """Text inside the open element."""
        if self._element == "string":
            return json.dumps(text, ensure_ascii=False)[1:-1]
        if self._element == "value":
            self._held.append(text)
        if self._element != "json":
            return ""
        self._blank = self._blank and not text.strip()
        return text

    def close_element(self) -> str:
        """End the open element, if there is one."""
        element, self._element = self._element, "none"
        if element == "string":
            return '"'
        if element != "value":
            return ""
        raw = "".join(self._held)
        self._held.clear()
        return _value(raw)

    def finish(self) -> str:
        """End the call; the joined text is now complete."""
        ending = self.close_element()
        if self._form == "arguments":
            return ending + "}"
        return ending + ("{}" if self._blank else "")


def _value(raw: str) -> str:
    """JSON text of a value that is not a string: as written, or a string if it is not JSON."""
    try:
        json.loads(raw, parse_constant=_reject)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    return raw.strip()


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
