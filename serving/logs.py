"""Log lines for people, or one JSON object each for machines."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and the `fields` that a line was given."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = record.__dict__.get("fields")
        entry |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logs(level: str, style: str) -> None:
    """Write this service's lines to stderr; `style` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else text)
    logger = logging.getLogger("k3jax")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
