"""The engine's steps of a model at a workload: what they answer and take under any kernels."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.engine.kernel_plan import model_shape
from k3jax.engine.step import StepOutput
from pallas_kernels.implementation import Device, Implementation, KernelPlan, plan_kernels
from scripts.gpu.model_slice import StepProgram, random_state, step_inputs, verify_inputs
from scripts.gpu.selection import Ops

STEP_OPS: Mapping[str, tuple[str, ...]] = {
    "decode": ("kda_decode", "mla_decode", "experts", "residual_mix"),
    "prefill": ("kda_prefill", "mla_prefill", "experts", "residual_mix"),
    "verify": ("kda_verify", "kda_replay", "mla_decode", "experts", "residual_mix"),
}
"""The ops that each kind of step runs."""

VERIFY_TOKENS = 4
"""The last token and its drafts, of every row of a verification step."""

TOLERANCE = 0.2
"""Largest difference of log-probabilities between two forms of a step in bfloat16."""


class Model(NamedTuple):
    """Weights, and how they are to be run."""

    params: Any
    config: K3Config
    dtype: Any
    """Of activations and state."""
    page_size: int
    runs: Implementation
    """What kernels run as: GPU, or INTERPRET on a CPU."""
    device: Device

    def plan(self, ops: Collection[str]) -> KernelPlan:
        """These ops as kernels and all others as XLA."""
        shape = model_shape(self.params, self.config, page_size=self.page_size, dtype=self.dtype)
        return plan_kernels(shape, self.device, dict.fromkeys(ops, self.runs), measured=())


class Timing(NamedTuple):
    """How often to run a step: the median of `rounds`, each of some calls in a row."""

    rounds: int
    calls: int
    """At most; fewer where a round would take longer than `ROUND_SECONDS`."""


ROUND_SECONDS = 0.2


class Step:
    """One kind of step of a model: it holds the state that its calls pass on."""

    def __init__(self, kind: str, model: Model, batch: int, context: int, span: int) -> None:
        """`batch` rows that decode or verify drafts, or one row's prefill of `span` tokens.

        Each row then has `context` tokens. Raises ValueError for a context that is too short.
        """
        sizes = {"decode": (batch, 1), "verify": (batch, VERIFY_TOKENS), "prefill": (1, span)}
        rows, tokens = sizes[kind]
        if context <= tokens:
            raise ValueError(f"context = {context}, expected more than the {tokens} of a step")
        self.kind, self.model = kind, model
        self.name = f"{kind}, {rows} row{'s' if rows > 1 else ''}" + (
            f" of {tokens} tokens" if tokens > 1 else ""
        )
        self._inputs, self._after = self._given(rows, tokens, context)
        self._state: Any = None

    def _given(self, rows: int, tokens: int, context: int) -> tuple[Any, Any]:
        """The step's inputs, and for a verification those of the plain step that shows its state.

        Each place but the last of a verification allows its draft alone: all of them are right
        under any kernels, so that all are replayed.
        """
        config, page = self.model.config, self.model.page_size
        silent = np.zeros(rows, np.bool_)
        if self.kind != "verify":
            inputs = step_inputs(config, rows, context - tokens, tokens, page)
            return jax.device_put(inputs.replace(wants_logprobs=silent)), None
        inputs = verify_inputs(config, rows, context - tokens, tokens, page)
        masks = np.array(inputs.masks)
        masks[:, :-1] = 0
        row, place = np.ogrid[:rows, : tokens - 1]
        draft = np.asarray(inputs.tokens)[:, 1:]
        masks[row, place, draft // 32] = np.uint32(1) << (draft % 32).astype(np.uint32)
        spans = inputs.spans.replace(starts=np.asarray(inputs.spans.starts) - 1)
        after = step_inputs(config, rows, context - 1, 1, page).replace(wants_logprobs=silent)
        return jax.device_put((inputs.replace(masks=masks, spans=spans), after))

    def answer(self, ops: Collection[str]) -> StepOutput:
        """What the step says with these kernels, from a state that is always the same.

        Of a verification, what a plain step without kernels says after it.
        """
        self._state = None  # makes room
        self._state = random_state(
            self.model.config, self._inputs, self.model.page_size, self.model.dtype
        )
        last, plan = self._inputs, self.model.plan(ops)
        if self._after is not None:
            self._run(plan, self._inputs)
            last, plan = self._after, self.model.plan(())
        wants = jnp.ones_like(last.wants_logprobs)
        return jax.device_get(self._run(plan, last.replace(wants_logprobs=wants)))

    def times_us(self, choices: Sequence[Collection[str]], timing: Timing) -> list[float]:
        """Median microseconds of a step with each choice of kernels, the rounds interleaved.

        Each has had its `answer` first, which also compiles it.
        """
        plans = [self.model.plan(ops) for ops in choices]
        probes = [self._seconds(plan, 1) for plan in plans]
        calls = [max(1, min(timing.calls, int(ROUND_SECONDS / probe))) for probe in probes]
        rounds = [
            [self._seconds(plan, count) for plan, count in zip(plans, calls, strict=True)]
            for _ in range(timing.rounds)
        ]
        return [1e6 * statistics.median(times) for times in zip(*rounds, strict=True)]

    def _seconds(self, plan: KernelPlan, calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([self._run(plan, self._inputs).tokens for _ in range(calls)])
        return (time.perf_counter() - start) / calls

    def _run(self, plan: KernelPlan, inputs: Any) -> Any:
        program = StepProgram(self.model.config, plan)
        output, self._state = program.run(self.model.params, inputs, self._state)
        return output


class StepTrials:
    """Steps with choices of kernels, timed only where they answer as XLA does."""

    def __init__(
        self,
        steps: Mapping[str, Step],
        timing: Timing,
        say: Callable[[str], None],
        tolerance: float = TOLERANCE,
    ) -> None:
        """`steps` by kind; `say` is told what each first call of a choice came to."""
        self._steps, self._timing, self._say, self._tolerance = steps, timing, say, tolerance
        self._want: dict[str, StepOutput] = {}
        self._seen: set[tuple[str, Ops]] = set()
        self.failures: dict[tuple[str, Ops], str] = {}
        """What is wrong with a kind of step under a choice of kernels."""
        self.errors: dict[tuple[str, Ops], float] = {}
        """Disagreements with XLA alone."""
        self.slowest = 0.0
        """Seconds of the slowest first call."""

    def seen(self, kind: str, ops: Ops) -> bool:
        """Whether `right` has run it, so that it is compiled."""
        return (kind, ops) in self._seen

    def right(self, kind: str, ops: Ops) -> bool:
        """Whether the step runs and agrees with XLA's; it is found out once."""
        if not self.seen(kind, ops):
            self._seen.add((kind, ops))
            start = time.perf_counter()
            failure = self._failure(kind, ops)
            if failure is not None:
                self.failures[kind, ops] = failure
            found = f"differs by {self.errors.get((kind, ops), 0):.1e}"
            seconds = time.perf_counter() - start
            self.slowest = max(self.slowest, seconds)
            name = f"{self._steps[kind].name}, {' + '.join(ops) or 'all XLA'}"
            self._say(f"{name}: {failure or found}, {seconds:.1f} s")
        return (kind, ops) not in self.failures

    def times_us(self, kind: str, choices: Sequence[Ops]) -> list[float | None]:
        """`Step.times_us` of the choices that are `right`, None for the others."""
        right = [ops for ops in choices if self.right(kind, ops)]
        times = dict(zip(right, self._steps[kind].times_us(right, self._timing), strict=True))
        return [times.get(ops) for ops in choices]

    def _failure(self, kind: str, ops: Ops) -> str | None:
        try:
            if kind not in self._want:
                self._want[kind] = self._steps[kind].answer(())
            error = disagreement(self._steps[kind].answer(ops), self._want[kind])
        except Exception as failure:  # whatever a compiler or a device comes up with
            return f"FAILED: {type(failure).__name__}: {str(failure)[:300]}"
        self.errors[kind, ops] = error
        return None if error <= self._tolerance else f"WRONG: differs from XLA by {error:.1e}"


def disagreement(got: StepOutput, want: StepOutput) -> float:
    """The largest difference in log-probability of two steps' likeliest tokens.

    Where the steps chose different tokens, it is also how much likelier `want` finds its own.
    Infinite where something is not finite, or a chosen token not among the likeliest of `want`.
    """
    return max(
        _row_disagreement(*(_row(answer, row) for answer in (got, want)))
        for row in range(len(want.tokens))
    )


def _row(answer: StepOutput, row: int) -> tuple[int, dict[int, float]]:
    """The token chosen, and the log-probabilities of the likeliest."""
    assert answer.top_ids is not None and answer.top_logprobs is not None
    likeliest = zip(answer.top_ids[row].tolist(), answer.top_logprobs[row].tolist(), strict=True)
    return int(answer.tokens[row]), dict(likeliest)


def _row_disagreement(
    got: tuple[int, dict[int, float]], want: tuple[int, dict[int, float]]
) -> float:
    (token, here), (other, there) = got, want
    if not np.isfinite([*here.values(), *there.values()]).all() or token not in there:
        return float("inf")
    gap = there[other] - there[token]
    return max(gap, *(abs(here[i] - there[i]) for i in here.keys() & there.keys()))
