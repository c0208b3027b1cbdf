"""`k3jax` runs subcommands and reports their failures as a script and a person need them."""

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import pytest

from k3jax.cli import dispatch, main
from k3jax.cli.arguments import Subparsers


def fails_with(error: BaseException) -> Callable[[Namespace], int]:
    def run(args: Namespace) -> int:
        raise error

    return run


class Probe:
    """A subcommand `probe` that does what the test says; call it with its arguments."""

    def __init__(self, registry: pytest.MonkeyPatch) -> None:
        self.run: Callable[[Namespace], int] = lambda args: 0
        registry.setitem(sys.modules, "k3jax.cli.probe", self)  # type: ignore[arg-type]

    def add_parser(self, subparsers: Subparsers) -> ArgumentParser:
        return subparsers.add_parser("probe")

    def main(self, *argv: str) -> int:
        return dispatch.main(argv, commands=["probe"])


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    return Probe(monkeypatch)


def test_exit_code_is_the_commands(probe: Probe):
    probe.run = lambda args: 7

    assert probe.main("probe") == 7


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ValueError("head count 3 is not\n a multiple of 2"),
            "head count 3 is not a multiple of 2",
        ),
        (FileNotFoundError(2, "No such file or directory", "w"), "w: No such file or directory"),
        (OSError("no weights in folder w"), "no weights in folder w"),
        (ValueError(), "ValueError"),
    ],
)
def test_user_error_is_one_line_and_exit_2(
    probe: Probe, capsys: pytest.CaptureFixture[str], error: Exception, line: str
):
    probe.run = fails_with(error)

    assert probe.main("probe") == 2
    assert capsys.readouterr() == ("", f"k3jax: error: {line}\n")


@pytest.mark.parametrize("argv", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback_before_or_after_the_command(
    probe: Probe, capsys: pytest.CaptureFixture[str], argv: list[str]
):
    probe.run = fails_with(ValueError("too long"))

    assert probe.main(*argv) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("Traceback (most recent call last):")
    assert stderr.endswith("\nk3jax: error: too long\n")


def test_defect_is_not_disguised_as_a_user_error(probe: Probe):
    probe.run = fails_with(KeyError("layer"))

    with pytest.raises(KeyError):
        probe.main("probe")


def test_interrupt_is_quiet_and_130(probe: Probe, capsys: pytest.CaptureFixture[str]):
    probe.run = fails_with(KeyboardInterrupt())

    assert probe.main("probe") == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["--nonsense"], ["version", "--js"], ["version", "x"]]
)
def test_usage_error_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], argv: list[str]):
    with pytest.raises(SystemExit) as exit_:
        main(argv)

    assert exit_.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("k3jax: error: ")
    assert stderr.count("\n") == 1


def test_no_command_shows_the_help_and_exits_2(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


@pytest.mark.parametrize("command", dispatch.COMMANDS)
def test_help_of_every_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])

    assert exit_.value.code == 0
    assert f"\nexamples:\n  k3jax {command}" in capsys.readouterr().out


def test_help_loads_nothing_slow():
    slow = {"jax", "jaxlib", "flax", "numpy", "PIL", "tiktoken", "orbax", "importlib.metadata"}
    code = (
        "import contextlib, sys\n"
        "from k3jax.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "k3jax.cli" in result.stderr.split()
    assert slow.isdisjoint(result.stderr.split())


def test_closed_pipe_is_quiet_and_141():
    code = "import sys; from k3jax.cli import main; sys.exit(main(['version', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)

    result = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)

    assert (result.returncode, result.stderr) == (141, "")
