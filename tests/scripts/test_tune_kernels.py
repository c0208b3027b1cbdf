"""The tuner measures the engine's steps, and what it writes is what a plan then says."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.engine.kernel_plan import model_shape
from k3jax.engine.step import StepOutput
from k3jax.engine.verify import jitted_verify_step
from k3jax.model import backbone
from k3jax.model.params import init
from k3jax.weights import save_native
from pallas_kernels.implementation import Device, Implementation, plan_kernels
from pallas_kernels.measured import Measured, measured_steps, write_measured
from pallas_kernels.shapes import K3, SMALL, ModelShape
from scripts import tune_kernels
from scripts.gpu.model_slice import (
    StepProgram,
    new_state,
    random_weights,
    small_config,
    step_inputs,
    verify_inputs,
    weights_spec,
)
from scripts.gpu.selection import Subject, select
from scripts.gpu.timed_steps import STEP_OPS, Model, Step, StepTrials, Timing, disagreement
from tests.helpers import tiny_config

HOPPER = Device("gpu", "cpu", "9.0")


def test_what_is_measured_of_weights_is_what_a_plan_of_theirs_then_finds(tmp_path, capsys):
    config = replace(
        tiny_config(),
        num_layers=2,
        kda_layers=(0,),
        kda_num_heads=1,
        kda_head_dim=64,
        v_head_dim=192,
    )
    params = init(config, jax.random.key(0), jnp.bfloat16)
    save_native(params, config, tmp_path / "model")
    other = Measured("kda_decode", "decode", K3, 1, 4096, 1000.0, 900.0)
    write_measured("cpu", (other,), {}, tmp_path)
    sizes = "--batch 2 --context 40 --span 9 --page-size 16 --rounds 1 --calls 1".split()
    arguments = ["--interpret", str(tmp_path / "model"), "--json", "--out", str(tmp_path), *sizes]
    arguments += ["--steps", "decode"]
    assert tune_kernels.main(arguments) == 0
    [workload] = json.loads(capsys.readouterr().out)["workloads"]
    found = measured_steps("cpu", tmp_path)
    assert found[0] == other
    assert [(m.op, m.step) for m in found[1:]] == [("kda_decode", "decode")]
    assert [m.gpu_us for m in found[1:]] == [row["gpu_us"] for row in workload["steps"]]
    shape = model_shape(params, config, page_size=16)
    plan = plan_kernels(shape, HOPPER, batch=2, context=40, measured=found)
    chosen = [c.op for c in plan.choices if c.implementation is Implementation.GPU]
    assert set(chosen) == set(workload["chosen"])
    assert "with the kernel" in next(c.reason for c in plan.choices if c.op == "kda_decode")


@pytest.mark.slow
def test_every_op_is_measured_in_every_step_that_has_it(tmp_path):
    assert tune_kernels.main(["--interpret", "--out", str(tmp_path)]) == 0
    measured = {(m.op, m.step) for m in measured_steps("cpu", tmp_path)}
    assert measured == {(op, kind) for kind, ops in STEP_OPS.items() for op in ops}


def test_a_kernel_that_was_chosen_is_planned(tmp_path):
    def times_us(kind, choices):
        return [100.0 - 10 * len(ops) + 50 * ("mla_decode" in ops) for ops in choices]

    selection = select(Subject(SMALL, 2, 40, ""), STEP_OPS, times_us)
    write_measured("cpu", selection.measured, {}, tmp_path)
    plan = plan_kernels(
        SMALL, HOPPER, batch=2, context=40, measured=measured_steps("cpu", tmp_path)
    )
    chosen = {c.op for c in plan.choices if c.implementation is Implementation.GPU}
    assert chosen == set(selection.ops)
    assert chosen == {op for ops in STEP_OPS.values() for op in ops} - {"mla_decode"}


@pytest.mark.parametrize("kind", STEP_OPS)
def test_a_kind_of_step_runs_the_ops_that_are_listed_for_it_and_no_others(kind):
    config, rows, tokens = small_config(), 1, {"decode": 1, "verify": 4, "prefill": 16}[kind]
    model = Model(
        weights_spec(config), config, jnp.dtype("bfloat16"), 16,
        Implementation.INTERPRET, Device("cpu", "cpu"),
    )  # fmt: skip
    given = verify_inputs if kind == "verify" else step_inputs
    inputs = given(config, rows, 40 - tokens, tokens, 16)
    state = jax.eval_shape(lambda: new_state(config, inputs, 16))

    def program(ops):
        return str(StepProgram(config, model.plan(ops)).trace(model.params, inputs, state).jaxpr)

    without = program(())
    every = [choice.op for choice in model.plan(()).choices]
    assert {op for op in every if program((op,)) != without} == set(STEP_OPS[kind])


def test_the_answer_of_a_verification_shows_every_token_that_it_replays(monkeypatch):
    config = small_config()
    model = Model(
        random_weights(config), config, jnp.dtype("float32"), 16,
        Implementation.INTERPRET, Device("cpu", "cpu"),
    )  # fmt: skip
    want = Step("verify", model, 2, 40, 9).answer(())
    kernel = Step("verify", model, 2, 40, 9).answer(("kda_replay",))
    assert disagreement(kernel, want) < 1e-3

    replay = backbone.replay
    forget = jitted_verify_step.clear_cache  # pyright: ignore[reportAttributeAccessIssue]
    forget()
    monkeypatch.setattr(backbone, "replay", lambda t, n, *rest: replay(t, n - 1, *rest))
    short = Step("verify", model, 2, 40, 9).answer(())
    forget()
    assert disagreement(short, want) > 1e-3


def answer(tokens, ids, logprobs):
    return StepOutput(
        np.array(tokens), np.zeros(len(tokens)), np.array(ids), np.array(logprobs, np.float32)
    )


WANT = answer([3, 5], [[3, 4], [5, 6]], [[-0.5, -0.75], [-1.0, -2.0]])


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (WANT, 0.0),
        (answer([3, 5], [[3, 4], [6, 5]], [[-0.5, -0.75], [-2.5, -1.0]]), 0.5),
        (answer([4, 5], [[4, 3], [5, 6]], [[-0.5, -0.5], [-1.0, -2.0]]), 0.25),
        (answer([4, 5], [[3, 4], [5, 6]], [[-0.5, -0.75], [-1.0, -2.0]]), 0.25),
        (answer([9, 5], [[9, 3], [5, 6]], [[-0.5, -0.5], [-1.0, -2.0]]), np.inf),
        (answer([3, 5], [[3, 4], [5, 6]], [[-0.5, -0.75], [-1.0, np.nan]]), np.inf),
    ],
)
def test_answers_differ_by_log_probabilities_and_by_tokens(got, difference):
    assert disagreement(got, WANT) == difference


class FakeStep:
    """Wrong with the kernel "wrong", and cannot be compiled with "broken"."""

    name = "fake"

    def answer(self, ops):
        if "broken" in ops:
            raise RuntimeError("no such layout")
        return answer([9, 5], [[9, 4], [5, 6]], [[-0.5] * 2] * 2) if "wrong" in ops else WANT

    def times_us(self, choices, timing):
        return [10.0 - len(ops) for ops in choices]


def test_steps_that_fail_or_answer_otherwise_are_reported_and_not_timed():
    said = []
    trials = StepTrials({"decode": FakeStep()}, Timing(1, 1), said.append)
    times = trials.times_us("decode", [(), ("wrong",), ("broken",), ("fine",)])
    assert times == [10.0, None, None, 9.0]
    assert "differs from XLA by inf" in trials.failures["decode", ("wrong",)]
    assert "no such layout" in trials.failures["decode", ("broken",)]
    assert len(said) == 4
    trials.right("decode", ("wrong",))
    assert len(said) == 4


def test_a_span_that_leaves_no_context_is_refused():
    with pytest.raises(ValueError, match="context = 40, expected more than the 64"):
        Step("prefill", None, 1, 40, 64)  # pyright: ignore[reportArgumentType]


def test_the_small_model_has_the_small_shapes():
    assert ModelShape.of(small_config(), "bfloat16", SMALL.page_size) == SMALL


def test_without_a_gpu_the_tuner_refuses(capsys):
    assert tune_kernels.main(["k3-nano"]) == 2
    assert "compute capability 9.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either WEIGHTS or --shape"),
        (["k3-nano", "--shape", "k3"], "either WEIGHTS or --shape"),
        (["--interpret"], "--interpret needs --out"),
        (["--shape", "k3", "--dtype", "float32"], "weights of bfloat16"),
        (["k3-nano", "--batch", "1,0"], "0, expected at least 1"),
        (["k3-nano", "--steps", "decode,draft"], "'draft', expected decode, prefill, verify"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        tune_kernels.main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
