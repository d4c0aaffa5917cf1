"""What a disturbed run has left, compared with the undisturbed run of the same seed."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore.parallel.checkpoint.inspection.diff import diff
from mcore.parallel.checkpoint.inspection.output import Output
from mcore.parallel.checkpoint.inspection.verify import verify

# What a clock, or the number of starts, decides.
_OF_THE_MACHINE = ("time/", "throughput/", "memory/", "straggler/", "step-time")
Point = tuple[str, int]


def newest_good(run: Path) -> int:
    """The step of the last checkpoint whose every byte is as it was saved; 0: none."""
    found = [path for path in (run / "checkpoints").glob("step_*") if path.suffix == ""]
    return max((step_of(path) for path in found if is_good(path)), default=0)


def step_of(checkpoint: Path) -> int:
    """The step in its name."""
    return int(checkpoint.name.removeprefix("step_"))


def is_good(checkpoint: Path) -> bool:
    """Whether every byte is as it was saved."""
    return verify(checkpoint, None, _silent()) == 0


def _silent() -> Output:
    return Output(io.StringIO(), io.StringIO(), as_json=False)


def differences(run: Path, reference: Path, mlflow_uri: str | None) -> Iterator[str]:
    """What is wrong with the run."""
    last = f"checkpoints/step_{newest_good(reference):08d}"
    if not (run / last).is_dir() or diff(reference / last, run / last, [], None, _silent()):
        yield "the final weights differ from the undisturbed run"
    points, wrong = points_of(run), list(_unreadable(run))
    yield from wrong
    expected = _comparable(points_of(reference))
    yield from _compared("metrics.jsonl", points, expected)
    if mlflow_uri is not None:
        yield from _compared("MLflow", mlflow_points(run, mlflow_uri), expected)
    if not (run / "loss.png").is_file():
        yield "there is no loss curve"


def points_of(run: Path, since: float = 0.0) -> list[tuple[Point, Any]]:
    """Each metric at each step, as often as the file has it, of those written since a time."""
    records = [json.loads(line) for line in _lines(run) if _is_json(line)]
    return [
        ((name, record["step"]), value)
        for record in records
        if record["time"] >= since
        for name, value in record.items()
        if name not in ("step", "time")
    ]


def _lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def _unreadable(run: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(run), start=1):
        if not _is_json(line):
            yield f"metrics.jsonl:{number} is no JSON: {line[:80]!r}"


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def mlflow_points(run: Path, uri: str) -> list[tuple[Point, Any]]:
    """Each metric at each step, as often as MLflow has it."""
    from mlflow.tracking import MlflowClient

    if not (run / "mlflow.json").is_file():  # the server was away all the time
        return []
    client = MlflowClient(uri)
    run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
    found = client.get_run(run_id)
    status = [] if found.info.status == "FINISHED" else [(("status", 0), found.info.status)]
    return status + [
        ((name, metric.step), metric.value)
        for name in found.data.metrics
        for metric in client.get_metric_history(run_id, name)
    ]


def _comparable(points: list[tuple[Point, Any]]) -> dict[Point, Any]:
    return {point: value for point, value in points if not point[0].startswith(_OF_THE_MACHINE)}


def _compared(
    where: str, points: list[tuple[Point, Any]], expected: dict[Point, Any]
) -> Iterator[str]:
    doubled = [point for point, count in Counter(p for p, _ in points).items() if count > 1]
    if doubled:
        yield f"{where}: {len(doubled)} doubled points, such as {doubled[:3]}"
    found = _comparable(points)
    missing = sorted(set(expected) - set(found))
    if missing:
        yield f"{where}: {len(missing)} missing points, such as {missing[:3]}"
    if unexpected := sorted(set(found) - set(expected)):
        yield f"{where}: {len(unexpected)} points too many, such as {unexpected[:3]}"
    differing = [p for p in sorted(set(found) & set(expected)) if found[p] != expected[p]]
    if differing:
        yield f"{where}: {len(differing)} other values, such as {differing[:3]}"
