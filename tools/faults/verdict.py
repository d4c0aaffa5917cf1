"""The files of a disturbed run, compared with the undisturbed run of the same seed."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mcore.parallel.checkpoint.inspection.contents import Output
from mcore.parallel.checkpoint.inspection.diff import diff
from mcore.parallel.checkpoint.inspection.verify import verify
from results.journal import read_journal

# Metrics that depend on a clock or on the number of starts.
_OF_THE_MACHINE = ("time/", "throughput/", "memory/", "straggler/", "step-time")
Point = tuple[str, int]


def newest_good(run: Path) -> int:
    """The step of the last undamaged checkpoint. 0 if there is none."""
    found = [path for path in (run / "checkpoints").glob("step_*") if path.suffix == ""]
    return max((step_of(path) for path in found if is_good(path)), default=0)


def step_of(checkpoint: Path) -> int:
    """The step in its name."""
    return int(checkpoint.name.removeprefix("step_"))


def is_good(checkpoint: Path) -> bool:
    """Whether every byte is as it was saved."""
    return verify(checkpoint, None, _make_silent_output()) == 0


def _make_silent_output() -> Output:
    return Output(io.StringIO(), io.StringIO(), as_json=False)


def differences(run: Path, reference: Path, mlflow_uri: str | None) -> Iterator[str]:
    """The differences of a run from the reference, each as a sentence."""
    last = f"checkpoints/step_{newest_good(reference):08d}"
    if not (run / last).is_dir() or diff(
        reference / last, run / last, [], None, _make_silent_output()
    ):
        yield "the final weights differ from the undisturbed run"
    broken: list[str] = []
    points = points_of(run, on_broken=broken.append)
    yield from broken
    expected = _select_comparable(points_of(reference))
    yield from _compare("metrics.jsonl", points, expected)
    if mlflow_uri is not None:
        yield from _compare("MLflow", mlflow_points(run, mlflow_uri), expected)
    if not (run / "loss.png").is_file():
        yield "there is no loss curve"


def points_of(
    run: Path, since: float = 0.0, on_broken: Callable[[str], object] = lambda line: None
) -> list[tuple[Point, Any]]:
    """Each metric at each step, as often as the file has it, written since a time."""
    records = read_journal(run / "metrics.jsonl", lambda data: {**data}, on_broken)
    return [
        ((name, record["step"]), value)
        for record in records
        if record["time"] >= since
        for name, value in record.items()
        if name not in ("step", "time")
    ]


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


def _select_comparable(points: list[tuple[Point, Any]]) -> dict[Point, Any]:
    return {point: value for point, value in points if not point[0].startswith(_OF_THE_MACHINE)}


def _compare(
    place: str, points: list[tuple[Point, Any]], expected: dict[Point, Any]
) -> Iterator[str]:
    found = _select_comparable(points)
    counts = Counter(point for point, _ in points)
    for problem, wrong in (
        ("doubled points", [point for point, count in counts.items() if count > 1]),
        ("missing points", sorted(expected.keys() - found.keys())),
        ("points too many", sorted(found.keys() - expected.keys())),
        (
            "other values",
            [p for p in sorted(found.keys() & expected.keys()) if found[p] != expected[p]],
        ),
    ):
        if wrong:
            yield f"{place}: {len(wrong)} {problem}, such as {wrong[:3]}"
