"""The slow ranks of a run by report: written to its folder, read, and counted."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks.jsonl import append_record, as_float, records_of
from mcore.observe.sinks.run_folder import RunFolder
from mcore.observe.straggler.outliers import Outlier

logger = logging.getLogger(__name__)

_MAX_RANKS = 64  # in a report

Verdicts: TypeAlias = dict[int, tuple[Outlier, ...]]  # by step, of every report


def log_slow_ranks(run_dir: str | os.PathLike[str], step: int, slow: Sequence[Outlier]) -> None:
    """Write the slow ranks of a report to a run's folder. The run's page shows them by step.

    One process calls it after each report, even if no rank is slow. If a run returns to a
    checkpoint and writes a step again, its entries replace those of this and later steps. Only the
    first 64 ranks are kept. No communication. If the file cannot be written, it logs a warning.

    Args:
        run_dir: Folder of the run, as passed to :class:`mcore.observe.RunLog`.
        step: The step of the report.
        slow: The ``stragglers`` of a :class:`mcore.observe.StragglerReport`, or some of them.

    Example:
        >>> import tempfile
        >>> from mcore.observe import Outlier
        >>> folder = Path(tempfile.mkdtemp())
        >>> log_slow_ranks(folder, 10, [Outlier("forward", 1, "node1", 40.0, 10.0, 9.0, 0.25)])
        >>> (folder / "slow_ranks.jsonl").read_text()  # doctest: +ELLIPSIS
        '{"step": 10, "slow": [{"metric": "forward", "rank": 1, "host": "node1", ...}]}\\n'
    """
    path = RunFolder(Path(run_dir)).slow_ranks
    named = [
        {  # JSON has no NaN and no infinity
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(one).items()
        }
        for one in slow
    ]
    try:
        append_record(path, {"step": step, "slow": named[:_MAX_RANKS]})
    except OSError as error:
        warn_once(logger, "cannot write the slow ranks to %s: %s", path, error.strerror)


def read_slow_ranks(path: Path) -> Verdicts:
    """Return the slow ranks of every report by step. Damaged lines are left out."""
    verdicts: Verdicts = {}
    if not path.is_file():
        return verdicts
    for record in records_of(path):
        step, slow = record["step"], record.get("slow")
        # The run returned to a checkpoint: drop the reports that it repeats.
        while verdicts and next(reversed(verdicts)) >= step:
            verdicts.popitem()
        if isinstance(slow, list):
            verdicts[step] = tuple(_parse(slow))
    return verdicts


@dataclass(frozen=True)
class SlowRank:
    """A rank that was slow by a metric. ``worst`` is the largest of its :func:`factor`."""

    rank: int
    host: str
    device: str
    metric: str
    worst: float
    steps: tuple[int, ...]  # of the reports that name it


def slow_ranks(verdicts: Verdicts) -> list[SlowRank]:
    """Return each slow rank with host, device and metric, sorted by the number of reports."""
    found: dict[tuple[int, str, str, str], list[tuple[int, float]]] = {}
    for step, slow in verdicts.items():
        for one in slow:
            key = one.rank, one.host, one.device, one.metric
            found.setdefault(key, []).append((step, factor(one)))
    ranks = [
        SlowRank(*key, max(times for _, times in named), tuple(step for step, _ in named))
        for key, named in found.items()
    ]
    return sorted(ranks, key=lambda one: (-len(one.steps), one.steps[0]))


def factors_by_rank(verdicts: Verdicts) -> dict[int, dict[int, float]]:
    """Return the worst factor by step of each rank that was ever slow, 1 if it was not slow."""
    ranks = sorted({one.rank for slow in verdicts.values() for one in slow})
    found = {rank: dict.fromkeys(verdicts, 1.0) for rank in ranks}
    for step, slow in verdicts.items():
        for one in slow:
            found[one.rank][step] = max(found[one.rank][step], factor(one))
    return found


def factor(one: Outlier) -> float:
    """Return the time of a rank divided by that of the fastest rank, or by its own best time.

    Device readings, and times without a score, are divided by the median.
    """
    # A low clock or utilisation is slow, as is a long time or a high temperature.
    is_low_bad = one.metric in ("clock_mhz", "util_pct")
    is_time = not is_low_bad and one.metric != "temp_c"
    times = 1 / one.score if is_time and one.score > 0 else _divide(one.value, one.median)
    return _divide(one.median, one.value) if is_low_bad else times


def _divide(value: float, other: float) -> float:
    ratio = value / other if other else math.nan
    return ratio if math.isfinite(ratio) else 1.0


def _parse(slow: Sequence[Any]) -> Iterator[Outlier]:
    for one in slow:
        if isinstance(one, Mapping) and isinstance(one.get("rank"), int):
            metric, host, device = (str(one.get(key, "")) for key in ("metric", "host", "device"))
            numbers = {key: as_float(one.get(key)) for key in ("value", "median", "z", "score")}
            yield Outlier(metric, one["rank"], host, device=device, **numbers)
