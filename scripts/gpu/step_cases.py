"""Whole steps of a model slice under a plan of all its kernels, as programs to compile."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from k3jax import config as configs
from k3jax.config import K3Config
from pallas_kernels.implementation import Device, Implementation, kernel_supports, plan_kernels
from pallas_kernels.shapes import ModelShape
from scripts.gpu.model_slice import (
    StepProgram,
    new_state,
    slice_config,
    step_inputs,
    weights_spec,
)

HOPPER = Device("gpu", "Hopper", "9.0")
LAYERS = 3
EXPERTS = 32
PREFILL_CONTEXT = 2048
"""Cached tokens that precede the prefill span."""
MODELS = {"k3": configs.k3, "kimi-linear": configs.kimi_linear_48b}

KNOWN_DECODE_MOVES = 2
"""Of activations, at several rows: experts' inner values turned to rows of planes between their two
products, and what attention has mixed rounded to bfloat16. None at one row."""
KNOWN_PREFILL_MOVES = 1
"""The experts' inner values, as in decoding."""


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
    """Decode steps of `rows` rows, and one row's prefill of `span` tokens (0: none).

    Only released models have steps: the named shapes that are no model give none.
    """
    if model not in MODELS:
        return []
    config = small_slice(MODELS[model]())
    steps = [_step(config, count, context, 1) for count in rows]
    return steps + ([_step(config, 1, PREFILL_CONTEXT, span)] if span else [])


def small_slice(full: K3Config) -> K3Config:
    """Two KDA layers and an MLA layer, the last with routed experts: each compiles for seconds."""
    config = slice_config(LAYERS, EXPERTS, full=full)
    return replace(config, kda_layers=(0, 1), first_dense_layers=LAYERS - 1)


def _step(config: K3Config, rows: int, context: int, tokens: int) -> StepCase:
    page = 64
    shape = ModelShape.of(config, "bfloat16", page)
    fitting = [op for op, supports in kernel_supports().items() if supports(shape).ok]
    plan = plan_kernels(shape, HOPPER, dict.fromkeys(fitting, Implementation.GPU), measured=())
    inputs = step_inputs(config, rows, context, tokens, page)
    state = jax.eval_shape(lambda: new_state(config, inputs, page))
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), inputs)
    elsewhere = ("_verify", "_replay", "_prefill" if tokens == 1 else "_decode")
    kind = "decode" if tokens == 1 else "prefill"
    length = "" if tokens == 1 else f" of {tokens} tokens"
    known = KNOWN_PREFILL_MOVES if tokens > 1 else KNOWN_DECODE_MOVES if rows > 1 else 0
    return StepCase(
        name=f"{kind} step, {rows} row{'s' if rows > 1 else ''}{length} after {context}",
        program=StepProgram(config, plan),
        arguments=(weights_spec(config), specs, state),
        expected_kernels=sum(not op.endswith(elsewhere) for op in fitting),
        known_moves=known,
    )
