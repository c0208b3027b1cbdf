"""Whole prefixes out of the pools and back into them, in pieces of fixed shape."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from k3jax.state.latent import LatentCache
from k3jax.state.recurrent import RecurrentState, write_slots
from k3jax.state.spans import HostOrDevice

PAGES_AT_ONCE = 16
"""Pages that one call moves; shorter lists are padded."""


class SlotCopy(struct.PyTreeNode):
    """One slot of every KDA layer; None in a model without such layers."""

    matrices: Float32[HostOrDevice, "layer head key value"] | None
    windows: Float[HostOrDevice, "layer tap channel"] | None


class PrefixArrays(struct.PyTreeNode):
    """Both halves of a prefix: its slot, and its pages in order, `PAGES_AT_ONCE` to an array.

    Device arrays are padded to that number of pages; on the host the last array is not.
    """

    slot: SlotCopy
    pages: tuple[Float[HostOrDevice, "layer page position latent"], ...]


def read_slot(state: RecurrentState, slot: Int32[HostOrDevice, ""]) -> SlotCopy:
    """What `slot` holds in every layer."""

    def stacked(pools: tuple[Array, ...]) -> Array | None:
        return jnp.stack([jnp.take(pool, slot, axis=0) for pool in pools]) if pools else None

    return SlotCopy(stacked(state.matrices), stacked(state.windows))


def write_slot(
    state: RecurrentState, slot: Int32[HostOrDevice, ""], copy: SlotCopy
) -> RecurrentState:
    """The state with `copy` in `slot` of every layer; a negative slot writes nothing."""
    slots = jnp.reshape(slot, 1)

    def written(pools: tuple[Array, ...], values: HostOrDevice | None) -> tuple[Array, ...]:
        if values is None:
            return pools
        values = jnp.asarray(values)
        return tuple(
            write_slots(pool, slots, values[layer : layer + 1]) for layer, pool in enumerate(pools)
        )

    return RecurrentState(
        matrices=written(state.matrices, copy.matrices),
        windows=written(state.windows, copy.windows),
    )


def read_pages(
    cache: LatentCache, pages: Int32[HostOrDevice, "page"]
) -> Float[Array, "layer page position latent"]:
    """What `pages` hold in every MLA layer; ids of padding are any page."""
    return jnp.stack([jnp.take(pool, pages, axis=0, mode="clip") for pool in cache.pages])


def write_pages(
    cache: LatentCache,
    pages: Int32[HostOrDevice, "page"],
    values: Float[HostOrDevice, "layer page position latent"],
) -> LatentCache:
    """The cache with `values` in `pages` of every layer; a negative page writes nothing."""
    values = jnp.asarray(values)
    target = jnp.where(pages < 0, cache.num_pages, pages)
    return LatentCache(
        pages=tuple(
            pool.at[target].set(values[layer], mode="drop")
            for layer, pool in enumerate(cache.pages)
        )
    )
