"""Reads the W3C trace context that a caller sends along, so that its log lines can be joined."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_id(metadata: Iterable[Any] | None) -> str:
    """The trace id of a call's `traceparent`, or nothing without a well-formed one."""
    for key, value in metadata or ():
        if key == "traceparent":
            match = _TRACEPARENT.fullmatch(value if isinstance(value, str) else "")
            return match[1] if match else ""
    return ""
