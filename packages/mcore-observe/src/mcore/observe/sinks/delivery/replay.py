"""Sends to trackers the metrics that a dead process left in the folder of its run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore.observe.runs.config import LoggerConfig
from mcore.observe.sinks.delivery.spool import SpoolOwner, spool_files
from mcore.observe.sinks.delivery.tracker_run import Opening
from mcore.observe.sinks.run_folder import RunFolder
from mcore.observe.sinks.trackers import TRACKERS


def replay(folder: str | os.PathLike[str], *, mlflow_uri: str | None = None) -> Iterator[str]:
    """Send the metrics that have not arrived in trackers, each value once, and end their runs.

    Values that a tracker has are not sent a second time, whenever the process died. Comet is an
    exception: it opens a new experiment. Runs of living processes are skipped.

    Args:
        folder: A run's folder, or the folder of spool files that a message has named.
        mlflow_uri: MLflow's server, needed if its address has a password, which no file keeps.
            None uses MLFLOW_TRACKING_URI.

    Yields:
        A sentence for each run of a tracker.

    Raises:
        FileNotFoundError: There is no such folder.
        Exception: An error of a tracker that is still unreachable. Nothing is lost.

    Example:
        >>> import tempfile
        >>> list(replay(tempfile.mkdtemp()))
        []
    """
    given = Path(folder)
    if not given.is_dir():
        raise FileNotFoundError(f"there is no folder {given}; give the folder of a run")
    inside = RunFolder(given).spool
    for path in spool_files(inside if inside.is_dir() else given):
        try:
            owner = SpoolOwner(path)
        except BlockingIOError:
            yield f"{path.name}: skipped, since a living process writes and sends it"
            continue
        yield _replay_file(owner, mlflow_uri)


def _replay_file(owner: SpoolOwner, mlflow_uri: str | None) -> str:
    facts = owner.contents.facts
    spec = next(spec for spec in TRACKERS if spec.name == facts["tracker"])
    others = spool_files(owner.path.parent, spec.name)
    settings = _restore_settings(facts["settings"], mlflow_uri)
    opening = Opening(settings, facts.get("params"), run_id=facts.get("run_id") or None)
    run = spec.open(opening)
    try:
        run.open()
        sent = run.send_left(owner)
    except BaseException:
        run.release()
        raise
    # A living process that continues the run ends it itself.
    if any(_has_owner(path) for path in others if path != owner.path):
        run.release()
    else:
        run.close(facts.get("status", "KILLED"))
    return f"{spec.label}: {sent} values sent to the run {run.run_id}".rstrip()


def _restore_settings(kept: dict[str, Any], mlflow_uri: str | None) -> LoggerConfig:
    settings = LoggerConfig()
    # A newer version may have written settings that this one lacks.
    known = {field.name for field in dataclasses.fields(settings)}
    for name, value in kept.items():
        if name in known:
            setattr(settings, name, value)
    uri = settings.mlflow_tracking_uri or ""
    if mlflow_uri is not None or "***" in uri:
        settings.mlflow_tracking_uri = mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if settings.mlflow_tracking_uri is None:
            raise ValueError(f"the password of {uri} is not stored; give --mlflow-uri")
    return settings


def _has_owner(path: Path) -> bool:
    try:
        SpoolOwner(path).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
