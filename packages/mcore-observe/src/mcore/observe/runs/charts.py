"""Charts of runs: a picture, or one page of HTML that needs nothing else."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mcore.observe.runs.tables import Run
from mcore.observe.settings.extras import require_extra

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_WIDTH, _HEIGHT, _MARGIN = 420, 180, 6
_MOST_POINTS = 1000  # of a curve in the page
_STYLE = (
    "body{font:14px sans-serif;margin:2em}figure{display:inline-block;margin:0 1em 1em 0}"
    "figcaption{font-weight:bold}svg{border:1px solid #ccc;background:#fff}"
    ".axis{display:flex;justify-content:space-between;color:#666;font-size:12px}"
)


def draw_page(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Write a page with a chart for each metric, which works without a network.

    Args:
        runs: The runs, each a curve in the charts of its metrics.
        path: The HTML file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.html"
        >>> draw_page([Run("first", {"loss": {1: 2.0, 2: 1.0}})], path)
        >>> "<svg" in path.read_text()
        True
    """
    title = html.escape(", ".join(run.name for run in runs))
    legend = "".join(
        f'<span style="color:{_colour(index)}">&#9632; {html.escape(run.name)}</span> '
        for index, run in enumerate(runs)
    )
    charts = "\n".join(_chart(name, runs) for name in _names(runs))
    Path(path).write_text(
        f'<!doctype html>\n<html><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1><p>{legend}</p>\n{charts}\n"
        "</body></html>\n",
        encoding="utf-8",
    )


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


def _chart(name: str, runs: Sequence[Run]) -> str:
    curves = [_thinned(run.points(name)) for run in runs]
    points = [point for curve in curves for point in curve if math.isfinite(point[1])]
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    lines = "".join(
        f'<polyline fill="none" stroke="{_colour(index)}" stroke-width="1.5" points="{line}"/>'
        for index, curve in enumerate(curves)
        for line in _lines(curve, (min(steps), max(steps)), (low, high))
    )
    label = html.escape(name)
    return (
        f"<figure><figcaption>{label}</figcaption>"
        f'<div class="axis"><span>{high:.5g}</span></div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}"><title>{label}</title>{lines}</svg>'
        f'<div class="axis"><span>{low:.5g}</span></div>'
        f'<div class="axis"><span>step {min(steps)}</span><span>{max(steps)}</span></div></figure>'
    )


def _lines(
    curve: Sequence[tuple[int, float]], steps: tuple[int, int], values: tuple[float, float]
) -> Iterator[str]:
    """Yield the parts of a curve between values that are not finite, as points of the drawing."""
    part: list[str] = []
    for step, value in [*curve, (0, math.nan)]:
        if math.isfinite(value):
            x = _MARGIN + _share(step, *steps) * (_WIDTH - 2 * _MARGIN)
            y = _HEIGHT - _MARGIN - _share(value, *values) * (_HEIGHT - 2 * _MARGIN)
            part.append(f"{x:.1f},{y:.1f}")
        elif part:
            yield " ".join(part)
            part = []


def _share(value: float, low: float, high: float) -> float:
    return 0.5 if high == low else (value - low) / (high - low)


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    every = math.ceil(len(points) / _MOST_POINTS) or 1
    return points[::every]
