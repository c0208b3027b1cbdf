"""--kernel and --kernels: what is asked for runs, what cannot be is one line and exit code 2."""

import json
import os

import pytest

from k3jax.cli import main
from k3jax.cli.kernels import variants
from k3jax.cli.serve import _options, add_parser
from pallas_kernels.implementation import kernel_supports
from tests.helpers import KIMI_LINEAR_TINY


def code_and_error(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr().err


def test_info_prints_what_every_op_runs_as_and_why(capsys: pytest.CaptureFixture[str]):
    assert main(["info", "k3-nano", "--kernels", "--kernel", "kda_decode=interpret"]) == 0

    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("kernels on cpu") + 2 :]
    rows = [line.split(maxsplit=2) for line in table]
    assert [row[0] for row in rows] == list(kernel_supports())
    assert rows[0][:2] == ["kda_decode", "interpret"] and "asked for" in rows[0][2]
    assert all(row[1] == "xla" and row[2] for row in rows[1:])


def test_info_gives_the_plan_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(KIMI_LINEAR_TINY), "--kernels", "--json"]) == 0

    plan = json.loads(capsys.readouterr().out)["kernels"]
    assert plan.keys() == kernel_supports().keys()
    assert plan["experts"]["runs_as"] == "xla" and plan["experts"]["because"]


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("chat",), ("serve",)])
@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("kda_decoder=xla", "no op 'kda_decoder' to choose; the ops are kda_decode"),
        ("kda_decode=fast", "'kda_decode=fast' is no OP=VARIANT"),
        ("kda_decode", "'kda_decode' is no OP=VARIANT"),
    ],
)
def test_a_wrong_op_or_variant_is_one_line(
    command: tuple[str, ...], kernel: str, problem: str, capsys: pytest.CaptureFixture[str]
):
    name, *rest = command
    code, error = code_and_error(capsys, name, "k3-nano", "--kernel", kernel, *rest)

    assert code == 2
    assert problem in error and error.count("\n") == 1


def test_a_kernel_that_cannot_run_here_says_why(capsys: pytest.CaptureFixture[str]):
    argv = ("generate", "k3-nano", "--prompt", "x", "--kernel", "kda_decode=gpu")
    code, error = code_and_error(capsys, *argv)

    assert code == 2
    assert "kda_decode cannot run as gpu: kernels need compute capability 9.0" in error


def test_a_server_chooses_its_own_kernels(capsys: pytest.CaptureFixture[str]):
    argv = ("chat", "--server", "127.0.0.1:1", "--kernel", "experts=xla")
    assert code_and_error(capsys, *argv)[0] == 2


def test_info_refuses_variants_without_a_plan(capsys: pytest.CaptureFixture[str]):
    code, error = code_and_error(capsys, "info", "k3-nano", "--kernel", "experts=xla")
    assert code == 2 and "--kernels" in error


def serve_kernels(*argv: str) -> dict[str, str] | None:
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return _options(parser.parse_args(["serve", "k3-nano", *argv])).worker.sizes.kernels


def test_serve_takes_several_and_the_environment_stands_in(monkeypatch: pytest.MonkeyPatch):
    assert serve_kernels() is None
    both = {"kda_decode": "xla", "experts": "xla"}
    assert serve_kernels("--kernel", "kda_decode=xla", "--kernel", "experts=xla") == both
    monkeypatch.setenv("K3JAX_KERNEL", "kda_decode=xla,experts=xla")
    assert serve_kernels() == both
    assert serve_kernels("--kernel", "mla_decode=xla") == {"mla_decode": "xla"}


def test_variants_are_parsed_with_spaces_and_the_last_wins():
    assert variants("a=xla, b=gpu,a=interpret") == {"a": "interpret", "b": "gpu"}


def test_interpreting_asks_for_the_threads_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NPROC")
    main(["info", "k3-nano", "--kernels", "--kernel", "kda_decode=interpret"])
    assert os.environ.pop("NPROC") == "16"
