"""The demo's HTTP client reads server-sent events."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from k3jax.cli.http_chat import HttpChat


@contextmanager
def service_that_says(*lines: str) -> Iterator[HttpChat]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class looks for this name
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    try:
        yield HttpChat(f"http://127.0.0.1:{server.server_port}", "any")
    finally:
        thread.join()
        server.server_close()


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": None}]})


@pytest.mark.parametrize("space", ["", " "])
def test_comments_and_other_fields_between_the_pieces_are_passed_over(space):
    lines = (": keep-alive", "event: x", f"data:{space}{chunk('häl')}", ":", f"data:{space}[DONE]")
    with service_that_says(*lines) as chat:
        assert chat.ask([], lambda _: None).reply.content == "häl"


def test_a_stream_without_its_end_is_an_error():
    with (
        service_that_says(f"data: {chunk('half')}") as chat,
        pytest.raises(ConnectionError, match="broke off"),
    ):
        chat.ask([], lambda _: None)
