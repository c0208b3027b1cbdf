"""The float product in the form that XLA's CPU back end runs fastest for its number of rows.

XLA hands products to YNNPACK. `x wᵀ` as a dot makes the weight the packed operand, so every call
copies and transposes it: two to four times the cost of reading it. The sum of a broadcast product
becomes YNNPACK's dot with the weight as the streamed operand and only x packed; from `DOT_ROWS` on
packing pays. Up to `FEW_ROWS` rows even that costs up to twice what reading the weight does. There
a reduction with several results, sums side by side, stays one loop of XLA's own, which all cores
share and in which each number loaded serves several sums. Of few outputs: each is one more stream
for the memory to serve. Eight outputs of one row are the fastest alone, but inside a step, where
other products run beside them, two made it 15 % faster. Measured by
`scripts/experiment_cpu_products.py` and by whole steps.
"""

import math
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DOT_ROWS = 72
"""Rows from which packing the weight costs less than streaming it."""
FEW_ROWS = 6
"""Rows up to which sums side by side are faster than YNNPACK."""
SUMS = 8
"""Sums that run side by side at most; with 16 XLA makes a copy of the operands."""
OUTPUTS = 2
"""Outputs that run side by side, while that and the number of rows make at most `SUMS` sums."""


def linear_cpu(x: Float[Array, "row in"], w: Float[Array, "out in"]) -> Float[Array, "row out"]:
    """`x wᵀ` in float32 for float32 operands; differentiable."""
    rows = x.shape[0]
    if rows <= FEW_ROWS and (rows > 1 or w.shape[0] % OUTPUTS == 0):
        return side_by_side(x, w)
    if rows == 1 or rows >= DOT_ROWS:
        return _dot(x, w)
    padded = jnp.pad(x, ((0, padded_rows(rows) - rows), (0, 0)))
    return streamed(padded, w)[:rows]


@jax.custom_jvp
def side_by_side(
    x: Float[Array, "*batch row in"], w: Float[Array, "*batch out in"]
) -> Float[Array, "*batch row out"]:
    """`x wᵀ` per batch entry in float32, several rows, or rows times outputs, at a time.

    A slice or gather in front of w joins the loop: w is read where it lies.
    """
    return jnp.concatenate(
        [_sums(x[..., at : at + SUMS, :], w) for at in range(0, x.shape[-2], SUMS)],
        axis=-2,
    )


@side_by_side.defjvp
def _side_by_side_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, w), (dx, dw) = primals, tangents
    change = jnp.einsum("...ri,...oi->...ro", dx, w) + jnp.einsum("...ri,...oi->...ro", x, dw)
    return side_by_side(x, w), change


def _sums(x: Array, w: Array) -> Array:
    rows, outs, width = x.shape[-2], *w.shape[-2:]
    runs = math.gcd(outs, OUTPUTS) if rows * OUTPUTS <= SUMS else 1
    x = jax.lax.optimization_barrier(x)  # or what makes x is computed again for every output
    grouped = w.reshape(*w.shape[:-2], runs, outs // runs, width)
    products = tuple(
        grouped[..., run, :, :] * x[..., row, None, :] for row in range(rows) for run in range(runs)
    )
    zeros = (jnp.float32(0),) * len(products)
    axis = products[0].ndim - 1
    sums = jax.lax.reduce(products, zeros, lambda a, b: tuple(map(operator.add, a, b)), (axis,))
    return jnp.concatenate(sums, axis=-1).reshape(*x.shape[:-1], outs)


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
    return rows + 8 - ragged if FEW_ROWS < rows < 32 and ragged > 2 else rows


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    contract_inputs = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract_inputs, preferred_element_type=jnp.float32)
