"""The short convolution respects row lengths, keeps raw windows and may be cut anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda
from pallas_kernels.kda import reference
from tests.pallas_kernels.kda.oracle import relative_error

conv = jax.jit(kda.causal_conv)


def conv_inputs(seed, rows, tokens, channels, taps=4):
    rng = np.random.default_rng(seed)
    shapes = ((rows, tokens, channels), (rows, taps - 1, channels), (channels, taps))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("tokens", "taps"), [(1, 4), (1, 2), (1, 7), (2, 4), (3, 4), (17, 4), (9, 2), (5, 7)]
)
def test_convolution_equals_the_reference(tokens, taps):
    x, window, weight = conv_inputs(tokens, 3, tokens, 13, taps)
    lengths = np.array([tokens, 0, tokens // 2])
    y, new_window = conv(x, window, weight, lengths)
    want_y, want_window = jax.jit(reference.short_conv)(x, window, weight, lengths)
    assert relative_error(y, want_y) < 1e-6
    np.testing.assert_array_equal(new_window, want_window)
    np.testing.assert_array_equal(kda.conv_window(x, window, lengths), want_window)


def test_a_row_of_length_zero_keeps_its_window():
    x, window, weight = conv_inputs(1, 2, 5, 7)
    _, new_window = conv(x, window, weight, np.array([0, 5]))
    np.testing.assert_array_equal(new_window[0], window[0])
    np.testing.assert_array_equal(new_window[1], x[1, 2:])


@pytest.mark.parametrize("lengths", [[0, 1, 3, 11], [0, 1, 1, 0]])
def test_poisoned_padding_reaches_nothing(lengths):
    lengths, tokens = np.array(lengths), max(lengths)
    x, window, weight = conv_inputs(2, 4, tokens, 7)
    want_y, want_window = conv(x, window, weight, lengths)
    padding = np.arange(tokens)[None, :] >= lengths[:, None]
    x[padding] = np.nan
    y, new_window = conv(x, window, weight, lengths)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(new_window, want_window)
    assert np.all(np.asarray(y)[padding] == 0.0)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (5, 10), (1, 2, 3, 4)])
def test_any_partition_gives_the_same_outputs_and_window(cuts):
    x, window, weight = conv_inputs(3, 2, 13, 5)
    whole, whole_window = conv(x, window, weight, np.array([13, 13]))
    pieces = []
    for start, end in zip((0, *cuts), (*cuts, 13), strict=True):
        y, window = conv(x[:, start:end], window, weight, np.full(2, end - start))
        pieces.append(y)
    assert relative_error(np.concatenate(pieces, axis=1), whole) < 1e-6
    np.testing.assert_array_equal(window, whole_window)


@pytest.mark.parametrize("tokens", [1, 6])
def test_outputs_keep_the_dtype_of_x_and_windows_their_own(tokens):
    x, window, weight = conv_inputs(4, 2, tokens, 5)
    narrow, lengths = jnp.asarray(x, jnp.bfloat16), np.full(2, tokens)
    y, new_window = conv(narrow, window, weight, lengths)
    wide, _ = conv(narrow.astype(jnp.float32), window, weight, lengths)
    assert y.dtype == jnp.bfloat16 and new_window.dtype == jnp.float32
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (2, 5), r"x has shape \(2, 5\)"),
        (1, (2, 4, 7), r"window has shape \(2, 4, 7\)"),
        (2, (7, 1, 4), r"weight has shape \(7, 1, 4\)"),
        (3, (1,), r"lengths is float32\(1,\)"),
    ],
)
def test_a_wrong_shape_is_named(position, shape, message):
    inputs = [*conv_inputs(5, 2, 5, 7), np.array([5, 5])]
    inputs[position] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        kda.causal_conv(*inputs)


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, (2, 5), r"x has shape \(2, 5\)"),
        (1, (2, 3, 6), r"window has shape \(2, 3, 6\)"),
        (2, (1,), r"counts is float32\(1,\)"),
    ],
)
def test_a_wrong_shape_for_a_window_alone_is_named(position, shape, message):
    inputs = [*conv_inputs(5, 2, 5, 7)[:2], np.array([5, 5])]
    inputs[position] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        kda.conv_window(*inputs)
