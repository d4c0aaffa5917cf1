"""Charts of runs as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from mcore.observe.runs.tables import Run
from mcore.observe.settings.extras import require_extra

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def draw_picture(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Draw a chart for each metric into a picture; needs matplotlib, and no display.

    Args:
        runs: The runs.
        path: The file; its ending says which format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; names the extra.

    Example:
        >>> draw_picture([Run.read("runs/first")], "first.png")  # doctest: +SKIP
    """
    require_extra("charts", "a picture")
    from matplotlib.figure import Figure

    names = _names(runs)
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = Figure(figsize=(5 * columns, 3 * rows), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, run in enumerate(runs):
            points = run.points(name)
            if points:
                steps, values = zip(*points, strict=True)
                axes.plot(steps, values, color=_colour(number), label=run.name, linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.curves))


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
