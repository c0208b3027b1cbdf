"""Everything a step carries from one call to the next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from k3jax.config import K3Config
from k3jax.state.latent import LatentCache
from k3jax.state.recurrent import RecurrentState


class DecodeState(struct.PyTreeNode):
    """Recurrent slots and latent pages, sized separately (they share no id space)."""

    recurrent: RecurrentState
    latent: LatentCache

    @classmethod
    def init(
        cls,
        config: K3Config,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        dtype: Any = jnp.float32,
    ) -> DecodeState:
        """Zeroed state; `dtype` is that of activations (windows and latents)."""
        for name, value in (
            ("num_slots", num_slots),
            ("num_pages", num_pages),
            ("page_size", page_size),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value}, expected at least 1")
        return cls(
            recurrent=RecurrentState.init(config, num_slots, dtype),
            latent=LatentCache.init(config, num_pages, page_size, dtype),
        )

    @property
    def bytes(self) -> int:
        """Bytes of all pools."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
