"""How large the engine's pools and buckets are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from k3jax.config import K3Config
from pallas_kernels.kda import DEVICE_TUNING

FIRST_CONTEXT = 2**15
CONTEXT_STEP = 8
SPAN_WIDTHS = (64, 256, 1024)
"""Tokens per row of a prefill step, besides the whole budget."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an `Engine`; None is worked out from the others by `resolve`."""

    max_rows: int = 16
    """Sequences that run at once."""
    max_context: int | None = None
    """Tokens of prompt and reply; default: the model's, or what `num_pages` can hold."""
    page_size: int = 64
    """Tokens in a page of the latent cache, and the grid of checkpoints."""
    num_pages: int | None = None
    """Default: one sequence of `max_context`, or 2,048 tokens for every row and as much again
    for cached prefixes."""
    num_slots: int | None = None
    """Recurrent slots for running sequences and cached checkpoints; default: 3 per row."""
    token_budget: int = 512
    """Prompt tokens of one prefill step: what a running sequence may have to wait for."""
    max_waiting: int = 1024
    max_choices: int = 128
    checkpoint_interval: int | None = None
    """Leave a checkpoint every so many prompt tokens, besides those at its end and branches."""
    prefix_cache: bool = True
    host_bytes: int = 0
    """Host memory for prefixes that the device has no room for."""
    host_least_tokens: int = 64
    """Prefixes that would save fewer tokens are neither kept on the host nor brought back: each
    takes a whole slot of memory there, and computing it costs little more than loading it. On CPU
    with 205 M parameters (scripts/benchmark_host_tier.py) a prefix of 16 tokens from the host
    gives the first token 1.1 times as fast as computing it, one of 64 2.0 times, one of 1,024
    19 times."""
    dtype: Any = None
    """Of windows and latents; default: that of the weights."""
    kernels: Mapping[str, str] | None = None
    """Ops and the variants ("xla", "gpu", "interpret") asked for; the rest is planned."""

    # Filled in by `resolve`.
    contexts: tuple[int, ...] = ()
    """Buckets for the width of the page table, in tokens, up to `max_context`. Attention walks only
    as far as the longest row reaches, so few are enough."""
    prefill_shapes: tuple[tuple[int, int], ...] = ()
    """Rows and tokens per row of prefill steps."""
    decode_rows: tuple[int, ...] = ()
    """Rows of decode steps."""

    def resolve(self, config: K3Config) -> ResolvedConfig:
        """All sizes for a model. Raises ValueError naming the setting and its rule."""
        for name in (
            "max_rows",
            "page_size",
            "token_budget",
            "max_waiting",
            "max_choices",
            "host_least_tokens",
        ):
            _at_least(name, getattr(self, name), 1)
        _at_least("host_bytes", self.host_bytes, 0)
        context = self._context(config)
        interval = self.checkpoint_interval
        chunk = DEVICE_TUNING.chunk_size
        if interval is not None:
            _at_least("checkpoint_interval", interval, 1)
        if interval is not None and (interval % chunk or interval % self.page_size):
            raise ValueError(
                f"checkpoint_interval = {interval}, expected a multiple of the page size "
                f"{self.page_size} and of KDA's chunk of {chunk} tokens"
            )
        pages = -(-context // self.page_size)
        num_pages = self.num_pages
        if num_pages is None:
            num_pages = max(pages, 2 * self.max_rows * min(pages, -(-2048 // self.page_size)))
        num_slots = 3 * self.max_rows if self.num_slots is None else self.num_slots
        _at_least("num_slots", num_slots, 1)
        whole = replace(
            self,
            max_context=context,
            num_pages=num_pages,
            num_slots=num_slots,
            contexts=self.contexts or _contexts(context),
            prefill_shapes=self.prefill_shapes or _shapes(self.token_budget, self.max_rows),
            decode_rows=self.decode_rows or _powers(self.max_rows),
        )
        whole._check_buckets(context)
        return ResolvedConfig(**whole.__dict__)

    def _context(self, config: K3Config) -> int:
        context = config.max_context if self.max_context is None else self.max_context
        _at_least("max_context", context, 2)
        if not context <= config.max_context:
            raise ValueError(
                f"max_context = {context}, expected 2..{config.max_context}, the model's context"
            )
        if self.num_pages is None:
            return context
        _at_least("num_pages", self.num_pages, 1)
        held = self.num_pages * self.page_size
        if self.max_context is not None and held < context:
            raise ValueError(
                f"num_pages = {self.num_pages} of {self.page_size} tokens hold {held}, "
                f"less than max_context = {context}"
            )
        return min(context, held)

    def _check_buckets(self, context: int) -> None:
        _check_sizes("contexts", self.contexts)
        _check_sizes("decode_rows", self.decode_rows)
        for number, shape in enumerate(_tuple("prefill_shapes", self.prefill_shapes)):
            name = f"prefill_shapes[{number}]"
            _check_sizes(name, shape)
            if len(shape) != 2:
                raise ValueError(f"{name} = {shape}, expected rows and tokens per row")
        if list(self.contexts) != sorted(set(self.contexts)) or self.contexts[-1] < context:
            raise ValueError(f"contexts = {self.contexts}, expected to rise to {context}")
        if max(self.decode_rows) < self.max_rows or list(self.decode_rows) != sorted(
            set(self.decode_rows)
        ):
            raise ValueError(f"decode_rows = {self.decode_rows}, expected to rise to max_rows")
        widths = {width for _, width in self.prefill_shapes}
        if any((1, width) not in self.prefill_shapes or width < 2 for width in widths):
            raise ValueError(
                f"prefill_shapes = {self.prefill_shapes}, expected one of a single row for "
                "every width, of at least 2 tokens"
            )


class ResolvedConfig(EngineConfig):
    """An `EngineConfig` without blanks."""

    max_context: int
    num_pages: int
    num_slots: int


def _at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}, expected a whole number")
    if value < least:
        raise ValueError(f"{name} = {value}, expected at least {least}")


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, tuple):
        raise ValueError(f"{name} = {values!r}, expected a tuple")
    return values


def _check_sizes(name: str, values: Any) -> None:
    for number, value in enumerate(_tuple(name, values)):
        _at_least(f"{name}[{number}]", value, 1)


def _contexts(context: int) -> tuple[int, ...]:
    sizes, size = [], FIRST_CONTEXT
    while size < context:
        sizes.append(size)
        size *= CONTEXT_STEP
    return (*sizes, context)


def _shapes(budget: int, max_rows: int) -> tuple[tuple[int, int], ...]:
    budget = max(budget, 2)
    widths = sorted({min(budget, width) for width in (*SPAN_WIDTHS, budget)})
    shapes = {(1, width) for width in widths}
    shapes |= {(max(1, min(max_rows, budget // width)), width) for width in widths}
    return tuple(sorted(shapes, key=lambda shape: (shape[1], shape[0])))


def _powers(limit: int) -> tuple[int, ...]:
    sizes, size = [], 1
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, limit)
