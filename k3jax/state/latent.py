"""The paged latent cache: what MLA keeps of every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

from k3jax.config import K3Config
from k3jax.state.spans import HostOrDevice, Spans


class LatentCache(struct.PyTreeNode):
    """One page pool per MLA layer: the normed latent and the shared key part of each token."""

    pages: tuple[Float[Array, "page position latent"], ...]

    @property
    def num_pages(self) -> int:
        """Pages in each pool."""
        return self.pages[0].shape[0] if self.pages else 0

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        return self.pages[0].shape[1] if self.pages else 1

    @classmethod
    def init(
        cls, config: K3Config, num_pages: int, page_size: int, dtype: jnp.dtype
    ) -> LatentCache:
        """Zeroed pools of `num_pages` pages of `page_size` positions."""
        shape = (num_pages, page_size, config.latent_width)
        return cls(pages=tuple(jnp.zeros(shape, dtype) for _ in config.mla_layers))


def append(
    pool: Float[Array, "page position latent"],
    spans: Spans,
    latents: Float[Array, "row token latent"],
) -> Float[Array, "page position latent"]:
    """The pool with each row's new latents at positions `starts …`; padding writes nothing."""
    num_pages, page_size, _ = pool.shape
    width = latents.shape[1]
    positions = spans.starts[:, None] + jnp.arange(width)
    page = jnp.take_along_axis(
        spans.page_table, positions // page_size, axis=1, mode="fill", fill_value=num_pages
    )
    page = jnp.where(spans.token_mask(width), page, num_pages)
    pool = pool.at[page, positions % page_size].set(
        latents.astype(pool.dtype), mode="drop", unique_indices=True
    )
    # Without it XLA repeats the update inside the read that follows, and copies the whole pool.
    return jax.lax.optimization_barrier(pool)


def copy_pages(
    pool: Float[Array, "page position latent"], copies: Int32[HostOrDevice, "row 2"]
) -> Float[Array, "page position latent"]:
    """The pool with page `copies[:, 0]` copied to `copies[:, 1]`; negative: nothing copied."""
    copies = jnp.asarray(copies)
    source = jnp.take(pool, copies[:, 0], axis=0, mode="clip")
    target = jnp.where(copies[:, 0] < 0, pool.shape[0], copies[:, 1])
    source = jax.lax.optimization_barrier(source)
    return jax.lax.optimization_barrier(pool.at[target].set(source, mode="drop"))


def page_bytes(config: K3Config, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all MLA layers."""
    cache = jax.eval_shape(lambda: LatentCache.init(config, 1, page_size, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
