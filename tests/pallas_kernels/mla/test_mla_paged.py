"""Attention over pages equals the plain one over the same latents, however they are scattered."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from pallas_kernels.mla import mla_paged, paged_xla, prefers_expanded
from pallas_kernels.mla.reference import mla_reference
from tests.pallas_kernels.mla.test_mla import random_case


@dataclass
class Paged:
    """Latents scattered over a pool in which everything else is NaN."""

    pool: np.ndarray
    table: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def scatter(latents: np.ndarray, starts: np.ndarray, tokens: int, size: int, spare: int) -> Paged:
    rows, context, width = latents.shape
    per_row = -(-context // size) + spare
    rng = np.random.default_rng(context)
    ids = rng.permutation(rows * per_row + 3)[: rows * per_row].reshape(rows, per_row)
    pool = np.full((rows * per_row + 3, size, width), np.nan, np.float32)
    for row in range(rows):
        for position in range(starts[row] + tokens):
            pool[ids[row, position // size], position % size] = latents[row, position]
    return Paged(pool, ids.astype(np.int32), starts, np.full(rows, tokens, np.int32))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(paged_xla, "BLOCK_TOKENS", 16)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "context", "spare"),
    [
        (1, 1, 1, 1, 0),  # a single block: no loop
        (1, 1, 3, 16, 3),
        (3, 1, 2, 67, 2),
        (2, 5, 3, 31, 0),
        (1, 33, 2, 80, 7),
        (2, 48, 2, 48, 0),
    ],
)
def test_pages_equal_the_latents_they_hold(rows, tokens, heads, context, spare, size):
    q, latents, kv_up, starts = random_case(rows, tokens, heads, context)
    paged = scatter(latents, starts, tokens, size, spare)
    found = jax.jit(mla_paged)(q, paged.pool, kv_up, paged.table, starts, paged.lengths)
    expected = mla_reference(q, latents, kv_up, starts)
    np.testing.assert_allclose(found, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("batch_tokens", "trips"), [(1, 12), (40, 6), (1000, 3)])
def test_many_rows_take_smaller_blocks(tokens, batch_tokens, trips, monkeypatch):
    monkeypatch.setattr(paged_xla, "BATCH_TOKENS", batch_tokens)
    q, latents, kv_up, starts = random_case(5, tokens, 2, 47)
    paged = scatter(latents, starts, tokens, 4, 0)
    arguments = q, paged.pool, kv_up, paged.table, starts, paged.lengths
    block = paged_xla._block_pages(5, 4)
    assert -(-paged.table.shape[1] // block) == trips
    found = jax.jit(mla_paged)(*arguments)
    expected = mla_reference(q, latents, kv_up, starts)
    np.testing.assert_allclose(found, expected, atol=3e-5, rtol=1e-4)


def test_both_forms_have_been_walked():
    sizes = {"rank": 24, "nope": 16, "shared": 8, "value": 12}
    assert prefers_expanded(tokens=33, context=16, **sizes)
    assert not prefers_expanded(tokens=1, context=16, **sizes)


def test_a_padding_row_is_finite_and_does_not_disturb_the_others():
    q, latents, kv_up, starts = random_case(3, 1, 2, 40)
    paged = scatter(latents, starts, 1, 4, 0)
    run = jax.jit(mla_paged)
    whole = run(q, paged.pool, kv_up, paged.table, starts, paged.lengths)
    starts[1] = paged.lengths[1] = 0
    paged.table[1] = 0
    found = run(q, paged.pool, kv_up, paged.table, starts, paged.lengths)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(found[2], whole[2], atol=1e-6)


def test_the_walk_ends_with_the_longest_row():
    q, latents, kv_up, starts = random_case(2, 1, 2, 20)
    paged = scatter(latents, starts, 1, 4, 90)
    text = jax.jit(mla_paged).lower(q, paged.pool, kv_up, paged.table, starts, paged.lengths)
    assert "while" in text.as_text()
    wide = jax.jit(mla_paged)(q, paged.pool, kv_up, paged.table, starts, paged.lengths)
    narrow = scatter(latents, starts, 1, 4, 0)
    short = jax.jit(mla_paged)(q, narrow.pool, kv_up, narrow.table, starts, narrow.lengths)
    np.testing.assert_allclose(wide, short, atol=1e-6)
