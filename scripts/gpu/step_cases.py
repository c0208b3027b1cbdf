"""Whole steps of a model slice under a plan of all its kernels, as programs to compile."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from k3jax import config as configs
from k3jax.config import K3Config
from k3jax.engine.step import StepInputs
from k3jax.engine.verify import VerifyInputs
from pallas_kernels.implementation import (
    Device,
    Implementation,
    KernelPlan,
    kernel_supports,
    plan_kernels,
)
from pallas_kernels.shapes import ModelShape
from scripts.gpu.model_slice import (
    StepProgram,
    new_state,
    slice_config,
    step_inputs,
    verify_inputs,
    weights_spec,
)

HOPPER = Device("gpu", "Hopper", "9.0")
LAYERS = 3
EXPERTS = 32
PAGE = 64
PREFILL_CONTEXT = 2048
"""Cached tokens that precede the prefill span."""
MODELS = {"k3": configs.k3, "kimi-linear": configs.kimi_linear_48b}

KNOWN_DECODE_MOVES = 2
"""Of activations, at several rows: experts' inner values turned to rows of planes between their two
products, and what attention has mixed rounded to bfloat16. None at one row."""
KNOWN_PREFILL_MOVES = 1
"""The experts' inner values, as in decoding."""
KNOWN_VERIFY_MOVES = 2
"""The same two as in decoding; at one row, whose 8 tokens are 8 rows of experts, the first."""
ONE_ROW_TOKENS, ROWS_TOKENS = 8, 4
"""Tokens that are verified in each row: if there is one row, and if there are more."""


@dataclass(frozen=True)
class StepCase:
    """One step: its program, and the shapes of (weights, inputs, state)."""

    name: str
    program: StepProgram
    arguments: tuple[Any, Any, Any]
    expected_kernels: int
    """Different kernels that must be in it."""
    known_moves: int
    """Moves of more than 1 MiB (`program_text.large_moves`) that are known and counted."""


def step_cases(model: str, rows: tuple[int, ...], context: int, span: int) -> list[StepCase]:
    """Decode and verification steps of `rows` rows, and one row's prefill of `span` tokens.

    A span of 0 leaves the prefill out. Only released models have steps: the named shapes that are
    no model give none.
    """
    if model not in MODELS:
        return []
    config = small_slice(MODELS[model]())
    steps = [
        make(config, count, context) for count in rows for make in (_decode_step, _verify_step)
    ]
    return steps + ([_prefill_step(config, span)] if span else [])


def small_slice(full: K3Config) -> K3Config:
    """Two KDA layers and an MLA layer, the last with routed experts: each compiles for seconds."""
    config = slice_config(LAYERS, EXPERTS, full=full)
    return replace(config, kda_layers=(0, 1), first_dense_layers=LAYERS - 1)


def _decode_step(config: K3Config, rows: int, context: int) -> StepCase:
    plan, kernels = _plan(config, without=("kda_prefill", "mla_prefill", *_SPECULATIVE))
    return StepCase(
        name=f"decode step, {_counted(rows)} after {context}",
        program=StepProgram(config, plan),
        arguments=_arguments(config, step_inputs(config, rows, context, 1, PAGE)),
        expected_kernels=kernels,
        known_moves=KNOWN_DECODE_MOVES if rows > 1 else 0,
    )


def _prefill_step(config: K3Config, tokens: int) -> StepCase:
    plan, kernels = _plan(config, without=("kda_decode", "mla_decode", *_SPECULATIVE))
    return StepCase(
        name=f"prefill step, 1 row of {tokens} tokens after {PREFILL_CONTEXT}",
        program=StepProgram(config, plan),
        arguments=_arguments(config, step_inputs(config, 1, PREFILL_CONTEXT, tokens, PAGE)),
        expected_kernels=kernels,
        known_moves=KNOWN_PREFILL_MOVES,
    )


def _verify_step(config: K3Config, rows: int, context: int) -> StepCase:
    tokens = ONE_ROW_TOKENS if rows == 1 else ROWS_TOKENS
    plan, kernels = _plan(config, without=("kda_decode", "kda_prefill", "mla_prefill"))
    return StepCase(
        name=f"verify step, {_counted(rows)} of {tokens} tokens after {context}",
        program=StepProgram(config, plan),
        arguments=_arguments(config, verify_inputs(config, rows, context, tokens, PAGE)),
        expected_kernels=kernels,
        known_moves=KNOWN_VERIFY_MOVES if rows > 1 else 1,
    )


_SPECULATIVE = ("kda_verify", "kda_replay")


def _plan(config: K3Config, *, without: tuple[str, ...]) -> tuple[KernelPlan, int]:
    """All kernels that fit, and how many there are but for ops that the step does not have."""
    shape = ModelShape.of(config, "bfloat16", PAGE)
    fitting = [op for op, supports in kernel_supports().items() if supports(shape).ok]
    plan = plan_kernels(shape, HOPPER, dict.fromkeys(fitting, Implementation.GPU), measured=())
    return plan, len(set(fitting) - set(without))


def _arguments(config: K3Config, inputs: StepInputs | VerifyInputs) -> tuple[Any, Any, Any]:
    """Shapes of weights, inputs and state."""
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), inputs)
    return weights_spec(config), specs, jax.eval_shape(lambda: new_state(config, inputs, PAGE))


def _counted(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"
