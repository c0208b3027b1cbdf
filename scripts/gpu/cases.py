"""Every kernel as a function of arrays, at a model's shapes and a workload, beside its XLA form."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.implementation import (
    Device,
    Implementation,
    kernel_supports,
    plan_kernels,
    use_plan,
)
from pallas_kernels.kda import l2_norm
from pallas_kernels.kda.mixer_step import StepInputs, StepPools, StepWeights, kda_mixer_step
from pallas_kernels.kda.prefill import Exports, kda_prefill
from pallas_kernels.kda.verify import MAX_TOKENS, Trace, kda_replay, kda_verify
from pallas_kernels.mla.paged_decode import mla_paged_decode
from pallas_kernels.mla.paged_prefill import mla_paged_prefill
from pallas_kernels.moe import experts
from pallas_kernels.residual import residual_mix
from pallas_kernels.shapes import ModelShape

SPAN_TOKENS = 2048
"""Tokens that a prefill case has at most, over all its rows."""
CPU = Device("cpu", "cpu")
HOPPER = Device("gpu", "Hopper", "9.0")


class Maker(Protocol):
    """Makes a case's arguments: their shapes alone, or random values."""

    def normal(self, dtype: Any, *shape: int, scale: float = 1.0) -> Any:
        """Normally distributed numbers."""
        ...

    def integers(self, dtype: Any, low: int, high: int, *shape: int) -> Any:
        """Numbers from `low` to `high` − 1."""
        ...

    def given(self, values: np.ndarray) -> Any:
        """These numbers."""
        ...


class Specs:
    """Shapes and dtypes instead of arrays, for compiling."""

    def normal(self, dtype: Any, *shape: int, scale: float = 1.0) -> Any:
        """See `Maker`."""
        del scale
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def integers(self, dtype: Any, low: int, high: int, *shape: int) -> Any:
        """See `Maker`."""
        del low, high
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def given(self, values: np.ndarray) -> Any:
        """See `Maker`."""
        return jax.ShapeDtypeStruct(values.shape, values.dtype)


class Values:
    """Random arrays, made on the device; one seed gives the same ones again."""

    def __init__(self, seed: int) -> None:
        self._key = jax.random.key(seed)

    def normal(self, dtype: Any, *shape: int, scale: float = 1.0) -> Any:
        """See `Maker`."""
        return (scale * jax.random.normal(self._next(), shape, jnp.float32)).astype(dtype)

    def integers(self, dtype: Any, low: int, high: int, *shape: int) -> Any:
        """See `Maker`."""
        if (low, high) == (0, 256):
            return jax.random.bits(self._next(), shape, dtype)
        return jax.random.randint(self._next(), shape, low, high, jnp.int32).astype(dtype)

    def given(self, values: np.ndarray) -> Any:
        """See `Maker`."""
        return jnp.asarray(values)

    def _next(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one workload; bytes and operations are the least that any implementation needs.

    `function(*arguments, implementation=…)` returns (outputs, state), the state being the argument
    at `donated`, updated in place, or None.
    """

    name: str
    op: str
    function: Callable[..., Any]
    arguments: Callable[[Maker], tuple[Any, ...]]
    donated: tuple[int, ...]
    least_bytes: int
    operations: int
    tolerance: float
    """Largest error against the XLA form, relative to the largest value."""

    def jitted(self, implementation: Implementation) -> Any:
        """The function under jit, its state donated."""
        bound = functools.partial(self.function, implementation=implementation)
        return jax.jit(bound, donate_argnums=self.donated)


def cases(shape: ModelShape, rows: int, context: int) -> list[Case]:
    """The cases of all kernels that take this model, at `rows` rows of `context` cached tokens."""
    supports = kernel_supports()
    return [make(shape, rows, context) for op, make in MAKERS.items() if supports[op](shape).ok]


def _kda_decode(shape: ModelShape, rows: int, context: int) -> Case:
    del context
    heads, key, taps = shape.kda_heads, shape.kda_head, shape.conv_taps
    channels, slots = 3 * heads * key, rows + 1
    dtype = jnp.dtype(shape.activation_dtype)

    def arguments(make: Maker) -> tuple[Any, ...]:
        inputs = StepInputs(
            make.normal(dtype, rows, channels),
            make.normal(dtype, rows, heads, key),
            make.normal(dtype, rows, heads),
            make.normal(dtype, rows, heads, key),
        )
        weights = StepWeights(
            make.normal("float32", channels, taps),
            make.normal("float32", heads, scale=0.5),
            make.normal("float32", heads, key),
            make.normal("float32", key),
        )
        pools = StepPools(
            make.normal("float32", slots, heads, key, key),
            make.normal(dtype, slots, taps - 1, channels),
        )
        slot = np.arange(rows, dtype=np.int32)
        return inputs, weights, pools, make.given(slot), make.given(slot + (slot == rows - 1))

    def run(*arguments: Any, implementation: Implementation) -> Any:
        return kda_mixer_step(*arguments, lower_bound=-5.0, eps=1e-5, implementation=implementation)

    state = rows * heads * key * key * 4
    vectors = rows * (3 * heads * key + (2 * taps - 1) * channels) * dtype.itemsize
    return Case(
        name=f"kda_decode {rows} rows",
        op="kda_decode",
        function=run,
        arguments=arguments,
        donated=(2,),
        least_bytes=2 * state + vectors + channels * taps * 4,
        operations=rows * heads * key * key * 7,
        tolerance=2e-2,
    )


SPAN_TOKENS = 2048
"""Tokens of all prefilled rows together, but for whole chunks."""


def _kda_prefill(shape: ModelShape, rows: int, context: int) -> Case:
    heads, key, dtype = shape.kda_heads, shape.kda_head, jnp.dtype(shape.activation_dtype)
    tokens = min(context, max(64, SPAN_TOKENS // rows))
    slot = np.arange(rows, dtype=np.int32)

    def arguments(make: Maker) -> tuple[Any, ...]:
        return (
            _kda_tokens(make, dtype, rows, tokens, heads, key),
            make.given(np.full(rows, tokens, np.int32)),
            make.normal("float32", 3 * rows, heads, key, key),
            make.given(slot),
            make.given(slot + rows),
            Exports(make.given(np.full(rows, tokens // 2, np.int32)), make.given(slot + 2 * rows)),
        )

    def run(inputs: Any, *rest: Any, implementation: Implementation) -> Any:
        *slots, exports = rest
        return kda_prefill(
            *_kda_prepared(inputs), *slots, exports=exports, log_decay_bound=-5.0,
            implementation=implementation,
        )  # fmt: skip

    states = 3 * rows * heads * key * key * 4
    vectors = rows * tokens * heads * key * (4 * dtype.itemsize + 4)
    return Case(
        name=f"kda_prefill {rows} rows of {tokens} tokens",
        op="kda_prefill",
        function=run,
        arguments=arguments,
        donated=(2,),
        least_bytes=states + vectors,
        # Per token and head: three products with the state, four of a chunk's width.
        operations=2 * rows * tokens * heads * key * (3 * key + 4 * 64),
        tolerance=3e-2,
    )


def _kda_verify(shape: ModelShape, rows: int, context: int) -> Case:
    del context
    heads, key, dtype = shape.kda_heads, shape.kda_head, jnp.dtype(shape.activation_dtype)
    slot = np.arange(rows, dtype=np.int32)

    def arguments(make: Maker) -> tuple[Any, ...]:
        return (
            _kda_tokens(make, dtype, rows, MAX_TOKENS, heads, key),
            make.given(np.full(rows, MAX_TOKENS, np.int32)),
            make.normal("float32", rows, heads, key, key),
            make.given(slot),
        )

    def run(inputs: Any, *rest: Any, implementation: Implementation) -> Any:
        return kda_verify(*_kda_prepared(inputs), *rest, implementation=implementation), None

    vectors = rows * MAX_TOKENS * heads * key
    return Case(
        name=f"kda_verify {rows} rows of {MAX_TOKENS} tokens",
        op="kda_verify",
        function=run,
        arguments=arguments,
        donated=(),
        least_bytes=rows * heads * key * key * 4 + vectors * (4 * dtype.itemsize + 16),
        operations=7 * vectors * key,
        tolerance=1e-4,
    )


def _kda_replay(shape: ModelShape, rows: int, context: int) -> Case:
    del context
    heads, key = shape.kda_heads, shape.kda_head
    by_token = (rows, MAX_TOKENS, heads, key)
    slot = np.arange(rows, dtype=np.int32)

    def arguments(make: Maker) -> tuple[Any, ...]:
        trace = Trace(*(make.normal("float32", *by_token, scale=key**-0.5) for _ in range(3)))
        return (
            trace,
            make.given(np.full(rows, MAX_TOKENS, np.int32)),
            make.normal("float32", 2 * rows, heads, key, key),
            make.given(slot),
            make.given(slot + rows),
        )

    def run(trace: Any, *rest: Any, implementation: Implementation) -> Any:
        trace = trace._replace(log_decay=-jnp.abs(trace.log_decay))
        return None, kda_replay(trace, *rest, implementation=implementation)

    vectors = rows * MAX_TOKENS * heads * key
    return Case(
        name=f"kda_replay {rows} rows of {MAX_TOKENS} tokens",
        op="kda_replay",
        function=run,
        arguments=arguments,
        donated=(2,),
        least_bytes=2 * rows * heads * key * key * 4 + 3 * vectors * 4,
        operations=3 * vectors * key,
        tolerance=1e-4,
    )


def _kda_tokens(make: Maker, dtype: Any, rows: int, tokens: int, heads: int, key: int) -> Any:
    """Queries, keys, values, decay and write strength as the convolution and projections give."""
    by_key = (rows, tokens, heads, key)
    return (*(make.normal(dtype, *by_key) for _ in range(4)), make.normal(dtype, *by_key[:3]))


def _kda_prepared(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    q, k, v, decay, beta = inputs
    log_decay = -5.0 * jax.nn.sigmoid(decay.astype(jnp.float32))
    strength = jax.nn.sigmoid(beta.astype(jnp.float32))
    return l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k), v, log_decay, strength


def _mla_decode(shape: ModelShape, rows: int, context: int) -> Case:
    return _mla(shape, rows, context, 1, "mla_decode", mla_paged_decode)


def _mla_prefill(shape: ModelShape, rows: int, context: int) -> Case:
    tokens = max(1, min(context, SPAN_TOKENS // rows))
    return _mla(shape, rows, context, tokens, "mla_prefill", mla_paged_prefill)


def _mla(
    shape: ModelShape, rows: int, context: int, tokens: int, op: str, attend: Callable[..., Any]
) -> Case:
    """The last `tokens` tokens of `context`, in scattered pages."""
    heads, latent, page = shape.mla_heads, shape.latent, shape.page_size
    width, query = latent + shape.shared_key, shape.head_key + shape.shared_key
    entries = -(-context // page)
    dtype = jnp.dtype(shape.activation_dtype)
    out = shape.head_key + shape.head_value

    def arguments(make: Maker) -> tuple[Any, ...]:
        table = np.random.default_rng(0).permutation(rows * entries).reshape(rows, entries)
        return (
            make.normal(dtype, rows, tokens, heads, query),
            make.normal(dtype, rows * entries, page, width),
            make.normal(dtype, heads, out, latent, scale=latent**-0.5),
            make.given(table.astype(np.int32)),
            make.given(np.full(rows, context - tokens, np.int32)),
            make.given(np.full(rows, tokens, np.int32)),
        )

    def run(*arguments: Any, implementation: Implementation) -> Any:
        return attend(*arguments, implementation=implementation), None

    pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    absorbed = pairs * (width + latent) + tokens * latent * out
    expanded = pairs * (query + shape.head_value) + context * latent * out
    vectors = rows * tokens * heads * (query + shape.head_value)
    return Case(
        name=f"{op} {rows} x {tokens} tokens, context {context}",
        op=op,
        function=run,
        arguments=arguments,
        donated=(),
        least_bytes=(rows * context * width + heads * latent * out + vectors) * dtype.itemsize,
        operations=2 * rows * heads * min(absorbed, expanded),
        tolerance=2e-2,
    )


def _experts(shape: ModelShape, rows: int, context: int) -> Case:
    del context
    count, choices, dtype = shape.experts, shape.choices, jnp.dtype(shape.activation_dtype)
    inner, width = shape.expert_in, shape.expert_width

    def arguments(make: Maker) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        chosen = np.stack([rng.permutation(count)[:choices] for _ in range(rows)])
        return (
            make.normal(dtype, rows, inner),
            make.given(chosen.astype(np.int32)),
            make.given(np.full((rows, choices), 1 / choices, np.float32)),
            _mxfp4(make, count, 2 * width, inner),
            _mxfp4(make, count, inner, width),
        )

    def run(*arguments: Any, implementation: Implementation) -> Any:
        plan = None  # XLA for whatever JAX runs on
        if implementation is not Implementation.XLA:
            device = HOPPER if implementation is Implementation.GPU else CPU
            plan = plan_kernels(shape, device, {"experts": implementation}, measured=())
        with use_plan(plan):
            x, indices, weights, gate_up, down = arguments
            return experts(x, indices, weights, gate_up, down, _situ), None

    used = min(count, rows * choices)
    weights = 3 * inner * width
    return Case(
        name=f"experts {rows} rows, {choices} of {count}",
        op="experts",
        function=run,
        arguments=arguments,
        donated=(),
        least_bytes=used * weights * 17 // 32 + rows * inner * (dtype.itemsize + 4),
        operations=2 * rows * choices * weights,
        tolerance=2e-2,
    )


BANK = 8
"""Earlier sums that the last layers of K3 mix: the most."""


def _residual_mix(shape: ModelShape, rows: int, context: int) -> Case:
    del context
    width, dtype = shape.hidden, jnp.dtype(shape.activation_dtype)

    def arguments(make: Maker) -> tuple[Any, ...]:
        return (
            [make.normal(dtype, rows, width) for _ in range(BANK)],
            make.normal(dtype, rows, width),
            make.normal(dtype, rows, width),
            (make.normal(dtype, width), make.normal(dtype, width, scale=width**-0.5)),
            make.normal(dtype, width),
        )

    def run(*arguments: Any, implementation: Implementation) -> Any:
        bank, x, y, mix, weight = arguments
        return residual_mix(bank, x, y, mix, weight, 1e-5, implementation=implementation), None

    return Case(
        name=f"residual_mix {rows} rows, {BANK + 1} sums",
        op="residual_mix",
        function=run,
        arguments=arguments,
        donated=(),
        least_bytes=(rows * (BANK + 4) + 3) * width * dtype.itemsize,
        operations=rows * (BANK + 1) * width * 8,
        tolerance=4e-2,
    )


def _mxfp4(make: Maker, count: int, outputs: int, inputs: int) -> tuple[Any, Any]:
    """Random codes; scales that make weights of about 1/√inputs."""
    middle = 127 - round(math.log2(inputs) / 2) - 1
    return (
        make.integers("uint8", 0, 256, count, outputs, inputs // 2),
        make.integers("uint8", middle - 1, middle + 2, count, outputs, inputs // 32),
    )


def _situ(gate: jax.Array, up: jax.Array) -> jax.Array:
    """K3's activation."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    wide = 25.0 * jnp.tanh(u / 25.0)
    return (4.0 * jnp.tanh(g / 4.0) * jax.nn.sigmoid(g) * wide).astype(gate.dtype)


MAKERS: dict[str, Callable[[ModelShape, int, int], Case]] = {
    "kda_decode": _kda_decode,
    "kda_prefill": _kda_prefill,
    "kda_verify": _kda_verify,
    "kda_replay": _kda_replay,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
    "experts": _experts,
    "residual_mix": _residual_mix,
}
