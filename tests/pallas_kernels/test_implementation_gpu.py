"""A plan says what runs and why, obeys explicit requests, and refuses what cannot be."""

import dataclasses

import jax
import pytest

from k3jax import config as configs
from pallas_kernels.implementation import (
    Device,
    Implementation,
    KernelPlan,
    chosen,
    device_platform,
    kernel_supports,
    plan_kernels,
    use_plan,
)
from pallas_kernels.measured import Measured, measured_steps, merged, write_measured
from pallas_kernels.shapes import K3, K3_NANO, KIMI_LINEAR, ModelShape

H200 = Device("gpu", "NVIDIA H200", "9.0")
A100 = Device("gpu", "NVIDIA A100", "8.0")
CPU = Device("cpu", "cpu")
XLA, GPU, INTERPRET = Implementation.XLA, Implementation.GPU, Implementation.INTERPRET


def step(batch=1, context=4096, gpu_us=900.0, shape=K3, op="kda_decode", kind="decode"):
    return Measured(op, kind, shape, batch, context, 1000.0, gpu_us)


def reason(plan: KernelPlan, op: str) -> str:
    return next(choice.reason for choice in plan.choices if choice.op == op)


@pytest.mark.parametrize(("config", "shape"), [("k3", K3), ("kimi_linear_48b", KIMI_LINEAR)])
def test_the_named_shapes_are_those_of_the_released_models(config, shape):
    assert ModelShape.of(getattr(configs, config)(), "bfloat16", 64) == shape


def test_every_kernel_takes_the_released_k3():
    assert all(supports(K3).ok for supports in kernel_supports().values())


def test_shapes_that_a_kernel_does_not_take_are_explained_at_planning():
    plan = plan_kernels(K3_NANO, H200, measured=())
    assert plan["mla_decode"] is XLA
    assert "latents of 64 + 16" in reason(plan, "mla_decode")


@pytest.mark.parametrize("device", [CPU, A100])
def test_without_a_hopper_gpu_everything_is_xla_and_says_so(device):
    plan = plan_kernels(K3, device, measured=(step(),))
    assert {choice.implementation for choice in plan.choices} == {XLA}
    assert "compute capability 9.0" in reason(plan, "kda_decode")


def test_a_kernel_is_chosen_only_where_it_made_a_step_faster():
    assert plan_kernels(K3, H200, measured=())["kda_decode"] is XLA
    for too_slow in (1001.0, 990.0):
        assert plan_kernels(K3, H200, measured=(step(gpu_us=too_slow),))["kda_decode"] is XLA
    plan = plan_kernels(K3, H200, measured=(step(),))
    assert plan["kda_decode"] is GPU and plan["mla_decode"] is XLA
    assert "900 µs with the kernel, 1000 µs without" in reason(plan, "kda_decode")


def test_the_nearest_workload_decides():
    steps = (step(batch=1), step(batch=64, gpu_us=2000.0))
    assert plan_kernels(K3, H200, batch=4, measured=steps)["kda_decode"] is GPU
    assert plan_kernels(K3, H200, batch=16, measured=steps)["kda_decode"] is XLA


@pytest.mark.parametrize(("prefill_us", "runs"), [(900.0, GPU), (1010.0, GPU), (1020.0, XLA)])
def test_a_kernel_of_two_kinds_of_step_may_slow_neither_down(prefill_us, runs):
    steps = (step(op="experts"), step(op="experts", kind="prefill", gpu_us=prefill_us))
    plan = plan_kernels(K3, H200, measured=steps)
    assert plan["experts"] is runs
    assert f"a prefill step of batch 1 and context 4096 takes {prefill_us:.0f}" in reason(
        plan, "experts"
    )


def test_new_measurements_replace_all_old_ones_of_their_model_and_workload():
    failed_since = step(op="mla_decode")
    kept = (step(batch=2), step(context=8192), step(shape=KIMI_LINEAR))
    new = step(gpu_us=800.0)
    assert merged((step(), failed_since, *kept), (new,)) == (*kept, new)


def test_another_models_measurements_do_not_count():
    shape = dataclasses.replace(K3, kda_heads=48)
    assert plan_kernels(shape, H200, measured=(step(),))["kda_decode"] is XLA


def test_explicit_requests_win():
    plan = plan_kernels(K3, H200, {"kda_decode": "xla", "mla_decode": "gpu"}, measured=(step(),))
    assert (plan["kda_decode"], plan["mla_decode"]) == (XLA, GPU)
    assert plan_kernels(K3, CPU, {"kda_decode": "interpret"})["kda_decode"] is INTERPRET


@pytest.mark.parametrize(
    ("shape", "device", "overrides", "message"),
    [
        (K3_NANO, H200, {"mla_decode": "gpu"}, "mla_decode cannot run as gpu: latents of 64"),
        (K3, CPU, {"kda_decode": "gpu"}, "kda_decode cannot run as gpu: kernels need"),
        (K3, CPU, {"kda": "xla"}, "no op 'kda'"),
        (K3, CPU, {"kda_decode": "fast"}, "'fast' is not a valid Implementation"),
    ],
)
def test_what_was_asked_for_but_cannot_be_raises(shape, device, overrides, message):
    with pytest.raises(ValueError, match=message):
        plan_kernels(shape, device, overrides)


def test_a_plan_prints_a_row_with_a_reason_for_every_op():
    plan = plan_kernels(K3, H200, measured=(step(),))
    lines = str(plan).splitlines()
    assert lines[0] == "kernels on NVIDIA H200"
    for line, choice in zip(lines[2:], plan.choices, strict=True):
        assert line.split(maxsplit=2) == [choice.op, choice.implementation.value, choice.reason]


def test_the_plan_in_use_is_seen_while_tracing_and_is_part_of_the_cache_key():
    seen = []

    @jax.jit
    def function(x):
        seen.append(chosen("kda_decode"))
        return x

    plan = plan_kernels(K3, CPU, {"kda_decode": "interpret"})
    for active in (None, plan, plan, None):
        with use_plan(active):
            function(1.0)
    assert seen == [XLA, INTERPRET]


def test_programs_are_traced_for_the_device_of_the_plan_in_use():
    assert device_platform() == jax.default_backend()
    with use_plan(plan_kernels(K3, H200, measured=())):
        assert device_platform() == "gpu"
    with use_plan(plan_kernels(K3, CPU)):
        assert device_platform() == "cpu"


def test_measurements_survive_their_file(tmp_path):
    steps = (step(), step(batch=7, op="mla_decode"))
    path = write_measured("NVIDIA H200", steps, {"jax": "0"}, tmp_path)
    assert measured_steps("NVIDIA H200", tmp_path) == steps
    assert measured_steps("NVIDIA H100", tmp_path) == ()
    path.write_text('{"steps": [{"op": 1}]}')
    with pytest.raises(ValueError, match=r"nvidia-h200\.json does not hold"):
        measured_steps("NVIDIA H200", tmp_path)
