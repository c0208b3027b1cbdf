"""Spans from slot to slot equal the equations, as XLA and as interpreted kernels, without races."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementation import Implementation
from pallas_kernels.kda import prefill_gpu, reference
from pallas_kernels.kda.prefill import Exports, kda_prefill
from pallas_kernels.shapes import K3
from tests.pallas_kernels.interpreter import no_races
from tests.pallas_kernels.kda.oracle import kda_inputs, relative_error

XLA, INTERPRET = Implementation.XLA, Implementation.INTERPRET
# The kernel rounds operands to bfloat16: keys that are nearly equal lose much of what tells them
# apart, and what is read back of them is a difference.
TOLERANCE = {(XLA, "random"): 3e-6, (XLA, "repeated"): 1e-5}
TOLERANCE |= {(INTERPRET, "random"): 1e-2, (INTERPRET, "repeated"): 3e-2}


@functools.partial(jax.jit, static_argnames=("bound", "runs"))
def prefill(tokens, lengths, pool, read, write, exports=None, *, bound=-5.0, runs):
    return kda_prefill(
        *tokens, lengths, pool, read, write,
        exports=exports, log_decay_bound=bound, implementation=runs,
    )  # fmt: skip


def arguments(seed, lengths, tokens, heads=1, key=64, gate="mixed", keys="random", slots=9):
    """Tokens whose padding is NaN, and a pool."""
    rng = np.random.default_rng(seed)
    *inputs, _ = kda_inputs(rng, len(lengths), tokens, heads, key, key, gate, keys)
    padding = np.arange(tokens) >= np.array(lengths)[:, None]
    for x in inputs:
        x[padding] = np.nan
    pool = rng.standard_normal((slots, heads, key, key)).astype(np.float32)
    return tuple(inputs), np.array(lengths, np.int32), pool


def as_slots(*slots):
    return np.array(slots, np.int32)


def check(inputs, read, write, exports, runs, keys="random", bound=-5.0):
    want_out, want = jax.jit(reference.kda_prefill)(
        *inputs[0], *inputs[1:], read, write, *(exports or ())
    )
    out, new = prefill(*inputs, read, write, exports, bound=bound, runs=runs)
    tolerance = TOLERANCE[runs, keys]
    assert relative_error(out, want_out) < tolerance
    changed = np.flatnonzero(np.any(np.asarray(want) != inputs[2], axis=(1, 2, 3)))
    for slot in changed:
        assert relative_error(new[slot], want[slot]) < tolerance
    others = np.setdiff1d(np.arange(len(new)), changed)
    np.testing.assert_array_equal(new[others], inputs[2][others])
    return changed


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
@pytest.mark.parametrize(
    ("gate", "keys", "bound", "key"),
    [
        ("mixed", "random", -5.0, 128),
        ("bound", "repeated", -5.0, 64),
        ("slow", "repeated", -5.0, 64),
        ("unbounded", "random", None, 64),
        ("slow", "repeated", None, 128),
    ],
)
def test_a_span_equals_the_equations(gate, keys, bound, key, runs):
    inputs = arguments(key, (130, 67), 130, key=key, gate=gate, keys=keys)
    exports = Exports(as_slots(64, 9), as_slots(3, 4))
    changed = check(inputs, as_slots(1, -1), as_slots(1, 0), exports, runs, keys, bound)
    np.testing.assert_array_equal(changed, [0, 1, 3, 4])


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
def test_short_and_exact_lengths_and_two_heads_equal_the_equations(runs):
    inputs = arguments(1, (1, 2, 63, 64), 64, heads=2)
    check(inputs, as_slots(0, 1, 2, -1), as_slots(4, 1, 5, 3), None, runs)


@pytest.mark.parametrize("runs", [XLA, INTERPRET])
def test_only_slots_that_are_named_and_reached_are_written(runs):
    inputs = arguments(2, (70, 0, 3), 70)
    # An empty row keeps its state, moved; counts of 0 or past the length export nothing.
    exports = Exports(as_slots(0, 1, 4), as_slots(6, 7, 8))
    changed = check(inputs, as_slots(0, 1, 2), as_slots(-1, 5, 9), exports, runs)
    np.testing.assert_array_equal(changed, [5])
    _, new = prefill(*inputs, as_slots(0, 1, 2), as_slots(-1, 5, 9), exports, runs=runs)
    np.testing.assert_array_equal(new[5], inputs[2][1])


@pytest.mark.parametrize("count", [1, 63, 64, 65, 129])
def test_an_export_equals_a_shorter_span(count):
    inputs, lengths, pool = arguments(count, (130,), 130, heads=2, key=16)
    exports = Exports(as_slots(count), as_slots(4))
    _, new = prefill(inputs, lengths, pool, as_slots(0), as_slots(2), exports, runs=XLA)
    _, want = prefill(inputs, as_slots(count), pool, as_slots(0), as_slots(2), runs=XLA)
    np.testing.assert_array_equal(new[4], want[2])


def test_a_fresh_row_ignores_what_the_pool_holds():
    tokens, lengths, pool = arguments(3, (5,), 64)
    _, want = prefill(tokens, lengths, 0 * pool, as_slots(0), as_slots(1), runs=INTERPRET)
    pool[...] = np.nan
    out, new = prefill(tokens, lengths, pool, as_slots(-2), as_slots(1), runs=INTERPRET)
    np.testing.assert_array_equal(new[1], want[1])
    np.testing.assert_array_equal(out[0, 5:], 0.0)


def test_the_kernels_have_no_races():
    inputs = arguments(4, (70,), 128)
    exports = Exports(as_slots(66), as_slots(3))
    with no_races():
        jax.block_until_ready(prefill(*inputs, as_slots(1), as_slots(1), exports, runs=INTERPRET))


def test_the_donated_pool_is_updated_in_place():
    tokens, lengths, _ = arguments(5, (40, 40), 40, heads=2, key=16)
    pool = jax.ShapeDtypeStruct((97, 2, 16, 16), np.float32)
    function = jax.jit(kda_prefill, donate_argnums=6)
    compiled = function.lower(*tokens, lengths, pool, as_slots(0, 1), as_slots(2, 3)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert "input_output_alias={ {1}: (6, {}" in text
    assert memory.temp_size_in_bytes < 97 * 2 * 16 * 16 * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"activation_dtype": "float32"}, "are float32"), ({"kda_head": 32}, "head of 32 channels")],
)
def test_shapes_that_the_kernel_does_not_take_have_a_reason(change, reason):
    assert prefill_gpu.supports(K3).ok
    support = prefill_gpu.supports(dataclasses.replace(K3, **change))
    assert not support.ok and reason in support.reason


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, np.zeros((1, 9, 2, 8)), r"q has shape \(1, 9, 2, 8\)"),
        (4, np.zeros((1, 9)), r"beta has shape \(1, 9\)"),
        (5, np.zeros(1), r"lengths is float64\(1,\)"),
        (6, np.zeros((3, 2, 8, 16), np.float32), r"state_pool has shape \(3, 2, 8, 16\)"),
        (6, np.zeros((3, 2, 16, 16), np.float16), "state_pool is float16"),
    ],
)
def test_a_wrong_argument_is_named(position, value, message):
    tokens, lengths, pool = arguments(6, (9,), 9, heads=2, key=16)
    given = [*tokens, lengths, pool, as_slots(0), as_slots(1)]
    given[position] = value
    with pytest.raises(ValueError, match=message):
        kda_prefill(*given)
    with pytest.raises(ValueError, match=r"exports\.counts is int32\(2,\)"):
        kda_prefill(
            *tokens, lengths, jnp.asarray(pool), as_slots(0), as_slots(1),
            exports=Exports(as_slots(1, 2), as_slots(1)),
        )  # fmt: skip


@pytest.mark.parametrize(("rows", "tokens"), [(0, 9), (1, 0)])
def test_no_rows_or_no_tokens_are_refused(rows, tokens):
    (q, k, v, log_decay, beta), _, pool = arguments(6, (9,), 9, heads=2, key=16)
    cut = [x[:rows, :tokens] for x in (q, k, v, log_decay, beta)]
    slots = as_slots(*range(rows))
    with pytest.raises(ValueError, match="at least one row and one token"):
        kda_prefill(*cut, slots, jnp.asarray(pool), slots, slots)
