"""The engine: requests in, token events out, one device step at a time."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.cache.offload import HostTier
from k3jax.cache.prefix import PrefixEntry
from k3jax.cache.store import PrefixStore
from k3jax.config import K3Config
from k3jax.engine.arrival import choices_of
from k3jax.engine.batch import Packer
from k3jax.engine.checks import checked_request
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.events import last_event, token_event, wanted_logprobs
from k3jax.engine.kernel_plan import kernel_plan
from k3jax.engine.prefix_copies import read_prefix, write_prefix
from k3jax.engine.request import (
    FinishReason,
    Request,
    TokenEvent,
)
from k3jax.engine.sampling import TokenHistory
from k3jax.engine.scheduler import Scheduler, SchedulerConfig
from k3jax.engine.sequence import Emission, Phase, Sequence, StepPlan
from k3jax.engine.stats import EngineStats
from k3jax.engine.step import StepInputs, StepOutput, StepState, jitted_history, jitted_step
from k3jax.model.params import K3Params
from k3jax.state import DecodeState
from k3jax.state.latent import page_bytes
from k3jax.state.recurrent import slot_bytes
from k3jax.state.transfer import PAGES_AT_ONCE, PrefixArrays
from pallas_kernels.implementation import KernelPlan, use_plan

MAX_LOGPROBS = 20
"""Alternatives that a step finds when some row asks for log-probabilities."""


class QueueFull(Exception):
    """`max_waiting` sequences are waiting already."""


class StepFailed(Exception):
    """A step raised. All requests have ended and the state is fresh; the engine can go on."""


@dataclass(frozen=True)
class CacheChange:
    """A prefix became resumable (`stored`), or ceased to be."""

    tokens: tuple[int, ...]
    stored: bool


class Engine:
    """Continuous batching of one model on one device. All methods belong to one thread."""

    def __init__(
        self,
        params: K3Params,
        config: K3Config,
        engine_config: EngineConfig | None = None,
        *,
        plan: KernelPlan | None = None,
    ):
        """Plan the kernels and allocate the pools.

        `plan` replaces what `EngineConfig.kernels` and measurements decide; `kernel_plan` holds it.
        Raises ValueError naming the setting that cannot be.
        """
        self.params, self.config = params, config
        settings = (engine_config or EngineConfig()).resolve(config)
        self.settings = settings
        self._dtype = settings.dtype or params.embed.dtype
        self.kernel_plan = plan or kernel_plan(
            params,
            config,
            settings.kernels,
            page_size=settings.page_size,
            batch=settings.max_rows,
            context=settings.max_context,
        )
        self.store = PrefixStore(
            num_pages=settings.num_pages,
            num_slots=settings.num_slots,
            page_size=settings.page_size,
            keep_prefixes=settings.prefix_cache,
        )
        self.store.on_change = self._note_change
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_rows=settings.max_rows,
                prefill_shapes=settings.prefill_shapes,
                decode_rows=settings.decode_rows,
                checkpoint_interval=settings.checkpoint_interval,
            ),
            self.store,
        )
        self._packer = Packer(
            config,
            max_rows=settings.max_rows,
            page_size=settings.page_size,
            contexts=settings.contexts,
            media_embedding=None
            if config.vision is None
            else np.asarray(params.embed[config.vision.media_token_id], np.float32),
        )
        self.state = self._fresh_state()
        self.host = self._host_tier() if settings.host_bytes else None
        self._live: dict[str, list[Sequence]] = {}
        self._events: list[TokenEvent] = []
        self._changes: list[CacheChange] = []
        self._in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self._lanes: dict[int, tuple[Sequence, int]] = {}
        self._arrivals = 0
        self._steps = 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError naming the wrong field, or QueueFull."""
        settings = self.settings
        request = checked_request(
            request,
            self.config,
            max_context=settings.max_context,
            max_choices=settings.max_choices,
        )
        if request.id in self._live:
            raise ValueError(f"request {request.id!r} is already running")
        if len(self.scheduler.waiting) + request.n > settings.max_waiting:
            raise QueueFull(f"{len(self.scheduler.waiting)} sequences are waiting")
        choices = choices_of(
            request,
            self.config,
            max_context=settings.max_context,
            share_prompt=settings.prefix_cache,
            arrival=self._arrivals,
        )
        self._arrivals += len(choices)
        for sequence in choices:
            if sequence.budget == 0:
                sequence.phase = Phase.FINISHED
                self._events.append(last_event(sequence, FinishReason.LENGTH, sequence.submitted))
                continue
            self._live.setdefault(request.id, []).append(sequence)
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; False if it is not running or waiting."""
        return self._end(request_id, FinishReason.ABORT)

    def _end(self, request_id: str, reason: FinishReason, error: str = "") -> bool:
        sequences = self._live.pop(request_id, [])
        for sequence in sequences:
            self.scheduler.abort(sequence)
            self._events.append(last_event(sequence, reason, time.monotonic(), error=error))
        return bool(sequences)

    def _break(self, sequence: Sequence, error: Exception) -> None:
        """End a request whose constraint raised, and nobody else's."""
        text = f"its constraint raised {type(error).__name__}: {error}"
        self._end(sequence.request.id, FinishReason.ERROR, text)

    def step(self) -> list[TokenEvent]:
        """Dispatch the next step, then take in the one before: the host works beside the device.

        Raises StepFailed when a step does; every request has then ended and been dropped.
        """
        try:
            if self.host is not None:
                self.host.collect()
            plan = self.scheduler.plan()
            if plan is not None:
                self.dispatch(plan)
            self.absorb(0 if plan is None else 1)
        except Exception as error:
            self._start_over()
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        events, self._events = self._events, []
        return events

    def run(self) -> Iterator[TokenEvent]:
        """Step until nothing is left to do, yielding events as they come."""
        while self.has_work:
            yield from self.step()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._live or self._in_flight or self._events)

    @property
    def settings_table(self) -> dict[str, Any]:
        """The resolved settings by name."""
        return dataclasses.asdict(self.settings)

    def warm_up(
        self,
        progress: Callable[[str, int, int], None] | None = None,
        *,
        compiled: Callable[[str, Any], None] | None = None,
    ) -> None:
        """Compile every bucket by running it on padding; `progress(what, number, total)`.

        `compiled` is told XLA's memory analysis of each step before it first runs; what it raises
        ends the warm-up. Raises ValueError while requests run: their token histories would be
        overwritten.
        """
        if self._live or self._in_flight:
            raise ValueError("warm_up: requests are running; it belongs before the first one")
        programs = list(self._programs())
        for number, (name, inputs, run) in enumerate(programs):
            if progress is not None:
                progress(name, number, len(programs))
            if compiled is not None and inputs is not None:
                compiled(name, self._memory(inputs()))
            run()
            jax.block_until_ready(self.state)

    def stats(self) -> EngineStats:
        """Counts at this moment."""
        return EngineStats.of(self.scheduler, self.host, self.state, self._steps)

    def flush_cache(self) -> None:
        """Forget all cached prefixes, those in host memory too."""
        for entry in self.store.tree.entries():
            self._note_change(entry, False)
        self.store.clear()
        if self.host is not None:
            self.host.clear()

    def drain_cache_changes(self) -> list[CacheChange]:
        """Prefixes that became or ceased to be resumable since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # One step

    def dispatch(self, plan: StepPlan) -> None:
        """Send a planned step to the device."""
        for row in plan.rows:
            sequence = row.sequence
            visit = (sequence, sequence.preemptions)
            if self._lanes.get(sequence.lane) != visit:
                self._lanes[sequence.lane] = visit
                self._enter(sequence)
        inputs = self._packer.pack(plan)
        output = self._run(inputs)
        self.scheduler.dispatched(plan)
        self._in_flight.append((plan, output))
        self._steps += 1
        for sequence, error in plan.broken:
            self._break(sequence, error)

    def _run(self, inputs: StepInputs) -> StepOutput:
        with use_plan(self.kernel_plan):
            output, self.state = jitted_step(
                self.params, self.config, inputs, self.state, logprobs=MAX_LOGPROBS
            )
        return output

    def absorb(self, keep: int) -> None:
        """Take in the results of all but the `keep` latest steps."""
        while len(self._in_flight) > keep:
            self._absorb(*self._in_flight.popleft())

    def _enter(self, sequence: Sequence) -> None:
        self._packer.admit(sequence)
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
        if sequence.sampling.penalized:
            known = np.zeros(self.config.vocab_size, np.bool_)
            known[list(sequence.request.prompt)] = True
            output = np.bincount(
                sequence.tokens[sequence.num_prompt :], minlength=self.config.vocab_size
            )
            self.state = jitted_history(
                self.state, np.int32(sequence.lane), known, output.astype(np.int32)
            )

    def _absorb(self, plan: StepPlan, output: StepOutput) -> None:
        if not any(row.emits for row in plan.rows):
            jax.block_until_ready(output.tokens)
            self.scheduler.absorb(plan, [0] * len(plan.rows))
            return
        tokens = np.asarray(output.tokens).tolist()
        found = None
        if any(row.emits and row.sequence.sampling.logprobs is not None for row in plan.rows):
            found = jax.device_get((output.logprobs, output.top_ids, output.top_logprobs))
        now = time.monotonic()
        for emission in self.scheduler.absorb(plan, tokens):
            sequence = emission.sequence
            if sequence not in self._live.get(sequence.request.id, ()):
                continue  # ended by another choice of its request, whose constraint raised
            self._events.append(self._event(emission, found, now))
            if sequence.constraint is not None and emission.finish_reason is None:
                try:
                    sequence.constraint.accept(emission.token)
                except Exception as error:
                    self._break(sequence, error)

    def _event(self, emission: Emission, found: Any, now: float) -> TokenEvent:
        sequence, token = emission.sequence, emission.token
        if sequence.first_token is None:
            sequence.first_token = now
        logprobs = None if found is None else wanted_logprobs(emission, found)
        if emission.finish_reason is None:
            return token_event(sequence, token, logprobs)
        self._forget(sequence)
        return last_event(sequence, emission.finish_reason, now, token, logprobs)

    def _forget(self, sequence: Sequence) -> None:
        rest = [s for s in self._live.get(sequence.request.id, []) if s is not sequence]
        if rest:
            self._live[sequence.request.id] = rest
        else:
            self._live.pop(sequence.request.id, None)

    def _start_over(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)
        self._in_flight.clear()
        self.scheduler.reset()
        self.flush_cache()
        self._events.clear()
        self.state = self._fresh_state()

    # Set-up

    def _fresh_state(self) -> StepState:
        settings = self.settings
        return StepState(
            decode=DecodeState.init(
                self.config,
                num_slots=settings.num_slots,
                num_pages=settings.num_pages,
                page_size=settings.page_size,
                dtype=self._dtype,
            ),
            history=TokenHistory.init(settings.max_rows, self.config.vocab_size),
            last_tokens=jnp.zeros(settings.max_rows, jnp.int32),
        )

    def _host_tier(self) -> HostTier:
        settings = self.settings
        tier = HostTier(
            settings.host_bytes,
            self.store,
            read=self._read_prefix,
            write=self._write_prefix,
            slot_bytes=slot_bytes(self.config, self._dtype),
            page_bytes=page_bytes(self.config, settings.page_size, self._dtype),
            least_tokens=settings.host_least_tokens,
        )
        self.store.offload = tier.offload
        self.scheduler.promote = tier.promote
        return tier

    def _read_prefix(self, slot: int, pages: Seq[int]) -> PrefixArrays:
        return read_prefix(self.state.decode, slot, pages)

    def _write_prefix(
        self, slot: int, pages: Seq[int], arrays: PrefixArrays, skip: int = 0
    ) -> None:
        decode = write_prefix(self.state.decode, slot, pages, arrays, skip)
        self.state = self.state.replace(decode=decode)

    def _programs(
        self,
    ) -> Iterator[tuple[str, Callable[[], StepInputs] | None, Callable[[], object]]]:
        """Name, inputs if it is a step, and what runs it."""
        shapes = [*self.settings.prefill_shapes, *((n, 1) for n in self.settings.decode_rows)]
        for rows, width in shapes:
            for pages in self._packer.context_pages:
                context = pages * self.settings.page_size
                if width > context:
                    continue
                name = f"{rows} x {width} tokens, context {context}"
                shape = (rows, width, pages)
                idle = partial(self._packer.idle, *shape)
                yield name, idle, partial(self._run_idle, idle)
                if self.config.vision is not None and rows == 1 and width > 1:
                    idle = partial(self._packer.idle, *shape, images=True)
                    yield f"{name}, images", idle, partial(self._run_idle, idle)
        yield "token histories", None, self._run_history
        if self.host is not None:
            yield "prefixes to and from the host", None, self._run_prefix

    def _run_idle(self, inputs: Callable[[], StepInputs]) -> None:
        self._run(inputs())

    def _memory(self, inputs: StepInputs) -> Any:
        """The analysis of a step's program, which the call that follows then need not compile."""
        with use_plan(self.kernel_plan):
            lowered = jitted_step.lower(
                self.params, self.config, inputs, self.state, logprobs=MAX_LOGPROBS
            )
            return lowered.compile().memory_analysis()

    def _run_history(self) -> None:
        vocab = self.config.vocab_size
        self.state = jitted_history(
            self.state, np.int32(0), np.zeros(vocab, np.bool_), np.zeros(vocab, np.int32)
        )

    def _run_prefix(self) -> None:
        arrays = jax.device_get(self._read_prefix(0, [0] * PAGES_AT_ONCE))
        self._write_prefix(-1, [-1] * PAGES_AT_ONCE, arrays)

    def _note_change(self, entry: PrefixEntry, stored: bool) -> None:
        self._changes.append(CacheChange(entry.tokens, stored))
