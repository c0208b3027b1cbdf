"""Starts the smg gateway, which speaks HTTP on one side and to workers on the other."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05

IDLE_POLLS = 3
"""That find no open request before the process is ended: the last bytes have left by then."""

STOP_SECONDS = 10.0
"""More than the grace that open requests get, before the process is killed."""


class GatewayFailed(RuntimeError):
    """The gateway ended, or did not become ready."""


@dataclass(frozen=True)
class GatewayOptions:
    """What the gateway is started with.

    Attributes:
        http: address of the OpenAI-compatible side.
        workers: URLs, `grpc://HOST:PORT` each; more can be added while it runs.
        metrics_port: of the gateway's own Prometheus side; it has no way to choose a free one.
        api_key: asked of every caller; None lets everyone in who can reach the port.
        policy: how requests are spread over workers.
        otlp: `HOST:PORT` of an OpenTelemetry collector; workers then get the `traceparent`.
        extra: further options of `smg launch`, as they are.
    """

    host: str
    port: int
    workers: Sequence[str]
    metrics_port: int
    api_key: str | None = None
    policy: str = "cache_aware"
    log_level: str = "error"
    grace_seconds: int = 30
    otlp: str | None = None
    extra: Sequence[str] = field(default=())

    def arguments(self) -> list[str]:
        """For `smg`.

        Both parsers are named because the model's name may say nothing about them. Its spans are of
        level info: with less logged it makes none, and passes no caller's `traceparent` on.
        """
        level = "info" if self.otlp and _rank(self.log_level) > _rank("info") else self.log_level
        return [
            *("launch", "--host", self.host, "--port", str(self.port)),
            *("--prometheus-host", self.host, "--prometheus-port", str(self.metrics_port)),
            *("--policy", self.policy, "--log-level", level),
            *("--tool-call-parser", "kimi_k3", "--reasoning-parser", "kimi_k3"),
            *("--shutdown-grace-period-secs", str(self.grace_seconds)),
            *("--worker-startup-check-interval", "1"),
            *(("--api-key", self.api_key) if self.api_key else ()),
            *(("--enable-trace", "--otlp-traces-endpoint", self.otlp) if self.otlp else ()),
            *self.extra,
            *("--worker-urls", *self.workers),
        ]


_REFUSAL = re.compile(r"status[= ]4\d\d |Failed to build generate request")
"""What the gateway calls an error is what it told a caller, who made it."""

_LEVELS = ("debug", "info", "warn", "error")

_LEVEL = re.compile(rf"^\S+ \S+ +({'|'.join(_LEVELS).upper()}) ")
"""Of a line that the gateway logs, after date and time."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# Linux ends a process that said so (PR_SET_PDEATHSIG) with the one that started it.
_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Gateway:
    """A running `smg`; a context manager that ends it. Start it from a thread that lives on."""

    def __init__(self, options: GatewayOptions, *, say: Callable[[str], None] = print) -> None:
        """Start the process; `say` gets the lines that it writes, but for its picture."""
        self.options = options
        self.url = f"http://{bracketed(options.host)}:{options.port}"
        smg = str(Path(sys.executable).with_name("smg"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DIE_WITH_PARENT, smg, *options.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then drains in order
        )
        self._reader = threading.Thread(target=self._pass_on, args=(say,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, timeout: float) -> None:
        """Until workers and tokenizer are there. Raises GatewayFailed."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise GatewayFailed(f"the gateway ended with code {self.process.returncode}")
            if self.request("GET", "/readiness")[0] == 200:
                return
            time.sleep(POLL_SECONDS)
        raise GatewayFailed(f"the gateway was not ready within {timeout:.0f} s")

    def add_worker(self, url: str) -> None:
        """Spread requests over one more worker, from soon on."""
        self._must("POST", "/workers", {"url": url})

    def remove_worker(self, url: str) -> None:
        """Send nothing more to a worker; what it is answering goes on."""
        for worker in self.workers():
            if worker["url"] == url:
                self._must("DELETE", f"/workers/{worker['id']}")
                return
        raise GatewayFailed(f"the gateway knows no worker {url}")

    def workers(self) -> list[dict[str, Any]]:
        """The workers that the gateway knows, with their health."""
        return json.loads(self._must("GET", "/workers"))["workers"]

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """One HTTP request to the gateway: status and body; status 0 when it does not answer."""
        headers = {"content-type": "application/json"}
        if self.options.api_key:
            headers["authorization"] = f"Bearer {self.options.api_key}"
        data = None if body is None else json.dumps(body)
        return _request((self.options.host, self.options.port), method, path, data, headers)

    def stop(self) -> None:
        """End the process once open requests have finished, or have had their while.

        Left alone it would listen for five more seconds, for balancers that do not know yet. With
        `otlp` it is left alone: it sends its last spans at the very end.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.options.grace_seconds + STOP_SECONDS
        idle = 0
        while self.process.poll() is None and time.monotonic() < deadline and idle < IDLE_POLLS:
            done = self.options.otlp is None and self.open_requests() == 0
            idle = idle + 1 if done else 0
            time.sleep(POLL_SECONDS)
        self.process.kill()
        self.process.wait()

    def open_requests(self) -> int | None:
        """HTTP requests that have not been answered in full; None when the gateway does not say."""
        address = (self.options.host, self.options.metrics_port)
        text = _request(address, "GET", "/metrics")[1].decode()
        found = re.search(r"^smg_http_connections_active (\d+)$", text, re.MULTILINE)
        return None if found is None else int(found[1])

    def _pass_on(self, say: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = _COLOUR.sub("", line.rstrip())
            picture = any("\u2800" <= character <= "\u28ff" for character in text)
            refusal = self.options.log_level == "error" and _REFUSAL.search(text)
            level = _LEVEL.match(text)
            unwanted = level and _rank(level[1].lower()) < _rank(self.options.log_level)
            if text and not (picture or refusal or unwanted):
                say(text)

    def _must(self, method: str, path: str, body: object = None) -> bytes:
        status, answer = self.request(method, path, body)
        if not 200 <= status < 300:
            raise GatewayFailed(f"{method} {path}: status {status} {answer[:200]!r}")
        return answer


def _rank(level: str) -> int:
    return _LEVELS.index(level)


def _request(
    address: tuple[str, int],
    method: str,
    path: str,
    data: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=10)
    try:
        connection.request(method, path, data, dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now, for programs that cannot choose one themselves."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def bracketed(host: str) -> str:
    """A host as URLs want it."""
    return f"[{host}]" if ":" in host else host
