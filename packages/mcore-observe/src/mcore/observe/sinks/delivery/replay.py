"""Sends to trackers the metrics that a dead process left in the folder of its run."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from mcore.observe.runs.config import LoggerConfig
from mcore.observe.sinks import mlflow
from mcore.observe.sinks.delivery.spool import SpoolOwner, spool_files
from mcore.observe.sinks.delivery.tracker_run import Opening
from mcore.observe.sinks.run_folder import RunFolder
from mcore.observe.sinks.trackers import TRACKERS


def replay(
    folder: str | os.PathLike[str], *, mlflow_uri: str | None = None, trust_run: bool = False
) -> Iterator[str]:
    """Send the metrics that have not arrived in trackers, each value once, and end their runs.

    Values that a tracker has are not sent a second time, whenever the process died. Comet is an
    exception: it opens a new experiment. Runs of living processes are skipped.

    Args:
        folder: A run's folder, or the folder of spool files that a message has named.
        mlflow_uri: MLflow's server. None uses MLFLOW_TRACKING_URI, else the address that the
            folder names, without credentials.
        trust_run: Whether to send metrics and credentials to the address that the folder names.

    Yields:
        A sentence for each run of a tracker, and one before metrics are sent to another address
        than expected.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: An address in the folder is used only if the run is trusted.
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
        try:
            yield from _replay_file(owner, given, mlflow_uri, trust_run)
        finally:
            owner.close()


def _replay_file(
    owner: SpoolOwner, folder: Path, mlflow_uri: str | None, trust_run: bool
) -> Iterator[str]:
    facts = owner.contents.facts
    spec = next((spec for spec in TRACKERS if spec.name == facts.get("tracker")), None)
    kept = facts.get("settings")
    if spec is None or spec.is_local or not isinstance(kept, dict):
        raise ValueError(f"{owner.path} is damaged: it does not name its tracker and settings")
    settings = LoggerConfig()
    # A newer version may have written settings that this one lacks.
    for name in {field.name for field in dataclasses.fields(settings)} & kept.keys():
        # Output, code, environment and key are those of the process that sends, not of the run.
        if "_log_" not in name and name != "comet_api_key":
            setattr(settings, name, kept[name])
    hiding: AbstractContextManager[None] = nullcontext()
    if not trust_run and settings.wandb_save_dir is not None:
        settings.wandb_save_dir = str(folder)  # W&B writes here, and nowhere else
    if spec is mlflow.TRACKER:
        said, is_trusted = _choose_address(settings, mlflow_uri, trust_run)
        hiding = nullcontext() if is_trusted else _hide_credentials()
        if said:
            yield f"{spec.label}: {said}"
    opening = Opening(settings, facts.get("params"), run_id=facts.get("run_id") or None)
    others = spool_files(owner.path.parent, spec.name)
    with hiding:
        run = spec.open(opening)
        try:
            run.open()
            sent = run.send_left(owner)
        except BaseException:
            run.closing_s = 0.0
            run.release()
            raise
        # A living process that continues the run ends it itself.
        if any(_has_owner(path) for path in others if path != owner.path):
            run.release()
        else:
            run.close(facts.get("status", "KILLED"))
    yield f"{spec.label}: {sent} values sent to the run {run.run_id}".rstrip()


def _choose_address(
    settings: LoggerConfig, mlflow_uri: str | None, trust_run: bool
) -> tuple[str, bool]:
    """Set MLflow's address. Return a remark, and whether the user and not the folder chose it."""
    kept = str(settings.mlflow_tracking_uri or "")
    given = mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if mlflow_uri is None and kept and trust_run and "***" not in kept:
        return "", True
    if given is not None or not kept:
        settings.mlflow_tracking_uri = given
        differs = bool(mlflow_uri is None and kept) and given != kept
        more = f"MLFLOW_TRACKING_URI is used, not {kept} (--trust-run uses it)"
        return (more if differs else ""), True
    if "***" in kept:
        raise ValueError(f"the password of {kept} is not stored: give --mlflow-uri")
    if kept.startswith(("http://", "https://")):
        return f"sent without credentials to {kept} (--trust-run or --mlflow-uri send them)", False
    if kept != mlflow.DEFAULT_URI:  # a file of the user, which MLflow would fill with tables
        raise ValueError(f"the folder names {kept}: give --mlflow-uri, or --trust-run to use it")
    return "", False


@contextmanager
def _hide_credentials() -> Iterator[None]:
    """Hide the credentials of MLflow from MLflow: its variables, and files of the home folder."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as home:
        for name in before:
            if name.startswith(("MLFLOW_TRACKING_", "DATABRICKS_", "AWS_")):
                del os.environ[name]
        os.environ.update(HOME=home, USERPROFILE=home, NETRC=os.devnull)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _has_owner(path: Path) -> bool:
    try:
        SpoolOwner(path).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
