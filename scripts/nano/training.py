"""The training loop of k3-nano: batches ahead, steps, measurements, checkpoints, the loss curve."""

import csv
import functools
import signal
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from k3jax.model.params import K3Params
from scripts.nano import objective, optimizer
from scripts.nano.corpus import (
    LONG,
    SHORT,
    TASK_NAMES,
    Encoder,
    Mode,
    held_out,
    held_out_row,
    make_batch,
    pad,
)
from scripts.nano.initial import initial_params
from scripts.nano.objective import Scores, Targets

Step = Any


@dataclass(frozen=True)
class Plan:
    """One training run."""

    folder: Path
    """Checkpoints, `loss.csv` and `loss.png` go here."""
    steps: int
    minutes: float
    """Stop (and save) after this much time, finished or not."""
    seed: int = 0
    rate: float = 1.0
    """Scales the step sizes."""
    measure_every: int = 150
    save_every: int = 100
    samples: int = 10
    """Held-out samples per task and mode in a measurement."""
    initial: K3Params | None = None
    """Start from these weights, experts as floats; by default from `initial_params`."""


@dataclass
class Progress:
    """What the loop knows between steps."""

    params: K3Params
    moments: optimizer.OptimizerState
    step: int = 0
    stop: bool = False
    exact: dict[str, float] = field(default_factory=dict)


def train(plan: Plan, config: K3Config, tokenizer: Tokenizer, *, quiet: bool = False) -> Progress:
    """Run (or go on with) `plan`; returns the last parameters, finished or not.

    Ctrl-C and SIGTERM finish the step at hand and save. `config` is `objective.trainable`.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer)
    params = plan.initial or initial_params(config, tokenizer, plan.seed)
    progress = Progress(params, optimizer.init(params))
    with ocp.CheckpointManager(
        (plan.folder / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
    ) as manager:
        _restore(manager, progress)
        with _interruptible(progress):
            _loop(plan, config, encoder, progress, manager, quiet)
        if progress.step > (manager.latest_step() or 0):
            _save(manager, progress)
    return progress


def finished(plan: Plan, progress: Progress) -> bool:
    """Whether all steps are done."""
    return progress.step >= plan.steps


def make_step(config: K3Config) -> Step:
    """The jitted step: parameters and moments are donated."""

    def step(
        params: K3Params,
        moments: optimizer.OptimizerState,
        batch: Targets,
        number: Any,
        factor: Any,
    ) -> tuple[K3Params, optimizer.OptimizerState, Scores]:
        gradient = jax.grad(objective.loss, has_aux=True)
        gradients, scores = gradient(params, config, batch)
        params, moments = optimizer.update(params, gradients, moments, scores.loads, number, factor)
        return params, moments, scores

    return jax.jit(step, donate_argnums=(0, 1))


def _loop(
    plan: Plan,
    config: K3Config,
    encoder: Encoder,
    progress: Progress,
    manager: ocp.CheckpointManager,
    quiet: bool,
) -> None:
    step_fn = make_step(config)
    exam = Exam(config, encoder, plan.samples)
    deadline = time.monotonic() + 60 * plan.minutes
    log = LossLog(plan.folder, progress.step)
    bar = tqdm(total=plan.steps, initial=progress.step, disable=quiet, unit="step", mininterval=5)
    batches = _batches(plan, encoder, progress.step)
    with bar:
        while not finished(plan, progress) and not progress.stop and time.monotonic() < deadline:
            batch, tokens = next(batches)
            factor = plan.rate * optimizer.rate(progress.step, plan.steps)
            progress.params, progress.moments, scores = step_fn(
                progress.params, progress.moments, batch, jnp.int32(progress.step), factor
            )
            progress.step += 1
            log.add(scores, tokens)
            bar.update()
            if progress.step % 10 == 0:
                bar.set_postfix_str(log.write(progress.step), refresh=False)
            last = finished(plan, progress)
            if progress.step % plan.measure_every == 0 or last:
                progress.exact = exam.measure(progress.params)
                log.exam(progress.step, progress.exact)
                shown = " ".join(f"{name}={share:.2f}" for name, share in progress.exact.items())
                bar.write(f"step {progress.step} held-out exact: {shown}")
            if progress.step % plan.save_every == 0:
                _save(manager, progress)
    batches.close()


def _batches(
    plan: Plan, encoder: Encoder, start: int
) -> Generator[tuple[Targets, int], None, None]:
    """Batches from step `start` on, made by a thread a few steps ahead."""

    def make(step: int) -> tuple[Targets, int]:
        batch = make_batch(encoder, plan.seed, step, step / plan.steps)
        return objective.targets(batch), int(batch.lengths.sum())

    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(make, step) for step in range(start, start + 4)]
        while True:
            yield waiting.pop(0).result()
            waiting.append(pool.submit(make, start + 4))
            start += 1


class Exam:
    """Held-out exercises, one to a row: right only if the most likely token is right everywhere.

    That is exactly what greedy generation needs to reproduce the answer (and its reasoning).
    """

    def __init__(self, config: K3Config, encoder: Encoder, samples: int) -> None:
        rng = np.random.default_rng(20_000)
        rows = []
        for name in TASK_NAMES[:-1]:
            for mode in (Mode(False), Mode(True, "max")):
                rows += [
                    (f"{name}{'+' if mode.thinking else ''}", held_out_row(encoder, one, mode))
                    for one in (held_out(rng, name, thinking=mode.thinking) for _ in range(samples))
                ]
        self._batches = []
        for size, width in (SHORT, LONG):
            low = 0 if width == SHORT[1] else SHORT[1]
            fitting = [(n, row) for n, row in rows if low < len(row.tokens) <= width]
            for start in range(0, len(fitting), size):
                part = fitting[start : start + size]
                names = [n for n, _ in part]
                filled = [row for _, row in part] + [part[0][1]] * (size - len(part))
                self._batches.append((names, objective.targets(pad(filled, width))))
        self._score = jax.jit(lambda params, batch: objective.loss(params, config, batch)[1])

    def measure(self, params: K3Params) -> dict[str, float]:
        """Share of exact replies by task; "+" marks thinking at effort max."""
        right: dict[str, list[float]] = {}
        for names, batch in self._batches:
            rows = np.asarray(self._score(params, batch).rows_right)
            for name, value in zip(names, rows, strict=False):
                right.setdefault(name, []).append(float(value))
        return {name: sum(values) / len(values) for name, values in sorted(right.items())}


class LossLog:
    """`loss.csv`: step, tokens, seconds, and per task the loss; `exact.csv` the measurements."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        _keep_rows(folder / "loss.csv", step)
        _keep_rows(folder / "exact.csv", step)
        self._losses, self._counts = np.zeros(len(TASK_NAMES)), np.zeros(len(TASK_NAMES))
        self._tokens, self._since = 0, time.monotonic()

    def add(self, scores: Scores, tokens: int) -> None:
        """Count one step in."""
        self._losses += np.asarray(scores.losses)
        self._counts += np.asarray(scores.counts)
        self._tokens += tokens

    def write(self, step: int) -> str:
        """Append a line for the steps since the last one; returns a short form of it."""
        seconds = time.monotonic() - self._since
        total = self._losses.sum() / self._counts.sum()
        with np.errstate(invalid="ignore"):
            each = self._losses / self._counts
        row: dict[str, Any] = {"step": step, "tokens": self._tokens, "seconds": round(seconds, 2)}
        row |= {"loss": round(float(total), 4)}
        row |= {name: round(float(v), 4) for name, v in zip(TASK_NAMES, each, strict=True)}
        _append(self._folder / "loss.csv", row)
        speed = self._tokens / seconds
        self._losses[:], self._counts[:] = 0, 0
        self._tokens, self._since = 0, time.monotonic()
        worst = " ".join(f"{n[:4]} {row[n]:.2f}" for n in ("sum", "sort", "recall", "call", "json"))
        return f"loss {total:.3f} {speed:.0f} tok/s {worst}"

    def exam(self, step: int, exact: dict[str, float]) -> None:
        """Append a measurement."""
        _append(self._folder / "exact.csv", {"step": step} | exact)


def _append(path: Path, row: dict[str, Any]) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def _keep_rows(path: Path, step: int) -> None:
    """Drop lines past `step`: they belong to a run that was cut off and is done again."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines[1:] if int(line.split(",")[0]) <= step]
        path.write_text("".join(lines[:1] + kept) if kept else "")
        if not kept:
            path.unlink()


def _save(manager: ocp.CheckpointManager, progress: Progress) -> None:
    tree = {"params": progress.params, "moments": progress.moments}
    manager.save(progress.step, args=ocp.args.StandardSave(jax.device_get(tree)), force=True)
    manager.wait_until_finished()


def _restore(manager: ocp.CheckpointManager, progress: Progress) -> None:
    step = manager.latest_step()
    if step is None:
        return
    like = {"params": progress.params, "moments": progress.moments}
    tree = manager.restore(step, args=ocp.args.StandardRestore(like))
    progress.params, progress.moments, progress.step = tree["params"], tree["moments"], step


class _interruptible:
    """While active, Ctrl-C and SIGTERM ask the loop to stop instead of killing it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> None:
        handler = functools.partial(setattr, self._progress, "stop")
        self._old = {
            number: signal.signal(number, lambda *_: handler(True))
            for number in (signal.SIGINT, signal.SIGTERM)
        }

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
