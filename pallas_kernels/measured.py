"""Times of whole steps with and without a kernel, as `scripts/tune_kernels.py` leaves them."""

import dataclasses
import json
import math
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.shapes import ModelShape

FOLDER = Path(__file__).parent / "tuned"


class Measured(NamedTuple):
    """One step of one model at one workload, timed with an op as XLA and as a kernel."""

    op: str
    shape: ModelShape
    batch: int
    context: int
    """Tokens cached per row."""
    xla_us: float
    gpu_us: float


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


def nearest(
    steps: tuple[Measured, ...], op: str, shape: ModelShape, batch: int, context: int
) -> Measured | None:
    """The measurement of this op and model whose workload is nearest, in powers of two."""
    fitting = [step for step in steps if step.op == op and step.shape == shape]

    def distance(step: Measured) -> float:
        return abs(math.log2(step.batch / batch)) + abs(math.log2(step.context / context))

    return min(fitting, key=distance, default=None)
