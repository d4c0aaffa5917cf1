"""Runs read from their files, and their metrics as tables for a terminal or as a picture."""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore.observe.extras import require_extra
from mcore.observe.files import replacing
from mcore.observe.runs.slow_ranks import Verdicts, read_slow_ranks
from mcore.observe.sinks.jsonl import as_float, records_of
from mcore.observe.sinks.run_folder import RunFolder
from mcore.observe.sinks.secrets import config_params
from mcore.observe.terminal import plain, sparkline

_LATEST_S = 1e11  # since 1970, the year 5138: a larger number is no time
_MOST_CHARACTERS = 60  # of a name in a table
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


@dataclass(frozen=True)
class Run:
    """The metrics of a run: values by name and step, in the order of their first lines.

    A step that was logged twice has its last value. Values that are not finite are NaN. ``times``
    are in seconds since 1970 by step, for lines with a time. ``settings`` are texts by name without
    secrets, from the ``config.json`` next to the metrics. ``slow`` are the ranks in each report by
    step, from the file of :func:`log_slow_ranks`.
    """

    name: str
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    slow: Verdicts = field(default_factory=dict)

    def summarize(self, name: str, digits: int) -> tuple[list[str], int]:
        """Return steps, first, last, least and largest value of a metric, and the number of NaN."""
        points = self.points(name)
        finite = [value for _, value in points if math.isfinite(value)]
        ends = (points[0][1], points[-1][1], min(finite, default=math.nan))
        numbers = (*ends, max(finite, default=math.nan))
        texts = [f"{points[0][0]}-{points[-1][0]}", *(f"{n:.{digits}g}" for n in numbers)]
        return texts, len(points) - len(finite)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run.

        Args:
            path: The run's folder, or a file of a :class:`mcore.observe.JsonlSink`.

        Returns:
            The run, named after its folder.

        Raises:
            FileNotFoundError: The run has no metrics.

        Example:
            >>> import tempfile
            >>> from mcore.observe import JsonlSink
            >>> folder = Path(tempfile.mkdtemp())
            >>> JsonlSink(folder / "metrics.jsonl").log({"loss": 2.5}, 1)
            >>> Run.read(folder).curves
            {'loss': {1: 2.5}}
        """
        given = Path(path)
        file = RunFolder(given).metrics if given.is_dir() else given
        # A pipe in a folder would block. One that is given, such as /dev/stdin, is read.
        if not (file.is_file() or (file == given and file.exists())):
            raise FileNotFoundError(f"{given} has no metrics: there is no {file}")
        run = cls(
            given.absolute().name if given.is_dir() else given.absolute().parent.name,
            settings=_read_settings(file.parent / "config.json"),
            slow=read_slow_ranks(RunFolder(file.parent).slow_ranks),
        )
        for record in records_of(file, with_time=True):
            step = record.pop("step")
            time = record.pop("time", None)
            if isinstance(time, (int, float)) and 0 < time < _LATEST_S:
                run.times[step] = float(time)
            for name, value in record.items():
                if value is None or isinstance(value, (int, float)):
                    run.curves.setdefault(name, {})[step] = as_float(value)
        return run

    def match(self, names: Sequence[str]) -> list[str]:
        """Return the metrics with the given names, or that match patterns such as ``"lm *"``.

        Args:
            names: Names and patterns. A name counts as a pattern only if no metric is called so.

        Returns:
            The names of metrics, each once. All metrics if no names are given.

        Raises:
            KeyError: The run has no such metric.

        Example:
            >>> Run("r", {"lm loss": {1: 4.0}, "lr": {1: 0.1}}).match(["lm*"])
            ['lm loss']
        """
        found = dict.fromkeys(() if names else self.curves)
        for name in names:
            matching = [name] if name in self.curves else fnmatch.filter(self.curves, name)
            if not matching:
                raise KeyError(f"{self.name} has no metric {name!r}: it has {sorted(self.curves)}")
            found |= dict.fromkeys(matching)
        return list(found)

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return steps and values of a metric in order, none if the run lacks the metric."""
        return sorted(self.curves.get(name, {}).items())


def show(run: Run, names: Sequence[str] = ()) -> Iterator[str]:
    """Yield a table of a run's metrics with sparklines.

    Args:
        run: The run.
        names: The metrics, by name or pattern. None given means all.

    Yields:
        Lines.

    Raises:
        KeyError: The run lacks one of the metrics.
        ValueError: The run has no metrics.

    Example:
        >>> lines = list(show(Run("r", {"loss": {1: 4.0, 2: 2.0}})))
        >>> lines[1].split()[:6]
        ['loss', '1-2', '4', '2', '2', '4']
    """
    if not run.curves:
        raise ValueError(f"{run.name} has no metrics yet")
    rows: list[Sequence[str]] = []
    counts: list[int] = []
    for name in run.match(names):
        points = run.points(name)
        texts, count = run.summarize(name, 4)
        counts.append(count)
        rows.append((name, *texts, sparkline([value for _, value in points])))
    head: Sequence[str] = ("metric", "steps", "first", "last", "least", "largest", "")
    if any(counts):  # steps without a finite value
        head = (*head[:-1], "NaN", "")
        rows = [(*row[:-1], str(count), row[-1]) for row, count in zip(rows, counts, strict=True)]
    yield from _format_table([head, *rows])


def compare(runs: Sequence[Run], names: Sequence[str] = ()) -> Iterator[str]:
    """Yield a table of the metrics of several runs at their last common step.

    Args:
        runs: Two runs or more. Changes are relative to the first. A dash is a change from or to
            a value that is not finite, or a change that is too large.
        names: The metrics, by name or pattern. None given means all common metrics.

    Yields:
        Lines.

    Raises:
        KeyError: A run lacks one of the metrics.
        ValueError: The runs have no metric at the same step.

    Example:
        >>> for line in compare([Run("a", {"x": {1: 2.0, 2: 4.0}}), Run("b", {"x": {1: 3.0}})]):
        ...     print(line.encode("ascii", "replace").decode())
        metric  step  a  b  change  a  b
        x          1  2  3  +50.0%  ??  ?
    """
    shown = [run.name for run in runs]
    rows = [("metric", "step", *shown, *(["change"] * (len(runs) - 1)), "  ".join(shown))]
    matching = [run.match(names) for run in runs]
    for name in (name for name in matching[0] if all(name in each for each in matching)):
        by_step = [dict(run.points(name)) for run in runs]
        common = max(set.intersection(*map(set, by_step)), default=None)
        if common is None:
            continue
        before, *after = [values[common] for values in by_step]
        lines = "  ".join(sparkline(list(values.values())) for values in by_step)
        lost = [sum(not math.isfinite(v) for v in values.values()) for values in by_step]
        numbers = [
            f"{value:.4g}" + (f" ({count} NaN)" if count else "")
            for value, count in zip((before, *after), lost, strict=True)
        ]
        changes = [_format_change(before, value) for value in after]
        rows.append((name, str(common), *numbers, *changes, lines))
    if len(rows) == 1:
        raise ValueError(f"{' and '.join(shown)} have no metric at the same step")
    yield from _format_table(rows)


def _format_change(before: float, value: float) -> str:
    change = (value - before) / abs(before) if before else value - before
    text = f"{change:+.1%}" if before else f"{change:+.4g}"
    return text if math.isfinite(change) else "-"


def draw_picture(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Draw a chart for each metric into a picture. Needs matplotlib, but no display.

    Args:
        runs: The runs.
        path: The file. Its extension is the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. The message names the extra.

    Example:
        >>> draw_picture([Run.read("runs/first")], "first.png")  # doctest: +SKIP
    """
    require_extra("charts", "a picture")
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = Figure(figsize=(5 * columns, 3 * rows), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, run in enumerate(runs):
            points = run.points(name)
            if points:
                colour = _COLOURS[number % len(_COLOURS)]
                axes.plot(*zip(*points, strict=True), color=colour, label=run.name, linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    with replacing(path) as file:
        figure.savefig(file, dpi=100, format=Path(path).suffix[1:] or None)


def _read_settings(file: Path) -> dict[str, str]:
    """Return the settings that a run's job wrote, none if the file is missing or incomplete."""
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    nested = config.pop("settings", None) if isinstance(config, dict) else None
    return config_params(nested) | config_params(config)


def _format_table(raw: Sequence[Sequence[str]]) -> Iterator[str]:
    # Names come from files: they must not reach a terminal as they are.
    rows = [[*(plain(cell, _MOST_CHARACTERS) for cell in row[:-1]), plain(row[-1])] for row in raw]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others, last in rows:
        cells: Iterable[str] = (
            cell.rjust(width) for cell, width in zip(others, widths[1:-1], strict=True)
        )
        yield "  ".join([first.ljust(widths[0]), *cells, last]).rstrip()
