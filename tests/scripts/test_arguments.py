"""Wrong numbers are refused before a benchmark builds its model."""

import argparse

import pytest

from scripts import benchmark_engine, benchmark_model, experiment_decode_parts
from scripts.arguments import counts


def test_counts():
    assert counts("") == []
    assert counts("1,16, 2k") == [1, 16, 2048]


@pytest.mark.parametrize("text", ["0", "-1", "x", "1,,2", "1.5", ","])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        counts(text)


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        (benchmark_model, "--decode 0", "--decode: '0'"),
        (benchmark_model, "--step 1,x", "--step: 'x'"),
        (benchmark_model, "--rounds 0", "--rounds: '0'"),
        (benchmark_engine, "--decode 1,0", "--decode: '0'"),
        (benchmark_engine, "--decode=", "--decode: at least one"),
        (experiment_decode_parts, "--rounds 0", "--rounds: '0'"),
        (experiment_decode_parts, "--times nan", "--times above 0"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(script, arguments, named, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["script", *arguments.split()])
    monkeypatch.setattr(script, "random_params", lambda *_: pytest.fail("it built the model"))
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
