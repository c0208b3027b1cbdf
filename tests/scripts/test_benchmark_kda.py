"""The KDA benchmark measures every operator it names."""

import json

from scripts import benchmark_kda


def test_every_case_is_timed_and_set_against_a_limit(capsys):
    arguments = "--heads 1 --dim 8 --tokens 5 --rows 1,2 --decode 3 --repeats 1 --skip-gradient"
    benchmark_kda.main([*arguments.split(), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["gemm_gflops"] > 0 and report["read_gbytes"] > 0
    cases = [(row["what"], row["rows"], row["tokens"]) for row in report["rows"]]
    assert cases == [("forward", 1, 5), ("forward", 2, 5), ("decode", 3, 1)]
    assert all(row["ms"] > 0 and row["reference_ms"] > 0 for row in report["rows"])


def test_the_table_has_a_line_for_each_case(capsys):
    arguments = "--heads 1 --dim 8 --tokens 5 --rows 1 --decode 1 --repeats 1 --skip-gradient"
    benchmark_kda.main([*arguments.split(), "--bound", "none"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("bound None")
    assert [line.split()[0] for line in lines[2:]] == ["what", "forward", "decode"]
