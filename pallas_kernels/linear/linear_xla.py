"""The float product in the form that XLA's CPU back end runs fastest for its number of rows.

XLA hands products to YNNPACK. `x wᵀ` as a dot makes the weight the packed operand, so every call
copies and transposes it: two to four times the cost of reading it. The sum of a broadcast product
becomes YNNPACK's dot with the weight as the streamed operand and only x packed; from `DOT_ROWS` on
packing pays. One row's dot is XLA's own matrix-vector code, which runs on one core and spends as
long on a row of 384 weights as on one of 768; sums of `SUMS` outputs side by side use all cores and
share each load of x. Measured by `scripts/experiment_cpu_products.py`.
"""

import math
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DOT_ROWS = 72
"""Rows from which packing the weight costs less than streaming it."""
SUMS = 8
"""Outputs that one row's product sums side by side."""


def linear_cpu(x: Float[Array, "row in"], w: Float[Array, "out in"]) -> Float[Array, "row out"]:
    """`x wᵀ` in float32 for float32 operands; differentiable."""
    rows = x.shape[0]
    if rows == 1 and math.gcd(w.shape[0], SUMS) > 1:
        return lone_row(x, w)
    if rows == 1 or rows >= DOT_ROWS:
        return _dot(x, w)
    padded = jnp.pad(x, ((0, padded_rows(rows) - rows), (0, 0)))
    return streamed(padded, w)[:rows]


@jax.custom_jvp
def lone_row(x: Float[Array, "1 in"], w: Float[Array, "out in"]) -> Float[Array, "1 out"]:
    """`x wᵀ` for one row in float32; a reduction with several results stays one loop of XLA's."""
    runs = math.gcd(w.shape[0], SUMS)
    x = jax.lax.optimization_barrier(x)  # or what makes x is computed again for every output
    grouped = w.reshape(runs, -1, w.shape[1])
    products = tuple(grouped[run] * x for run in range(runs))
    zeros = (jnp.float32(0),) * runs
    sums = jax.lax.reduce(products, zeros, lambda a, b: tuple(map(operator.add, a, b)), (1,))
    return jnp.concatenate(sums)[None]


@lone_row.defjvp
def _lone_row_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, w), (dx, dw) = primals, tangents
    return lone_row(x, w), _dot(dx, w) + _dot(x, dw)


def linear_cpu_bfloat16(
    x: Float[Array, "row in"], w: Float[Array, "out in"]
) -> Float[Array, "row out"]:
    """`x wᵀ` of bfloat16 operands with float32 sums, returned in float32."""
    if x.shape[0] > 1:
        return _dot(x, w)
    return streamed(x.astype(jnp.float32), w.astype(jnp.float32))


def streamed(
    x: Float[Array, "*batch row in"], w: Float[Array, "*batch out in"]
) -> Float[Array, "*batch row out"]:
    """The product as a sum over a broadcast one, which XLA rewrites to a dot that streams w.

    The barriers keep neighbouring sums and products out of the fusion: with them in it the
    rewrite does not happen and the product runs several times slower.
    """
    x = jax.lax.optimization_barrier(x)
    product = w[..., None, :, :] * x[..., :, None, :]
    return jax.lax.optimization_barrier(product.sum(-1))


def padded_rows(rows: int) -> int:
    """Rows to compute: the kernel works on 8 at a time and does a ragged end one by one."""
    ragged = rows % 8
    return rows + 8 - ragged if 5 < rows < 32 and ragged > 2 else rows


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    contract_inputs = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract_inputs, preferred_element_type=jnp.float32)
