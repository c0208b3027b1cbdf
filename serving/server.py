"""Starts workers and the gateway before them as one service, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3jax import __version__
from k3jax.engine.engine_config import EngineConfig
from k3jax.text_model import TextModel
from serving import worker_process
from serving.gateway import Gateway, GatewayOptions, bracketed, free_port
from serving.options import ServeOptions, WorkerOptions, split_address

POLL_SECONDS = 0.1

GATEWAY_SECONDS = 60.0
"""For the gateway to find its workers; those are ready by then."""

_GATEWAY_LOGS = {"debug": "debug", "info": "info", "warning": "error", "error": "error"}
"""The gateway warns of things that are as they should be here."""

Say = Callable[[str], None]


def run(options: ServeOptions, *, say: Say | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    Raises ValueError and OSError for options that cannot be met, before anything is started.
    """
    say = say or _print
    _check(options)
    if options.http is None and options.replicas == 1:
        say(f"k3jax {__version__} serves {options.worker.name}")
        worker = options.worker
        asyncio.run(
            worker_process.serve(worker, say=say, on_ready=lambda: _say_addresses(worker, say))
        )
        return 0
    return Service(options, say).run()


def _check(options: ServeOptions) -> None:
    """Raise ValueError or OSError for options that do not go together or with the model."""
    worker = options.worker
    if worker.tls is not None and (options.http is not None or options.replicas > 1):
        raise ValueError("TLS needs --grpc-only and one replica: the gateway does not speak it")
    if worker.token is not None and options.http is not None:
        raise ValueError("a gRPC token needs --grpc-only: the gateway sends none to workers")
    for address in (worker.listen, worker.metrics, options.http):
        if address is not None:
            split_address(address)
    _check_free(options)
    # Here once, and not by every worker when it starts.
    EngineConfig(**worker.sizes.given()).resolve(TextModel.open(worker.weights).config)


def _check_free(options: ServeOptions) -> None:
    """Raise ValueError for a port that is taken: before anything is loaded or compiled."""
    wanted = [("--http-port", options.http)]
    for worker in replicas(options):
        wanted += [("--listen", worker.listen), ("--metrics-port", worker.metrics)]
    for flag, address in wanted:
        host, port = split_address(address) if address is not None else ("", 0)
        if not port:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            why = str(error.strerror).partition(" (while attempting")[0]
            raise ValueError(f"{flag}: cannot listen on {address}: {why}") from None


class NotStarted(RuntimeError):
    """A worker ended, or the start was called off, before the service was ready."""


class Service:
    """The processes of one `k3jax serve`."""

    def __init__(self, options: ServeOptions, say: Say) -> None:
        self._options, self._say = options, say
        self._workers: list[WorkerProcess] = []
        self._stop = threading.Event()

    def run(self) -> int:
        """Until a signal, or until there is no worker left."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        self._say(f"k3jax {__version__} serves {self._options.worker.name}")
        try:
            with self.started() as gateway:
                self._say_ready(gateway)
                code = self._watch()
                if not code:
                    seconds = self._options.worker.drain_seconds
                    self._say(f"stopping: open requests may take {seconds:.0f} s to end")
                return code
        except NotStarted:
            return 0 if self._stop.is_set() else 2

    @contextlib.contextmanager
    def started(self) -> Iterator[Gateway | None]:
        """Everything up and ready for the length of a block, and ended in order after it.

        Raises NotStarted when a worker ends first, having said why, and GatewayFailed.
        """
        with contextlib.ExitStack() as stack:
            for number, worker in enumerate(replicas(self._options)):
                prefix = f"[{number}] " if self._options.replicas > 1 else ""
                started = WorkerProcess(worker, lambda line, p=prefix: self._say(f"{p}{line}"))
                self._workers.append(started)
                stack.callback(started.end)
            stack.callback(self._terminate)
            if not all(worker.wait_ready(self._stop) for worker in self._workers):
                raise NotStarted("the service ended before it was ready")
            gateway = None
            if self._options.http is not None:
                gateway = stack.enter_context(self._gateway(self._options.http))
                start = time.perf_counter()
                gateway.wait_ready(GATEWAY_SECONDS)
                self._say(f"  {'gateway':<10} {time.perf_counter() - start:>7.1f} s")
            yield gateway

    @property
    def addresses(self) -> list[str]:
        """`HOST:PORT` of every worker's gRPC side, once started."""
        return [worker.options.listen for worker in self._workers]

    def _gateway(self, http: str) -> Gateway:
        options = self._options
        host, port = split_address(http)
        return Gateway(
            GatewayOptions(
                host=host,
                port=port or free_port(host),
                workers=[worker.url for worker in self._workers],
                metrics_port=free_port(host),
                api_key=options.api_key,
                policy=options.policy,
                log_level=_GATEWAY_LOGS[options.worker.log_level],
                grace_seconds=int(options.worker.drain_seconds),
                otlp=options.worker.otlp,
            ),
            say=lambda line: self._say(f"[gateway] {line}"),
        )

    def _say_ready(self, gateway: Gateway | None) -> None:
        if gateway is not None:
            host, port = bracketed(gateway.options.host), gateway.options.metrics_port
            self._say(f"HTTP     {gateway.url}/v1   (OpenAI's API)")
            self._say(f"metrics  http://{host}:{port}/metrics   (gateway)")
        for worker in self._workers:
            _say_addresses(worker.options, self._say)
        if gateway is not None:
            if not self._options.api_key:
                self._say("security no --api-key: whoever reaches the HTTP port may use it")
            else:
                text = "security --api-key guards HTTP alone: gRPC and metrics ask for none"
                self._say(text)
            self._say(f"try it:\n  {self._curl(gateway.url)}")

    def _curl(self, url: str) -> str:
        key = " -H 'Authorization: Bearer KEY'" if self._options.api_key else ""
        messages = '[{"role": "user", "content": "What is 12+30?"}]'
        body = f'{{"model": "{self._options.worker.name}", "messages": {messages}}}'
        return (
            f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
        )

    def _watch(self) -> int:
        """Until a signal; a worker that dies is told of, and the last one ends the service."""
        known = set(self._workers)
        while not self._stop.wait(POLL_SECONDS):
            for worker in [w for w in known if w.process.poll() is not None]:
                known.discard(worker)
                self._say(f"worker {worker.url} ended with code {worker.process.returncode}")
            if not known:
                return 1
        return 0

    def _terminate(self) -> None:
        """Let all workers drain at the same time."""
        for worker in self._workers:
            worker.terminate()


class WorkerProcess:
    """A worker in a process of its own, whose lines are passed on."""

    def __init__(self, options: WorkerOptions, say: Say) -> None:
        self.options = options
        self.url = f"grpc://{options.listen}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serving.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then drains in order
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(options.to_json() + "\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(
            target=_pass_on, args=(self.process.stdout, say), daemon=True
        )
        self._reader.start()

    def wait_ready(self, stop: threading.Event) -> bool:
        """Until it takes requests; False if it ended, or `stop` came first."""
        with _channel(self.options) as channel:
            while not stop.is_set() and self.process.poll() is None:
                if _is_serving(channel):
                    return True
                stop.wait(POLL_SECONDS)
        return False

    def terminate(self) -> None:
        """Ask it to drain and end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def end(self) -> None:
        """Wait until it has drained; end it if that takes longer than it may."""
        try:
            self.process.wait(self.options.drain_seconds + 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._reader.join(1)


def replicas(options: ServeOptions) -> Iterator[WorkerOptions]:
    """The options of each worker: ports count up from the first, 0 finds free ones."""
    first = options.worker
    host, port = split_address(first.listen)
    for number in range(options.replicas):
        metrics = first.metrics
        if metrics is not None:
            metrics_host, metrics_port = split_address(metrics)
            chosen = metrics_port + number if metrics_port else free_port(metrics_host)
            metrics = f"{bracketed(metrics_host)}:{chosen}"
        listen = f"{bracketed(host)}:{port + number if port else free_port(host)}"
        yield replace(first, listen=listen, metrics=metrics)


def _channel(options: WorkerOptions) -> grpc.Channel:
    return grpc.insecure_channel(options.listen)


def _is_serving(channel: grpc.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)  # pyright: ignore[reportAttributeAccessIssue]
    except grpc.RpcError:
        return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def _say_addresses(worker: WorkerOptions, say: Say) -> None:
    security = "TLS" if worker.tls_certificate else "no TLS"
    token = "token" if worker.token else "no token"
    say(f"gRPC     {worker.listen}   ({security}, {token})")
    if worker.metrics:
        say(f"metrics  http://{worker.metrics}/metrics   (worker)")


def _pass_on(lines: Iterable[str], say: Say) -> None:
    for line in lines:
        say(line.rstrip("\n"))


def _print(line: str) -> None:
    print(line, flush=True)
