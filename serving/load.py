"""How busy a worker is, in the words of the scheduler protocol."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax.engine.request import TokenEvent
from serving.engine_loop import EngineLoop

WINDOW_SECONDS = 5.0
"""What a generation rate is averaged over."""


class LoadMeter:
    """Reads an engine loop; `count` must be told of every step's events."""

    def __init__(self, loop: EngineLoop, *, max_rows: int, page_size: int) -> None:
        self._loop, self._max_rows, self._page_size = loop, max_rows, page_size
        self._tokens: deque[tuple[float, int]] = deque()

    def count(self, events: Sequence[TokenEvent]) -> None:
        """Count the tokens of one step."""
        tokens = sum(event.token is not None for event in events)
        if tokens:
            self._tokens.append((time.monotonic(), tokens))
        self._forget()

    def tokens_per_second(self) -> float:
        """Generated, over the last seconds."""
        self._forget()
        return sum(count for _, count in self._tokens) / WINDOW_SECONDS

    def read(self) -> pb.SchedulerLoad:
        """The load now."""
        stats = self._loop.stats
        # A router takes a worker whose usage is high for overloaded. Neither full rows nor pages of
        # cached prefixes, which make way for requests, are a reason to send a conversation away.
        used = stats.pages_running
        return pb.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=used * self._page_size,
            max_total_num_tokens=stats.pages_total * self._page_size,
            max_running_requests=self._max_rows,
            num_waiting_uncached_tokens=self._loop.waiting_prompt_tokens,
            token_usage=used / max(1, stats.pages_total),
            active_token_usage=used / max(1, stats.pages_total),
            gen_throughput=self.tokens_per_second(),
            cache_hit_rate=stats.hit_tokens / max(1, stats.query_tokens),
            utilization=stats.running / self._max_rows,
        )

    def record(self, sample: int, *, load_only: bool) -> common.EngineLoad:
        """The load as it goes with a batch of cache events."""
        load = self.read()
        return common.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            active_token_usage=load.active_token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            prefill_pending_tokens=load.num_waiting_uncached_tokens,
            sample=sample,
            load_only=load_only,
        )

    def _forget(self) -> None:
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._tokens and self._tokens[0][0] < oldest:
            self._tokens.popleft()
