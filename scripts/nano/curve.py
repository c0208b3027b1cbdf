"""The loss curve of a run as a picture."""

import csv
import math
from pathlib import Path


def draw(folder: Path) -> None:
    """Draw `loss.png` from `loss.csv` (per task, log scale) and `exact.csv`, if there are any."""
    losses, exact = _columns(folder / "loss.csv"), _columns(folder / "exact.csv")
    if not losses:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for name, values in losses.items():
        if name in ("step", "tokens", "seconds"):
            continue
        width = 2.0 if name == "loss" else 0.8
        left.plot(losses["step"], values, label="all" if name == "loss" else name, linewidth=width)
    left.set(yscale="log", xlabel="step", ylabel="cross-entropy per token", title="Training loss")
    left.legend(fontsize=7, ncols=2)
    for name, values in exact.items():
        if name != "step" and not name.endswith("+"):
            right.plot(exact["step"], values, marker=".", label=name)
    right.set(xlabel="step", ylabel="share of exact replies", title="Held out, without thinking")
    if exact:
        right.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(folder / "loss.png", dpi=110)
    pyplot.close(figure)


def _columns(path: Path) -> dict[str, list[float]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name] or math.nan) for row in rows] for name in (rows or [{}])[0]}
