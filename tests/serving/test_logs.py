"""Log lines: one JSON object each, with the request's id and figures."""

import json
import logging
import sys

from serving.logs import JsonFormatter
from serving.request_log import RequestLog, RequestRecord

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_line_of_a_request_is_json_with_its_fields(caplog):
    with caplog.at_level("INFO", "k3jax.serving.requests"):
        log = RequestLog()
        record = RequestRecord("r1", prompt_tokens=3, n=1, traceparent=TRACEPARENT)
        log.open(record)
        log.close(record)

    entry = json.loads(JsonFormatter().format(caplog.records[0]))

    assert entry["request_id"] == "r1"
    assert (entry["prompt_tokens"], entry["trace_id"], entry["level"]) == (3, TRACE, "info")
    assert entry["total_ms"] >= 0
    assert entry["time"].endswith("Z")


def test_other_lines_are_json_with_their_message_and_traceback():
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "f", 1, 'said "%s"', ("hi",), sys.exc_info()
        )

    entry = json.loads(JsonFormatter().format(record))

    assert entry["message"] == 'said "hi"'
    assert "ValueError: broken" in entry["traceback"]


def test_finished_requests_are_forgotten_oldest_first():
    log = RequestLog(kept=2)
    for name in "abc":
        record = RequestRecord(name, prompt_tokens=1, n=1)
        log.open(record)
        log.close(record)

    assert [record.id for record in log.latest(10)] == ["c", "b"]
    assert log.num_open == 0


def test_a_refused_request_does_not_hide_the_one_that_runs_under_its_id():
    log = RequestLog()
    running, refused = (RequestRecord("r1", prompt_tokens=1, n=1) for _ in range(2))
    log.open(running)
    log.open(refused)
    log.close(refused, "in use")
    assert log.num_open == 1
    assert log.find("r1") is running
    log.close(RequestRecord("r1", prompt_tokens=1, n=1), "never opened")
    assert log.num_open == 1
    log.close(running)
    assert log.num_open == 0
