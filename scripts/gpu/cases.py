"""Every kernel as a function of arrays, at a model's shapes and a workload, beside its XLA form."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.implementation import Implementation, kernel_supports
from pallas_kernels.kda.mixer_step import StepInputs, StepPools, StepWeights, kda_mixer_step
from pallas_kernels.mla.paged_decode import mla_paged_decode
from pallas_kernels.shapes import ModelShape


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
        return jax.random.randint(self._next(), shape, low, high, dtype)

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


def _mla_decode(shape: ModelShape, rows: int, context: int) -> Case:
    heads, latent, page = shape.mla_heads, shape.latent, shape.page_size
    width = latent + shape.shared_key
    entries = -(-context // page)
    dtype = jnp.dtype(shape.activation_dtype)
    out = shape.head_key + shape.head_value

    def arguments(make: Maker) -> tuple[Any, ...]:
        table = np.random.default_rng(0).permutation(rows * entries).reshape(rows, entries)
        return (
            make.normal(dtype, rows, 1, heads, shape.head_key + shape.shared_key),
            make.normal(dtype, rows * entries, page, width),
            make.normal(dtype, heads, out, latent, scale=latent**-0.5),
            make.given(table.astype(np.int32)),
            make.given(np.full(rows, context - 1, np.int32)),
            make.given(np.ones(rows, np.int32)),
        )

    def run(*arguments: Any, implementation: Implementation) -> Any:
        return mla_paged_decode(*arguments, implementation=implementation), None

    return Case(
        name=f"mla_decode {rows} rows of {context} tokens",
        op="mla_decode",
        function=run,
        arguments=arguments,
        donated=(),
        least_bytes=(rows * context * width + heads * latent * out) * dtype.itemsize,
        operations=2 * rows * heads * (context * (width + latent) + latent * out),
        tolerance=2e-2,
    )


MAKERS: dict[str, Callable[[ModelShape, int, int], Case]] = {
    "kda_decode": _kda_decode,
    "mla_decode": _mla_decode,
}
