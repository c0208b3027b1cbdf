"""Recurrent slots: the KDA state matrix and the convolution window of every sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from k3jax.config import K3Config
from k3jax.state.spans import HostOrDevice


class RecurrentState(struct.PyTreeNode):
    """One pair of arrays per KDA layer; a slot is one row's place in all of them."""

    matrices: tuple[Float32[Array, "slot head key value"], ...]
    windows: tuple[Float[Array, "slot tap channel"], ...]
    """The last 3 raw q, k, v projections, oldest first, before convolution."""

    @property
    def num_slots(self) -> int:
        """Number of slots in each pool."""
        return self.matrices[0].shape[0] if self.matrices else 0

    def layer(
        self, index: int
    ) -> tuple[Float32[Array, "slot head key value"], Float[Array, "slot tap channel"]]:
        """Both pools of one KDA layer, counted among such layers."""
        return self.matrices[index], self.windows[index]

    @classmethod
    def init(cls, config: K3Config, num_slots: int, dtype: jnp.dtype) -> RecurrentState:
        """Zeroed pools of `num_slots` slots; windows in `dtype`, matrices always float32."""
        heads, key = config.kda_num_heads, config.kda_head_dim
        window = (num_slots, config.kda_conv_size - 1, 3 * heads * key)
        layers = range(len(config.kda_layers))
        return cls(
            matrices=tuple(jnp.zeros((num_slots, heads, key, key), jnp.float32) for _ in layers),
            windows=tuple(jnp.zeros(window, dtype) for _ in layers),
        )


def read_slots(
    pool: Float[Array, "slot ..."], slots: Int32[HostOrDevice, "row"]
) -> Float[Array, "row ..."]:
    """Rows of a pool; a negative slot gives zeros, whatever the pool holds."""
    rows = jnp.take(pool, slots, axis=0, mode="clip")
    fresh = jnp.reshape(slots < 0, (-1,) + (1,) * (pool.ndim - 1))
    rows = jnp.where(fresh, jnp.zeros((), pool.dtype), rows)
    # Read once and for all: a read repeated inside later fusions would outlive the pool's update,
    # and XLA would copy the pool to keep it.
    return jax.lax.optimization_barrier(rows)


def write_slots(
    pool: Float[Array, "slot ..."],
    slots: Int32[HostOrDevice, "row"],
    values: Float[Array, "row ..."],
) -> Float[Array, "slot ..."]:
    """The pool with rows replaced; a negative slot writes nothing."""
    target = jnp.where(slots < 0, pool.shape[0], slots)
    return pool.at[target].set(values.astype(pool.dtype), mode="drop", unique_indices=True)


def slot_bytes(config: K3Config, dtype: jnp.dtype) -> int:
    """Bytes of one slot over all KDA layers."""
    state = jax.eval_shape(lambda: RecurrentState.init(config, 1, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
