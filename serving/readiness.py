"""Representative requests that must succeed before the service calls itself ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from k3jax.engine.request import Request, SamplingParams, TokenEvent
from serving.constraints import ConstraintCompiler
from serving.engine_loop import EngineLoop
from serving.images import ImageEncoder
from serving.wire import ConstraintText


class ProbeFailed(RuntimeError):
    """A representative request did not do what it should."""


@dataclass(frozen=True)
class Limits:
    """The largest that is promised."""

    max_context: int
    max_rows: int
    page_size: int
    prefix_cache: bool
    vocab_size: int


class Probes:
    """Runs requests through the loop that will serve; `images` where there is a vision tower."""

    def __init__(
        self,
        loop: EngineLoop,
        constraints: ConstraintCompiler,
        limits: Limits,
        images: ImageEncoder | None = None,
    ) -> None:
        self._loop, self._constraints, self._limits = loop, constraints, limits
        self._images = images
        self._count = 0

    async def run(
        self, passed: Callable[[str, float], None] = lambda name, seconds: None
    ) -> list[str]:
        """All of them, in order; returns their names. Raises ProbeFailed naming the first bad one.

        `passed` is told of each with its seconds. Cached prefixes are forgotten before and after.
        """
        probes: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("longest prompt", self.longest_prompt),
            ("largest batch", self.largest_batch),
            ("prefix hit", self.prefix_hit),
            ("structured output", self.structured_output),
        ]
        if self._images is not None:
            probes.append(("largest image", self.largest_image))
        for name, probe in probes:
            start = time.perf_counter()
            await self._loop.call(lambda engine: engine.flush_cache())
            try:
                await probe()
            except Exception as error:
                raise ProbeFailed(f"{name}: {error}") from error
            passed(name, time.perf_counter() - start)
        await self._loop.call(lambda engine: engine.flush_cache())
        return [name for name, _ in probes]

    async def longest_prompt(self) -> None:
        """As many tokens as the context has room for, and one generated."""
        await self._complete(self._prompt(self._limits.max_context - 1), 1)

    async def largest_batch(self) -> None:
        """As many sequences at once as may run."""
        rows = self._limits.max_rows
        length = max(1, min(self._limits.page_size, self._limits.max_context - 8))
        await asyncio.gather(
            *(self._complete(self._prompt(length, start), 4) for start in range(rows))
        )

    async def prefix_hit(self) -> None:
        """A prompt that continues an earlier one resumes from its checkpoint."""
        length = min(2 * self._limits.page_size, self._limits.max_context - 8)
        prompt = self._prompt(length)
        await self._complete(prompt, 2)
        events = await self._complete((*prompt, *self._prompt(4, 7)), 2)
        possible = self._limits.prefix_cache and length >= self._limits.page_size
        if possible and not events[-1].cached_tokens:
            raise ProbeFailed(f"nothing of {length} tokens was found in the cache")

    async def structured_output(self) -> None:
        """What comes under a mask is what the grammar says."""
        prompt = self._prompt(3)
        text = ConstraintText("regex", "[0-9]{3}")
        constraint = await self._constraints.compile(text, prompt)
        checker = constraint.fork()
        for event in await self._complete(prompt, 3, constraint=constraint):
            assert event.token is not None
            mask = checker.mask()
            if not mask[event.token // 8] >> event.token % 8 & 1:
                raise ProbeFailed(f"token {event.token} came, which the grammar forbids")
            checker.accept(event.token)

    async def largest_image(self) -> None:
        """An image of as many features as a prompt has room for goes in front of some text."""
        assert self._images is not None
        media, images = await self._images.probe(self._limits.max_context - 8)
        await self._complete((*media, *self._prompt(2)), 2, images=images)

    def _prompt(self, length: int, start: int = 0) -> tuple[int, ...]:
        """Ids of single bytes' ranks, so never markers or images."""
        return tuple((start + i) % min(256, self._limits.vocab_size) for i in range(length))

    async def _complete(
        self, prompt: tuple[int, ...], tokens: int, **fields: object
    ) -> list[TokenEvent]:
        self._count += 1
        sampling = SamplingParams(max_tokens=tokens, ignore_eos="constraint" not in fields)
        request = Request(f"probe-{self._count}", prompt, sampling, **fields)  # pyright: ignore[reportArgumentType]
        stream = self._loop.submit(request)
        events: list[TokenEvent] = []
        try:
            while not events or events[-1].finish_reason is None:
                events += await stream.next()
        finally:
            stream.close()
        return events
