"""`k3jax serve` as a user starts it: what it says, what it refuses, and that it leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from openai import APIStatusError, OpenAI
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as pb_grpc

from tests.serving.waiting import eventually

COMMAND = [sys.executable, "-c", "import sys; from k3jax.cli import main; sys.exit(main())"]
SMALL = ("--max-rows", "2", "--max-context", "512", "--no-warm-up")


@contextmanager
def serving(*options: str) -> Iterator[subprocess.Popen[str]]:
    """The command with its output; ended in any case."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "k3-nano", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "K3JAX_COMPILATION_CACHE": "0"},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if text in line:
            return lines
    raise AssertionError(f"the output ended without {text!r}: {lines}")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def status_of_an_answer(url: str, key: str) -> int:
    client = OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
    try:
        client.chat.completions.create(
            model="k3-nano",
            messages=[{"role": "user", "content": "Hello!"}],
            max_completion_tokens=2,
        )
    except APIStatusError as error:
        return error.status_code
    return 200


def test_one_command_starts_replicas_and_gateway_and_ends_them():
    options = ("--listen", "127.0.0.1:0", "--http-port", "0", "--metrics-port", "0")
    with serving(*SMALL, *options, "--replicas", "2", "--api-key", "secret") as process:
        lines = read_until(process, "curl")
        said = "\n".join(lines)
        url = re.search(r"HTTP +(http://\S+)", said)
        scrapes = re.findall(r"metrics +(http://\S+/metrics) +\(worker\)", said)
        addresses = re.findall(r"^gRPC +(\S+)", said, re.MULTILINE)
        assert url is not None
        models = OpenAI(base_url=url[1], api_key="secret").models.list().data
        told = {key: status_of_an_answer(url[1], key) for key in ("secret", "guessed")}
        scraped = [urllib.request.urlopen(scrape, timeout=10).status for scrape in scrapes]
        healthy = []
        for address in addresses:
            with grpc.insecure_channel(address) as channel:
                stub = pb_grpc.TokenSpeedSchedulerStub(channel)
                healthy.append(stub.HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy)

        process.send_signal(signal.SIGTERM)
        code = process.wait(90)

    assert code == 0
    assert [model.id for model in models] == ["k3-nano"]
    assert told == {"secret": 200, "guessed": 401}
    assert healthy == [True, True] and scraped == [200, 200]
    assert len(set(addresses)) == 2
    for phase in ("tokenizer", "weights", "caches", "gateway"):
        assert re.search(rf"{phase} +\d+\.\d s", said), phase
    assert re.search(r"latent pages +[\d.]+ MB", said)
    assert eventually(lambda: not any(listens(int(a.rpartition(":")[2])) for a in addresses))


def test_stream_that_is_open_at_sigterm_is_answered_in_full():
    options = ("--listen", "127.0.0.1:0", "--http-port", "0", "--metrics-port", "0")
    with serving(*SMALL, *options, "--token-budget", "64") as process:
        url = re.search(r"HTTP +(http://\S+)", "\n".join(read_until(process, "curl")))
        assert url is not None
        client = OpenAI(base_url=url[1], api_key="none", max_retries=0, timeout=120)
        stream = client.chat.completions.create(
            model="k3-nano",
            messages=[{"role": "user", "content": "Hello!"}],
            max_completion_tokens=300,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream) for _ in range(5)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        code = process.wait(60)

    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [300]
    assert code == 0


def test_memory_that_does_not_suffice_is_refused_with_what_is_wanted_and_free():
    options = ("--listen", "127.0.0.1:0", "--http-port", "0", "--metrics-port", "0")
    with serving(*SMALL, *options, "--num-pages", "64m") as process:
        _, errors = process.communicate(timeout=120)

    assert process.returncode == 2
    assert re.search(r"[\d.]+ TB for the caches, [\d.]+ TB in all, but [\d.]+ GB are free", errors)
    assert "Traceback" not in errors


@pytest.mark.parametrize("kind", [["--grpc-only"], ["--replicas", "2", "--http-port", "0"]])
def test_sizes_that_cannot_be_are_refused_once_and_before_anything_starts(kind: list[str]):
    options = ("--listen", "127.0.0.1:0", "--metrics-port", "0")
    with serving("--max-context", "9k", *kind, *options) as process:
        said, errors = process.communicate(timeout=120)

    assert process.returncode == 2
    assert re.fullmatch(r"k3jax: error: .*max_context = 9216, expected 2..8192.*\n", errors)
    assert said == ""


def test_start_that_is_called_off_while_compiling_ends_at_once_and_quietly():
    options = ("--max-rows", "2", "--max-context", "512", "--grpc-only", "--metrics-port", "0")
    with serving(*options, "--listen", "127.0.0.1:0") as process:
        read_until(process, "kernels on")
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)

    assert (process.returncode, errors) == (0, "")


def test_port_in_use_is_said_in_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("--grpc-only", "--listen", f"127.0.0.1:{port}", "--metrics-port", "0")
        with serving(*SMALL, *options) as process:
            _, errors = process.communicate(timeout=120)

    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in errors
    assert "Traceback" not in errors
