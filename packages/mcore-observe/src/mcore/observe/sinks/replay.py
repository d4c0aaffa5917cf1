"""Sends to trackers what a dead process left in the folder of its run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore.observe.runs.config import LoggerConfig
from mcore.observe.sinks.background import BackgroundRun
from mcore.observe.sinks.base import Opening, Tracker
from mcore.observe.sinks.run_folder import RunFolder
from mcore.observe.sinks.spool import SpoolOwner, spool_files
from mcore.observe.sinks.trackers import TRACKERS


def replay(folder: str | os.PathLike[str], *, mlflow_uri: str | None = None) -> Iterator[str]:
    """Send what trackers have not taken, each value once, and end their runs.

    A value that the tracker has already is not sent again, whenever the process died; only Comet
    opens a new experiment. Runs of a process that is alive are left alone.

    Args:
        folder: A run's folder, or the one with spool files that a message has named.
        mlflow_uri: MLflow's server, where its address has a password, which no file keeps; None
            takes MLFLOW_TRACKING_URI.

    Yields:
        A sentence for each run of a tracker.

    Raises:
        FileNotFoundError: There is no such folder.
        Exception: What a tracker raised that still cannot be reached; nothing is lost.

    Example:
        >>> import tempfile
        >>> list(replay(tempfile.mkdtemp()))
        []
    """
    given = Path(folder)
    if not given.is_dir():
        raise FileNotFoundError(f"there is no folder {given}; give that of a run")
    inside = RunFolder(given).spool
    for path in spool_files(inside if inside.is_dir() else given):
        try:
            owner = SpoolOwner(path)
        except BlockingIOError:
            yield f"{path.name}: a process that is alive writes it and sends it itself"
            continue
        yield _replay(owner, mlflow_uri)


def _replay(owner: SpoolOwner, mlflow_uri: str | None) -> str:
    facts = owner.contents.facts
    tracker = next(t for t in TRACKERS if t.short_name == facts["tracker"])
    others = spool_files(owner.path.parent, tracker.short_name)
    run = _open(tracker, facts, mlflow_uri)
    try:
        run.open()
        sent = run.send_left(owner)
    except BaseException:
        run.release()
        raise
    if any(_has_owner(path) for path in others if path != owner.path):
        run.release()
    else:
        run.close(facts.get("status", "KILLED"))
    return f"{tracker.label}: {sent} values sent to the run {run.run_id}".rstrip()


def _open(tracker: Tracker, facts: dict[str, Any], mlflow_uri: str | None) -> BackgroundRun[Any]:
    settings = LoggerConfig()
    known = {field.name for field in dataclasses.fields(settings)}
    for name, value in facts["settings"].items():
        if name in known:
            setattr(settings, name, value)
    uri = settings.mlflow_tracking_uri or ""
    if mlflow_uri is not None or "***" in uri:
        settings.mlflow_tracking_uri = mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if settings.mlflow_tracking_uri is None:
            raise ValueError(f"the password of {uri} is not kept: give --mlflow-uri")
    opening = Opening(settings, facts.get("params"), run_id=facts.get("run_id") or None)
    run: BackgroundRun[Any] = tracker.open(opening)
    return run


def _has_owner(path: Path) -> bool:
    try:
        SpoolOwner(path).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
