"""Calls what needs far more stack than a thread has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 1 << 30
"""Address space for compiling a grammar. llguidance follows references and rules by recursion, and
one that runs out of stack takes the process with it; the longest chains that are accepted fit in
half of this."""

_stack_size = threading.Lock()


def on_large_stack[T](make: Callable[[], T]) -> T:
    """What `make` returns, called with `STACK_BYTES` of stack."""
    with ThreadPoolExecutor(1, thread_name_prefix="k3jax-grammar-stack") as thread:
        with _stack_size:
            before = threading.stack_size(STACK_BYTES)
            try:
                made = thread.submit(make)
            finally:
                threading.stack_size(before)
        return made.result()
