"""``loss.png``: train and validation loss over steps, drawn from the run's JSONL file."""

from __future__ import annotations

import json
from pathlib import Path

from pretrain.objective import Objective


def read_curve(metrics: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of every record that has the metric."""
    records = (json.loads(line) for line in metrics.read_text().splitlines())
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def draw_losses(metrics: Path, target: Path, objective: Objective) -> None:
    """Draw both curves; no display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (
        (objective.loss_name, "train", "-"),
        (objective.validation_name, "validation", "o--"),
    ):
        curve = read_curve(metrics, name)
        if curve:
            steps, values = zip(*curve, strict=True)
            axes.plot(steps, values, style, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{objective.loss_name} ({objective.unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
