"""Routed experts for few rows: every (row, choice) pair reads its expert's weights in place (CPU).

A slice or gather in front of a dot or a plain sum is copied first, because YNNPACK takes the
product and leaves the slice outside. A reduction with several results stays with XLA's own code,
which fuses the gather into the loop and lifts the expert's number out of the inner one, so weights
are read once, from where they lie. `SUMS` outputs side by side share each load of x and reach the
read bandwidth of two cores; of rows as short as an expert's, four are faster than eight. At 16 XLA
stops fusing and copies. XLA gives each core a range of the outer axis. With blocks of outputs there
in place of pairs, cores get equal shares however pairs fall to experts, and pairs of one expert
find its block in their core's own cache.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.linear.mxfp4_xla import mxfp4_product
from pallas_kernels.moe.reference import Activation, Weight
from pallas_kernels.moe.routing import Routing

CHUNK = 64
"""Pairs per loop step, about; enough work to hide that cores start and stop together."""
BLOCKS = 4
"""Blocks of a float weight's outputs, each computed for all pairs of a chunk before the next. An
int8 expert fits a core's cache whole; with more blocks its products were slower."""
SUMS = 4
"""Outputs of a float product that are summed side by side."""


def experts_by_pair(
    x: Float[Array, "row latent"],
    routing: Routing,
    gate_up: Weight,
    down: Weight,
    activation: Activation,
) -> Float[Array, "row latent"]:
    """Pairs in order of their experts, a chunk at a time; those of padding rows are left out."""
    choices = routing.choices
    total = routing.order.shape[0]
    chunk = min(total, choices * max(1, CHUNK // choices))

    def outputs(rows: jax.Array, chosen: jax.Array) -> jax.Array:
        gate, up = jnp.split(_pair_product(gate_up, chosen, x[rows]), 2, axis=-1)
        return _pair_product(down, chosen, activation(gate, up)).astype(jnp.float32)

    def add_chunk(step: jax.Array, sorted_out: jax.Array) -> jax.Array:
        y = outputs(*routing.slice(step * chunk, chunk))
        return jax.lax.dynamic_update_slice_in_dim(sorted_out, y, step * chunk, 0)

    if total == chunk:
        return routing.combine(outputs(routing.order // choices, routing.experts))
    out = jnp.zeros((routing.padded_length(chunk), x.shape[1]), jnp.float32)
    return routing.combine(jax.lax.fori_loop(0, -(-routing.pairs // chunk), add_chunk, out))


def _pair_product(
    weight: Weight, chosen: Int[Array, "pair"], x: Float[Array, "pair in"]
) -> Float[Array, "pair out"]:
    """`weight[chosen[p]] x[p]` for every pair p, summed in float32, in the dtype of x."""
    if not isinstance(weight, tuple):
        return _float_product(weight, chosen, x, BLOCKS).astype(x.dtype)
    values, scales = weight
    if values.dtype == jnp.uint8:
        return mxfp4_product(_take(values, chosen), _take(scales, chosen), x).astype(x.dtype)
    return (_float_product(values, chosen, x, 1) * _take(scales, chosen)).astype(x.dtype)


def _float_product(
    weight: Float[Array, "expert out in"] | Int8[Array, "expert out in"],
    chosen: Int[Array, "pair"],
    x: Float[Array, "pair in"],
    blocks: int,
) -> Float[Array, "pair out"]:
    experts, outs, width = weight.shape
    runs = math.gcd(outs, SUMS)
    blocks = math.gcd(outs // runs, blocks)  # of what is left: a lone sum would copy the weights
    grouped = weight.reshape(experts, blocks, runs, -1, width)
    # Gathered in the order of the loop, blocks before pairs.
    taken = _take(grouped, chosen[None], jnp.arange(blocks)[:, None]).astype(jnp.float32)
    # Behind a barrier, or what makes x is computed again for every output.
    wide = jax.lax.optimization_barrier(x.astype(jnp.float32))[:, None]
    products = tuple(taken[:, :, i] * wide for i in range(runs))
    zeros = (jnp.float32(0),) * runs
    sums = jax.lax.reduce(products, zeros, lambda a, b: tuple(map(jax.lax.add, a, b)), (3,))
    return jnp.stack(sums, axis=2).swapaxes(0, 1).reshape(len(chosen), outs)


def _take(leaf: jax.Array, *indices: jax.Array) -> jax.Array:
    return leaf.at[indices].get(mode="promise_in_bounds")
