"""Times of whole steps with and without a kernel, as `scripts/tune_kernels.py` leaves them."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.shapes import ModelShape

FOLDER = Path(__file__).parent / "tuned"
MARGIN = 0.02
"""What part of a step's time a difference must reach to count: less may be noise."""


class Measured(NamedTuple):
    """One step of one model at one workload, timed with an op as XLA and as a kernel."""

    op: str
    step: str
    """Its kind: "decode", "prefill" or "verify"."""
    shape: ModelShape
    batch: int
    """Rows that decode or verify; a prefill step has the span of one of them."""
    context: int
    """Tokens cached per row, those of the step included."""
    xla_us: float
    """With this op as XLA, and those kernels that were chosen before it."""
    gpu_us: float
    about: str = ""
    """Of what it was measured, such as "4 of 93 layers"."""


def measured_steps(device_kind: str, folder: Path = FOLDER) -> tuple[Measured, ...]:
    """What was measured on this kind of device; nothing when there is no file for it.

    Raises ValueError naming the file that cannot be read as measurements.
    """
    path = tuned_file(device_kind, folder)
    if not path.is_file():
        return ()
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return tuple(Measured(**{**step, "shape": ModelShape(**step["shape"])}) for step in steps)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not hold measured steps: {error!r}") from None


def write_measured(
    device_kind: str, steps: tuple[Measured, ...], about: dict[str, str], folder: Path = FOLDER
) -> Path:
    """Replace the file of this kind of device; `about` says when and with what it was made."""
    rows = [{**step._asdict(), "shape": dataclasses.asdict(step.shape)} for step in steps]
    path = tuned_file(device_kind, folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"device": device_kind, **about, "steps": rows}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def tuned_file(device_kind: str, folder: Path = FOLDER) -> Path:
    """Where this kind of device has its measurements."""
    name = "".join(c if c.isalnum() else "-" for c in device_kind.lower())
    return folder / f"{name}.json"


def merged(old: Sequence[Measured], new: Sequence[Measured]) -> tuple[Measured, ...]:
    """The old measurements, but for those of models and workloads that were measured anew."""
    again = {_subject(step) for step in new}
    return (*(step for step in old if _subject(step) not in again), *new)


def nearest(
    steps: Sequence[Measured], op: str, shape: ModelShape, batch: int, context: int
) -> tuple[Measured, ...]:
    """Of each kind of step, the measurement of this op and model at the nearest workload.

    Distances are in powers of two.
    """
    fitting = [step for step in steps if step.op == op and step.shape == shape]

    def distance(step: Measured) -> float:
        return abs(math.log2(step.batch / batch)) + abs(math.log2(step.context / context))

    kinds = dict.fromkeys(step.step for step in fitting)
    return tuple(min((s for s in fitting if s.step == kind), key=distance) for kind in kinds)


def worthwhile(steps: Sequence[Measured]) -> bool:
    """Whether the kernel makes a kind of step faster and no kind slower, each by `MARGIN`."""
    ratios = [step.gpu_us / step.xla_us for step in steps]
    return any(r <= 1 - MARGIN for r in ratios) and all(r < 1 + MARGIN for r in ratios)


def _subject(step: Measured) -> tuple[ModelShape, int, int]:
    return step.shape, step.batch, step.context
