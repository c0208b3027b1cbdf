"""Which rows each expert serves: the (row, choice) pairs sorted by expert."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class Routing(NamedTuple):
    """Pairs in the order of their experts; those of padding rows come last, with weight zero."""

    order: Int32[Array, "pair"]
    """Pair numbers (row · choices + choice), sorted."""
    experts: Int32[Array, "pair"]
    """The sorted pairs' experts; after the last valid pair, that pair's expert again, so that
    working past the end reads no further weights."""
    places: Int32[Array, "row choice"]
    """Where in the order each pair is."""
    weights: Float[Array, "row choice"]
    """Zero on padding rows."""
    pairs: Int32[Array, ""]
    """How many pairs are valid."""

    @property
    def choices(self) -> int:
        """Experts per row."""
        return self.weights.shape[1]

    def sorted_experts(self, count: int) -> Int32[Array, "pair"]:
        """The sorted pairs' experts, `count` for the pairs of padding rows."""
        return jnp.where(jnp.arange(len(self.order)) < self.pairs, self.experts, count)

    def sizes(self, count: int) -> Int32[Array, "expert"]:
        """How many pairs each of `count` experts has."""
        starts = jnp.searchsorted(self.sorted_experts(count), jnp.arange(count + 1))
        return jnp.diff(starts).astype(jnp.int32)

    def by_expert(self) -> "Routing":
        """The same with its pairs in order of their experts, which `sort_pairs` spares one row."""
        if self.weights.shape[0] > 1:
            return self
        order = _argsort(self.experts)
        return self._replace(
            order=self.order[order], experts=self.experts[order], places=_argsort(order)[None]
        )

    def tiles(self, rows: int, count: int) -> "Tiles":
        """Each of `count` experts' pairs in tiles of `rows`; needs the order of `by_expert`."""
        pairs = self.order.shape[0]
        most = min(pairs, (pairs + min(count, pairs) * (rows - 1)) // rows)
        sizes = self.sizes(count)
        needed = -(-sizes // rows)
        ends = jnp.cumsum(needed)
        first_tile, first_pair = ends - needed, jnp.cumsum(sizes) - sizes
        tile = jnp.arange(most)
        expert = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
        known = jnp.minimum(expert, count - 1)
        rank = (tile - first_tile[known])[:, None] * rows + jnp.arange(rows)
        used = (expert < count)[:, None] & (rank < sizes[known][:, None])
        pair = jnp.where(used, first_pair[known][:, None] + rank, 0)
        own = jnp.arange(pairs) - first_pair[self.experts]
        at = jnp.minimum(first_tile[self.experts] + own // rows, most - 1)
        return Tiles(expert, pair, used, ends[-1], (at, own % rows))

    def padded_length(self, chunk: int) -> int:
        """Room for a chunk that starts at any pair."""
        return self.order.shape[0] + chunk - 1

    def slice(
        self, start: jax.Array, length: int
    ) -> tuple[Int32[Array, "pair"], Int32[Array, "pair"]]:
        """Rows and experts of sorted pairs from `start`; past the end those of the last one."""
        places = jnp.minimum(start + jnp.arange(length), jnp.maximum(self.pairs - 1, 0))
        return self.order[places] // self.choices, self.experts[places]

    def combine(self, sorted_out: Float[Array, "place latent"]) -> Float[Array, "row latent"]:
        """Weighted sums of each row's pairs, zero on padding rows."""
        terms = [
            jnp.where(weight[:, None] == 0, 0, weight[:, None] * sorted_out[place])
            for weight, place in zip(self.weights.T, self.places.T, strict=True)
        ]
        return functools.reduce(jax.lax.add, terms)


class Tiles(NamedTuple):
    """Sorted pairs cut into tiles of at most so many rows that share an expert.

    There are as many tiles as any routing can need; the pairs of padding rows are in none.
    """

    expert: Int32[Array, "tile"]
    """The number of experts, where this routing needs no such tile."""
    pair: Int32[Array, "tile row"]
    """Number of the sorted pair; 0 where the row is not used."""
    used: Bool[Array, "tile row"]
    needed: Int32[Array, ""]
    """Tiles that this routing needs; they come first."""
    place: tuple[Int32[Array, "pair"], Int32[Array, "pair"]]
    """Tile and row of every sorted pair; for those of padding rows, of some other."""

    def inputs(
        self, x: Float[Array, "row latent"], routing: Routing
    ) -> Float[Array, "tile row latent"]:
        """What each tile multiplies, zero in rows that are not used."""
        rows = x[routing.order[self.pair] // routing.choices]
        return jnp.where(self.used[..., None], rows, 0)

    def combine(
        self, out: Float[Array, "tile row latent"], routing: Routing
    ) -> Float[Array, "row latent"]:
        """`Routing.combine` of what came of each tile."""
        known = jnp.arange(len(routing.order)) < routing.pairs
        return routing.combine(jnp.where(known[:, None], out[self.place], 0))

    def padded(self, multiple: int, count: int) -> "Tiles":
        """With tiles that nothing needs, up to a multiple."""
        more = -len(self.expert) % multiple
        return self._replace(
            expert=jnp.pad(self.expert, (0, more), constant_values=count),
            pair=jnp.pad(self.pair, ((0, more), (0, 0))),
            used=jnp.pad(self.used, ((0, more), (0, 0))),
        )

    def slice(self, start: jax.Array, length: int) -> "Tiles":
        """Some tiles in a row, for `inputs`."""
        parts = (
            jax.lax.dynamic_slice_in_dim(array, start, length)
            for array in (self.expert, self.pair, self.used)
        )
        return Tiles(*parts, needed=self.needed, place=self.place)


def sort_pairs(
    indices: Int32[Array, "row choice"],
    weights: Float[Array, "row choice"],
    valid: Bool[Array, "row"],
    count: int,
) -> Routing:
    """Sorts the pairs of valid rows by expert; `count` is the number of experts.

    One row's pairs stay as they are (`Routing.by_expert` sorts them): no two share an expert.
    """
    flat = jnp.where(valid[:, None], indices, count).reshape(-1).astype(jnp.int32)
    alone = jnp.arange(len(flat), dtype=jnp.int32)
    order = _argsort(flat) if len(indices) > 1 else alone
    pairs = valid.sum(dtype=jnp.int32) * indices.shape[1]
    within = jnp.minimum(jnp.arange(len(flat)), jnp.maximum(pairs - 1, 0))
    experts = jnp.clip(flat[order[within]], 0, count - 1)
    return Routing(
        order=order,
        experts=experts,
        places=(_argsort(order) if len(indices) > 1 else alone).reshape(indices.shape),
        weights=jnp.where(valid[:, None], weights, 0).astype(jnp.float32),
        pairs=pairs,
    )


def _argsort(keys: Int32[Array, "pair"]) -> Int32[Array, "pair"]:
    return jnp.argsort(keys, stable=True).astype(jnp.int32)
