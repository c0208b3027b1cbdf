"""Counts on the command line: plain, or with a binary suffix."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.cli.arguments import count


@given(st.integers(1, 10**6), st.sampled_from([("", 1), ("k", 1024), ("M", 1024**2)]))
def test_suffix_multiplies(number: int, suffix: tuple[str, int]):
    assert count(f"{number}{suffix[0]}") == number * suffix[1]


@pytest.mark.parametrize(
    "text", ["", "k", "0", "0k", "-1", "1.5k", "1kk", "1g", "1e3", "12 8", "٣", "9" * 5000]
)
def test_anything_else_is_refused_with_the_text(text: str):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        count(text)

    assert str(error.value).startswith(repr(text))
