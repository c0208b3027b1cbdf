"""A K3 of a few layers and some of its experts, and the engine's step at a workload."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config, k3
from k3jax.engine.batch import Packer
from k3jax.engine.engine import MAX_LOGPROBS
from k3jax.engine.sampling import TokenHistory
from k3jax.engine.step import StepInputs, StepState, jitted_step
from k3jax.model import params
from k3jax.state import DecodeState, Spans
from pallas_kernels.implementation import KernelPlan, use_plan


def slice_config(layers: int, experts: int, *, full: K3Config | None = None) -> K3Config:
    """The last `layers` layers in K3's pattern (three KDA, one MLA), all sparse but for size."""
    full = k3() if full is None else full
    return replace(
        full,
        num_layers=layers,
        kda_layers=tuple(layer for layer in range(layers) if layer % 4 != 3),
        num_experts=experts,
        num_experts_per_token=min(full.num_experts_per_token, experts),
        first_dense_layers=0,
        attn_res_block_size=2,
        vision=None,
    )


@dataclass(frozen=True)
class StepProgram:
    """The engine's own jitted step under a plan; run or traced with (weights, inputs, state).

    The state is donated. Each step finds log-probabilities if some row asks for them, as the
    engine's do.
    """

    config: K3Config
    plan: KernelPlan | None

    def run(self, weights: Any, inputs: StepInputs, state: StepState) -> Any:
        """The step's output, and the state after it."""
        with use_plan(self.plan):
            return jitted_step(weights, self.config, inputs, state, logprobs=MAX_LOGPROBS)

    def trace(self, weights: Any, inputs: StepInputs, state: StepState) -> Any:
        """As `jax.jit(…).trace`."""
        with use_plan(self.plan):
            return jitted_step.trace(weights, self.config, inputs, state, logprobs=MAX_LOGPROBS)


def step_inputs(config: K3Config, rows: int, context: int, tokens: int, page: int) -> StepInputs:
    """Each row's next `tokens` tokens after `context` cached ones, packed as the engine does."""
    numbers = np.arange(rows, dtype=np.int32)
    entries = -(-(context + tokens) // page)
    packer = Packer(config, max_rows=rows, page_size=page, contexts=(entries * page,))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (rows, tokens))
    return packer.idle(rows, tokens, entries).replace(
        tokens=ids.astype(np.int32),
        spans=Spans(
            lengths=np.full(rows, tokens, np.int32),
            starts=np.full(rows, context, np.int32),
            read_slots=numbers,
            write_slots=numbers,
            page_table=np.arange(rows * entries, dtype=np.int32).reshape(rows, entries),
        ),
        lanes=numbers,
        emits=np.ones(rows, np.bool_),
    )


def new_state(config: K3Config, inputs: StepInputs, page: int) -> StepState:
    """Zeroed state with the slots and pages that the inputs name."""
    rows, entries = inputs.spans.page_table.shape
    decode = DecodeState.init(
        config, num_slots=rows, num_pages=rows * entries, page_size=page, dtype=jnp.bfloat16
    )
    return StepState(
        decode=decode,
        history=TokenHistory.init(rows, config.vocab_size),
        last_tokens=jnp.zeros(rows, jnp.int32),
    )


def weights_spec(config: K3Config) -> Any:
    """Shapes and dtypes of the slice's weights: bfloat16 and packed experts."""
    return params.abstract(config, jnp.bfloat16)


def random_weights(config: K3Config) -> Any:
    """Weights for timing: every array the same small pattern; packed codes cover all values."""

    def leaf(spec: jax.ShapeDtypeStruct) -> jax.Array:
        pattern = jnp.arange(1 << 16, dtype=jnp.uint32) * jnp.uint32(2654435761)
        size = int(np.prod(spec.shape))
        if spec.dtype == jnp.uint8:
            bits = (pattern >> 24).astype(jnp.uint8)
            # Scales (one per 16 bytes of codes) of about 1/√inputs.
            bits = jnp.where(spec.shape[-1] < 128, 120, bits) if len(spec.shape) > 2 else bits
            return jnp.resize(bits.astype(jnp.uint8), spec.shape)
        unit = pattern.astype(jnp.float32) / 2**32 - 0.5
        scale = spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 1.0
        return jnp.resize((unit * scale).astype(spec.dtype), spec.shape) if size else jnp.zeros(0)

    return jax.tree.map(leaf, weights_spec(config))
