"""Prefill over pages equals attention over the gathered context, whatever lies beyond it."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.implementation import Implementation, kernel_supports
from pallas_kernels.mla.paged_prefill import mla_paged_prefill
from pallas_kernels.shapes import K3, K3_NANO, KIMI_LINEAR, SMALL
from tests.pallas_kernels.interpreter import no_races
from tests.pallas_kernels.mla.test_mla_paged_decode_gpu import (
    BFLOAT16_WEIGHTS,
    arguments,
    relative_error,
)

XLA, INTERPRET = Implementation.XLA, Implementation.INTERPRET


@functools.partial(jax.jit, static_argnames=("run", "expanded", "implementation"))
def prefill(*call, run=None, expanded=True, implementation=INTERPRET):
    return mla_paged_prefill(*call, run=run, expanded=expanded, implementation=implementation)


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
@pytest.mark.parametrize(
    ("starts", "lengths", "tokens", "heads"),
    [
        ([0], [1], 1, 1),
        ([0, 130, 3], [11, 1, 0], 11, 1),
        ([137, 0], [131, 67], 131, 1),
        ([250], [37], 37, 3),
    ],
)
def test_prefill_equals_attention_over_the_context(runs, starts, lengths, tokens, heads):
    entries = -(-(max(starts) + tokens) // 16)
    call, want, real = arguments(sum(lengths), starts, lengths, heads, tokens, entries=entries)
    assert relative_error(prefill(*call, implementation=runs), want, real) < BFLOAT16_WEIGHTS


def test_runs_of_positions_add_up():
    call, want, real = arguments(3, [0, 300, 9], [5, 5, 0], 2, 5, entries=20)
    assert relative_error(prefill(*call, run=128), want, real) < BFLOAT16_WEIGHTS


@pytest.mark.parametrize("expanded", [False, True])
def test_both_forms_are_one_function(expanded):
    call, want, real = arguments(4, [40, 0], [9, 7], 3, 9)
    out = prefill(*call, expanded=expanded)
    assert relative_error(out, want, real) < BFLOAT16_WEIGHTS


@pytest.mark.parametrize("page", [5, 192])
def test_pages_of_any_size_are_taken(page):
    call, want, real = arguments(page, [70], [9], 1, 9, page=page, entries=-(-79 // page))
    assert relative_error(prefill(*call), want, real) < BFLOAT16_WEIGHTS


def test_the_kernel_has_no_races():
    call, _, _ = arguments(6, [170], [140], 1, 140, entries=20)
    with no_races():
        jax.block_until_ready(prefill(*call))


def test_blocks_of_queries_beyond_a_rows_length_are_zero():
    call, want, real = arguments(7, [0, 0], [3, 140], 1, 140, entries=9)
    out = prefill(*call)
    assert not np.asarray(out[0, 128:], np.float32).any()
    assert relative_error(out, want, real) < BFLOAT16_WEIGHTS


def test_the_kernel_takes_k3_and_the_small_models():
    supports = kernel_supports()["mla_prefill"]
    assert all(supports(shape).ok for shape in (K3, KIMI_LINEAR, K3_NANO, SMALL))
