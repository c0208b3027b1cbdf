"""A K3 of a few layers and some of its experts, and the engine's step at a workload."""

import math
from collections.abc import Callable
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
from k3jax.engine.verify import VerifyInputs, jitted_verify_step
from k3jax.model import params
from k3jax.state import DecodeState, Spans
from pallas_kernels.implementation import KernelPlan, use_plan
from pallas_kernels.shapes import SMALL


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
        attn_res_block_size=None if full.attn_res_block_size is None else 2,
        vision=None,
    )


def small_config() -> K3Config:
    """A KDA and an MLA layer with experts, of `shapes.SMALL`: interpreted kernels take seconds."""
    return replace(
        slice_config(2, SMALL.experts),
        vocab_size=128,
        hidden_size=SMALL.hidden,
        intermediate_size=128,
        kda_layers=(0,),
        kda_num_heads=SMALL.kda_heads,
        kda_head_dim=SMALL.kda_head,
        num_heads=SMALL.mla_heads,
        q_lora_rank=64,
        kv_lora_rank=SMALL.latent,
        qk_nope_head_dim=SMALL.head_key,
        v_head_dim=SMALL.head_value,
        num_experts_per_token=SMALL.choices,
        expert_latent_size=SMALL.expert_in,
        moe_intermediate_size=SMALL.expert_width,
        first_dense_layers=1,
        max_context=256,
    )


@dataclass(frozen=True)
class StepProgram:
    """The engine's own jitted step under a plan; run or traced with (weights, inputs, state).

    Inputs that hold drafts get the step that verifies them. The state is donated. Each plain step
    finds log-probabilities if some row asks for them, as the engine's do.
    """

    config: K3Config
    plan: KernelPlan | None

    def run(self, weights: Any, inputs: StepInputs | VerifyInputs, state: StepState) -> Any:
        """The step's output, and the state after it."""
        with use_plan(self.plan):
            if isinstance(inputs, VerifyInputs):
                return jitted_verify_step(weights, self.config, inputs, state)
            return jitted_step(weights, self.config, inputs, state, logprobs=MAX_LOGPROBS)

    def trace(self, weights: Any, inputs: StepInputs | VerifyInputs, state: StepState) -> Any:
        """As `jax.jit(…).trace`."""
        with use_plan(self.plan):
            if isinstance(inputs, VerifyInputs):
                return jitted_verify_step.trace(weights, self.config, inputs, state)
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


def verify_inputs(
    config: K3Config, rows: int, context: int, tokens: int, page: int
) -> VerifyInputs:
    """Each row's last token and `tokens` − 1 drafts after `context` cached tokens, all allowed."""
    step = step_inputs(config, rows, context, tokens, page)
    words = -(-config.vocab_size // 32)
    return VerifyInputs(
        tokens=step.tokens,
        spans=step.spans,
        lanes=step.lanes,
        sampling=step.sampling,
        masks=np.full((rows, tokens, words), 0xFFFFFFFF, np.uint32),
        stop_ids=np.full((rows, 1), -1, np.int32),
    )


def new_state(
    config: K3Config, inputs: StepInputs | VerifyInputs, page: int, dtype: Any = jnp.bfloat16
) -> StepState:
    """Zeroed state with the slots and pages that the inputs name."""
    rows, entries = inputs.spans.page_table.shape
    decode = DecodeState.init(
        config, num_slots=rows, num_pages=rows * entries, page_size=page, dtype=dtype
    )
    return StepState(
        decode=decode,
        history=TokenHistory.init(rows, config.vocab_size),
        last_tokens=jnp.zeros(rows, jnp.int32),
    )


def random_state(
    config: K3Config, inputs: StepInputs | VerifyInputs, page: int, dtype: Any = jnp.bfloat16
) -> StepState:
    """`new_state` as if tokens had gone before: normally distributed matrices and latents."""
    spec = jax.eval_shape(lambda: new_state(config, inputs, page, dtype))

    def numbers(number: int, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return _normal(number, math.prod(leaf.shape)) if is_float else np.zeros(1, np.int32)

    return _by_leaf(numbers, spec)


def weights_spec(config: K3Config) -> Any:
    """Shapes and dtypes of the slice's weights: bfloat16 and packed experts."""
    return params.abstract(config, jnp.bfloat16)


def random_weights(config: K3Config) -> Any:
    """Weights for timing: each array repeats a million normal numbers, or random packed codes."""

    def numbers(number: int, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        size = math.prod(leaf.shape)
        if leaf.dtype == jnp.uint8:
            return _codes(number, size, is_scale=leaf.shape[-1] < 128)
        scale = leaf.shape[-1] ** -0.5 if len(leaf.shape) > 1 else 1.0
        return np.float32(scale) * _normal(number, size)

    return _by_leaf(numbers, weights_spec(config))


def held_bytes(config: K3Config, rows: int, context: int, page: int) -> int:
    """Bytes of weights and state of a slice at a workload."""
    inputs = step_inputs(config, rows, context - 1, 1, page)
    state = jax.eval_shape(lambda: new_state(config, inputs, page))
    return params.nbytes((weights_spec(config), state))


PERIOD = (1 << 20) + 7
"""Numbers after which an array repeats: odd, so that its rows do not."""


def spread(numbers: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of that shape that takes the numbers in turn, over and over."""
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index += position * jnp.uint32(stride % (1 << 32))
        stride *= shape[axis]
    return numbers.astype(dtype)[index % len(numbers)]


def _by_leaf(numbers: Callable[[int, jax.ShapeDtypeStruct], np.ndarray], spec: Any) -> Any:
    """Arrays of these shapes, each of its `numbers` over and over."""
    leaves, treedef = jax.tree.flatten(spec)

    @jax.jit
    def make(given: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(given, leaves, strict=True)
        return [spread(numbers, leaf.shape, leaf.dtype) for numbers, leaf in pairs]

    made = make([numbers(number, leaf) for number, leaf in enumerate(leaves)])
    return jax.tree.unflatten(treedef, made)


def _normal(number: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    return rng.standard_normal(max(1, min(PERIOD, size)), np.float32)


def _codes(number: int, size: int, *, is_scale: bool) -> np.ndarray:
    """Bytes of two MXFP4 codes, or scales that with them make weights of about 1/64."""
    rng = np.random.default_rng(number)
    low, high = (119, 122) if is_scale else (0, 256)
    return rng.integers(low, high, min(PERIOD, size), np.uint8)
