"""What the engine asks of XLA's CPU compiler and of the C library's allocator."""

from __future__ import annotations

import ctypes
import sys

COMPILER_OPTIONS: dict[str, bool] = {"xla_cpu_enable_fast_math": True}
"""Options of the jitted steps.

Sums and products may be reordered, which is what lets LLVM vectorise a sum: the routed experts at
16 rows take half the time. NaN and infinity keep their meaning and division and functions their
precision (XLA's `xla_cpu_fast_math_honor_*` stay on). Other back ends ignore it.
"""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next allocation; whether the C library agreed.

    XLA allocates a step's temporary arrays anew each time. glibc gives blocks of that size back to
    the kernel at once, which then clears each page of the next: a tenth of a 16-row step. Freed
    memory, up to 1 GiB at the heap's end, stays with the process. Does nothing without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 1 << 26))
    return all([mallopt(option, value) == 1 for option, value in wanted])
