"""Paged decoding equals attention over the gathered context, whatever lies beyond it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementation import Implementation
from pallas_kernels.mla.paged_decode import mla_paged_decode
from pallas_kernels.mla.paged_decode_gpu import context_parts
from pallas_kernels.mla.paged_prefill import mla_paged_prefill
from pallas_kernels.mla.reference import mla_reference
from tests.pallas_kernels.interpreter import no_races

XLA, INTERPRET = Implementation.XLA, Implementation.INTERPRET
LATENT, SHARED, NOPE, VALUE = 128, 64, 16, 8
BFLOAT16_WEIGHTS = 6e-3
"""Queries, softmax weights and the mean of latents are each rounded to 2^-9 of their size."""


def arguments(seed, starts, lengths, heads=3, tokens=1, page=16, entries=9, poison=np.nan):
    rng = np.random.default_rng(seed)
    rows = len(starts)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(jnp.bfloat16)

    pages = normal(rows * entries + 3, page, LATENT + SHARED)
    table = rng.permutation(len(pages))[: rows * entries].reshape(rows, entries)
    context = pages[table].reshape(rows, entries * page, -1).copy()
    known = np.arange(entries * page) < (np.array(starts) + lengths)[:, None]
    poisoned = np.where(known[..., None], context, np.asarray(poison, jnp.bfloat16))
    pages[:] = np.nan  # free ones too
    pages[table] = poisoned.reshape(*table.shape, page, -1)
    q = normal(rows, tokens, heads, NOPE + SHARED)
    kv_up = normal(heads, NOPE + VALUE, LATENT, scale=LATENT**-0.5)
    starts, lengths = np.array(starts, np.int32), np.array(lengths, np.int32)
    call = (q, pages, kv_up, table.astype(np.int32), starts, lengths)
    call = tuple(jnp.asarray(x) for x in call)
    want = mla_reference(q, np.where(known[..., None], context, 0), kv_up, starts)
    real = np.arange(tokens) < lengths[:, None]
    return call, np.asarray(want, np.float32)[real], real


@functools.partial(jax.jit, static_argnames=("parts", "implementation"))
def decode(*call, parts=None, implementation):
    return mla_paged_decode(*call, parts=parts, implementation=implementation)


def relative_error(got, want, real):
    got = np.asarray(got, np.float32)
    assert np.isfinite(got).all()
    return np.linalg.norm(got[real] - want) / np.linalg.norm(want)


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
@pytest.mark.parametrize(
    ("starts", "lengths", "tokens", "heads", "parts"),
    [
        ([0, 63, 130], [1, 1, 1], 1, 3, 1),
        ([64, 141], [1, 1], 1, 70, 2),
        ([11, 126], [3, 2], 3, 5, 3),
    ],
)
def test_paged_decoding_equals_attention_over_the_context(
    runs, starts, lengths, tokens, heads, parts
):
    call, want, real = arguments(sum(starts), starts, lengths, heads, tokens)
    out = decode(*call, parts=parts, implementation=runs)
    assert relative_error(out, want, real) < BFLOAT16_WEIGHTS


@pytest.mark.parametrize("page", [8, 64, 128])
def test_pages_may_be_smaller_or_larger_than_a_tile(page):
    call, want, real = arguments(page, [70], [1], page=page, entries=-(-71 // page))
    out = decode(*call, implementation=INTERPRET)
    assert relative_error(out, want, real) < BFLOAT16_WEIGHTS


def test_a_padding_row_gives_zeros_and_an_empty_part_adds_nothing():
    call, want, real = arguments(5, [0, 3], [0, 1])
    out = decode(*call, parts=4, implementation=INTERPRET)
    assert not np.asarray(out[0], np.float32).any()
    assert relative_error(out, want, real) < BFLOAT16_WEIGHTS


def test_the_kernel_has_no_races():
    call, _, _ = arguments(6, [190], [1], entries=12)
    with no_races():
        jax.block_until_ready(decode(*call, parts=1, implementation=INTERPRET))


def test_parts_keep_processors_busy_without_becoming_small():
    assert context_parts(1, 96, 1 << 20) == 66
    assert context_parts(64, 96, 1 << 20) == 1
    assert context_parts(1, 96, 300) == 1


@pytest.mark.parametrize("tokens", [0, 9])
def test_more_tokens_than_verification_has_are_refused(tokens):
    call, _, _ = arguments(7, [0], [1])
    with pytest.raises(ValueError, match="1 to 8"):
        decode(jnp.zeros((1, tokens, 3, NOPE + SHARED)), *call[1:], implementation=XLA)


@pytest.mark.parametrize(
    ("number", "name", "change"),
    [
        (1, "pages", lambda x: x[0]),
        (2, "kv_up", lambda x: x[0]),
        (3, "page_table", lambda x: x * 1.0),
        (4, "starts", lambda x: x * 1.0),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(number, name, change):
    call = list(arguments(1, [0], [1])[0])
    call[number] = change(jnp.asarray(call[number]))
    with pytest.raises(ValueError, match=name):
        mla_paged_decode(*call)


@pytest.mark.parametrize("shape", [(0, 1, 3), (1, 0, 3), (1, 1, 0)])
def test_queries_of_nothing_are_refused(shape):
    call, _, _ = arguments(7, [0], [1])
    with pytest.raises(ValueError, match="no axis may be empty"):
        mla_paged_prefill(jnp.zeros((*shape, NOPE + SHARED)), *call[1:])
