"""The device check tells right from wrong, and the floors count what a step must read."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from k3jax.config import k3
from pallas_kernels.implementation import Device, Implementation, kernel_supports
from pallas_kernels.shapes import K3, KIMI_LINEAR, SMALL
from scripts import check_gpu
from scripts.gpu.cases import MAKERS, Specs, Values, cases
from scripts.gpu.floors import SPEEDS, floor_us
from scripts.gpu.kernel_checks import KernelCheck
from scripts.gpu.machine import unfit
from scripts.gpu.timed_steps import STEP_OPS
from scripts.gpu_floors import step_parts

CPU = Device("cpu", "cpu")


@pytest.mark.parametrize("only", [["kda_decode"], pytest.param([], marks=pytest.mark.slow)])
def test_kernels_and_whole_steps_are_checked_and_timed_in_the_interpreter(only, capsys, tmp_path):
    arguments = ["--interpret", "--minutes", "60", "--out", str(tmp_path)]
    assert check_gpu.main(arguments + ["--only", *only] * bool(only)) == 0
    kernels = set(only or MAKERS)
    said = capsys.readouterr().out
    assert f"{len(kernels)} of {len(kernels)} kernels right, 0 wrong steps" in said
    found = json.loads((tmp_path / "check_gpu.json").read_text())
    assert all(case["kernel_us"] > 0 and case["xla_us"] > 0 for case in found["cases"])
    timed = {(row["step"].split(",")[0], *row["kernels"]) for row in found["steps"] if row["us"]}
    for kind, ops in STEP_OPS.items():
        tried = tuple(op for op in ops if op in kernels)
        assert {(kind,), (kind, *tried), *((kind, op) for op in tried)} <= timed
    assert found["skipped"] == [] and found["wrong"] == []


def test_checks_run_even_without_time_and_what_is_left_out_is_said(capsys):
    arguments = [
        "--interpret",
        "--no-steps",
        "--minutes",
        "0",
        "--only",
        "kda_verify",
        "kda_replay",
    ]
    assert check_gpu.main(arguments) == 0
    said = capsys.readouterr().out
    assert "2 of 2 kernels right" in said
    assert "no time left for: kda_replay 2 rows of 8 tokens" in said


def test_without_a_gpu_the_check_says_so(capsys):
    assert check_gpu.main([]) == 2
    error = capsys.readouterr().err
    assert "no GPU: jax-cuda13-plugin is" in error and "--interpret" in error


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("gpu", "NVIDIA B200", "10.0"), "NVIDIA B200 is 10.0"),
        (Device("gpu", "NVIDIA H100", "9.0"), None),
    ],
)
def test_devices_without_kernels_are_refused_by_name(device, reason):
    found = unfit(device)
    assert found == reason or (reason is not None and reason in (found or ""))


@pytest.mark.parametrize(("wrong", "ok"), [(0.0, True), (1.0, False), (jnp.nan, False)])
def test_a_wrong_kernel_is_found(wrong, ok):
    def function(x, implementation):
        return (x + wrong if implementation is Implementation.INTERPRET else x), None

    case = dataclasses.replace(
        cases(SMALL, 2, 40)[0],
        function=function,
        arguments=lambda make: (make.normal("float32", 8),),
        donated=(),
    )
    assert KernelCheck(case, Implementation.INTERPRET, CPU).check().ok is ok


def test_a_kernel_that_fails_is_reported_not_raised():
    case = dataclasses.replace(cases(SMALL, 2, 40)[0], arguments=lambda make: (1, 2))
    result = KernelCheck(case, Implementation.INTERPRET, CPU).check()
    assert not result.ok and "TypeError" in (result.failure or "")


def test_every_kernel_has_a_case_and_every_case_a_kernel():
    assert MAKERS.keys() == kernel_supports().keys()
    assert {case.op for case in cases(K3, 1, 64)} == MAKERS.keys()
    assert "experts" not in {case.op for case in cases(KIMI_LINEAR, 1, 64)}


def test_specs_and_values_have_the_same_shapes():
    for case in cases(SMALL, 2, 40):
        specs, values = case.arguments(Specs()), case.arguments(Values(0))
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(specs)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(values)
        ]


def test_floors_count_k3s_states_latents_and_experts():
    parts = {part.name: part for part in step_parts(k3(), 2, 1000)}
    assert parts["KDA states"].least_bytes == 2 * 69 * 2 * 96 * 128 * 128 * 4
    assert parts["MLA latents"].least_bytes == 2 * 24 * 1000 * 576 * 2
    # Two rows choose 16 of 896 each: 31.7 different experts are expected.
    assert parts["routed experts"].least_bytes == 92 * 32 * 3 * 3584 * 3072 * 17 // 32
    assert 55e9 < parts["dense matrices"].operations / 4 < 57e9


def test_a_floor_is_bandwidth_or_peak():
    assert floor_us(48 * 10**6, 1, SPEEDS["h200"]) == pytest.approx(10)
    assert floor_us(1, 989 * 10**7, SPEEDS["h200"]) == pytest.approx(10)
