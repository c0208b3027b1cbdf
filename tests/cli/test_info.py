"""`k3jax info` reports a model folder to a person and to a program."""

import json
from pathlib import Path

import pytest

from k3jax.cli import main
from k3jax.weights.summary import summarize
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY


def test_json_is_the_summary(capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(K3_TINY), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == summarize(K3_TINY)


def test_lines_name_the_layers_and_sizes(capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(K3_TINY)]) == 0

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "pattern KKKM KKMM (K = KDA, M = MLA)" in lines
    assert "weights 2.25 M, 1.4 M used per token" in lines
    assert "experts 2 of 8 in each of 7 layers" in lines
    assert "stored as bfloat16, routed experts mxfp4" in lines
    assert "vision 74.4 k 149 kB 5.0%" in lines
    assert "tokenizer missing tiktoken.model and tokenizer_config.json" in lines


def test_what_a_model_lacks_is_left_out(capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(KIMI_LINEAR_TINY)]) == 0

    output = capsys.readouterr().out
    assert "residuals  plain" in output
    assert "attention residuals" not in output


def test_wrong_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["info", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"k3jax: error: no model in {tmp_path}") and error.count("\n") == 1
