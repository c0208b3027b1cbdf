"""`k3jax serve`: options become what the service is told, wherever they come from."""

import argparse
import socket
import subprocess
import sys
from typing import Any

import pytest

from k3jax.cli import main, serve
from serving import server
from serving.options import ServeOptions, WorkerOptions, split_address


def options(*argv: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", *argv])
    serve._check_environment(args)
    return serve._options(args)


def test_defaults_are_on_this_machine_only():
    chosen = options("k3-nano")

    assert chosen.http == "127.0.0.1:8000"
    assert chosen.worker.listen == "127.0.0.1:50051"
    assert chosen.worker.metrics == "127.0.0.1:9100"
    assert (chosen.replicas, chosen.worker.name) == (1, "k3-nano")


def test_every_option_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "NAME": "mine",
        "HTTP_PORT": "0",
        "MAX_CONTEXT": "32k",
        "REPLICAS": "3",
        "POLICY": "round_robin",
        "NO_WARM_UP": "1",
        "API_KEY": "secret",
        "DRAIN_SECONDS": "2.5",
        "DTYPE": "bfloat16",
        "DEQUANTIZE": "1",
    }.items():
        monkeypatch.setenv(f"K3JAX_{name}", value)

    chosen = options("k3-nano", "--replicas", "2")

    assert chosen.worker.name == "mine"
    assert chosen.http == "127.0.0.1:0"
    assert chosen.worker.sizes.max_context == 32 * 1024
    assert (chosen.replicas, chosen.policy, chosen.api_key) == (2, "round_robin", "secret")
    assert not chosen.worker.warm_up
    assert chosen.worker.drain_seconds == 2.5
    assert (chosen.worker.dtype, chosen.worker.dequantize) == ("bfloat16", True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PORT", "http"),
        ("POLICY", "best"),
        ("MAX_ROWS", "0"),
        ("GRPC_ONLY", "maybe"),
        ("DEQUANTIZE", "yes"),
        ("DTYPE", "int3"),
    ],
)
def test_wrong_value_of_the_environment_is_one_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(f"K3JAX_{name}", value)

    try:
        code = main(["serve", "k3-nano"])
    except SystemExit as ended:
        code = ended.code

    assert code == 2
    assert repr(value) in capsys.readouterr().err


def test_misspelt_variable_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("K3JAX_MAX_ROW", "3")

    assert main(["serve", "k3-nano"]) == 2
    assert "K3JAX_MAX_ROW is set" in capsys.readouterr().err

    monkeypatch.setenv("K3JAX_QQQQQQ", "3")
    monkeypatch.delenv("K3JAX_MAX_ROW")
    assert main(["serve", "k3-nano"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_grpc_alone_takes_the_key_as_its_token():
    chosen = options("k3-nano", "--grpc-only", "--api-key", "secret")

    assert chosen.http is None
    assert (chosen.api_key, chosen.worker.token) == (None, "secret")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--tls-cert", "c.pem", "--tls-key", "c.key"], "grpc-only"),
        (["--grpc-only", "--tls-cert", "c.pem"], "both a certificate and its key"),
        (["--listen", "50051"], "no HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", "k3-nano", *argv]) == 2
    assert problem in capsys.readouterr().err


def test_options_survive_the_way_to_another_process():
    worker = options(
        "k3-nano", "--max-rows", "5", "--no-prefix-cache", "--dtype", "bfloat16"
    ).worker

    assert WorkerOptions.from_json(worker.to_json()) == worker


@pytest.mark.parametrize(
    ("text", "found"),
    [("h:1", ("h", 1)), ("[::1]:65535", ("::1", 65535)), ("0.0.0.0:0", ("0.0.0.0", 0))],
)
def test_addresses_are_split(text: str, found: tuple[str, int]):
    assert split_address(text) == found


@pytest.mark.parametrize("text", ["", ":1", "h", "h:", "h:x", "h:65536"])
def test_what_is_no_address_is_refused(text: str):
    with pytest.raises(ValueError, match="no HOST:PORT"):
        split_address(text)


def test_declaring_the_command_does_not_import_the_service():

    code = "import sys, k3jax.cli.serve; print('serving' in sys.modules, 'grpc' in sys.modules)"
    found: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("flag", ["--http-port", "--listen", "--metrics-port"])
def test_a_taken_port_is_refused_before_anything_is_loaded(flag: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {"--http-port": "0", "--listen": "127.0.0.1:0", "--metrics-port": "0"}
        free[flag] = f"127.0.0.1:{port}" if flag == "--listen" else str(port)
        chosen = options("no-such-folder", *(part for pair in free.items() for part in pair))
        with pytest.raises(ValueError, match=f"{flag}: cannot listen on 127.0.0.1:{port}"):
            server.run(chosen)
