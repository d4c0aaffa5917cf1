"""The MLflow run of a job: opened while training starts, continued by later starts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from mcore.observe import config_params
from mcore.observe.files import open_plain, replacing
from mcore.observe.sinks import (
    MlflowConnection,
    MlflowRun,
    TrackingServer,
    mlflow_metric_name,
    open_mlflow,
    records_of,
)
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.mlflow_target import MlflowTarget, read_facts

_EXPERIMENT = "pretrain"
_WAIT_AT_THE_END_S = 10.0
_WAIT_WHEN_IT_FAILED_S = 2.0
_JOURNAL_OF_MANY = bytes.fromhex("d9d505f920a163d7")  # after the name of a super-journal


@dataclasses.dataclass(eq=False)
class JobRun:
    """The MLflow run of the logging rank.

    After the logging rank was killed, MLflow shows the run as running until the next start.

    Args:
        settings: shown with the run.
        folder: the job's folder, which stores the id of the run.
        target: the server, database or file.
        first_step: number of steps of earlier starts. Their missing metrics are sent.
        is_ours: whether the job still holds the folder. If not, nothing more is sent.

    Attributes:
        logger: the MLflow logger of the state. Queues metrics from the start.
        is_starting: whether it is opening or sending queued metrics, which slows this rank's steps.
    """

    settings: Settings
    folder: RunFolder
    target: MlflowTarget
    first_step: int
    is_ours: Callable[[], bool]
    is_starting: bool = True

    def __post_init__(self) -> None:
        self._started_s = time.time()
        self.logger = MlflowRun(self._connect, name=f"MLflow at {self.target.shown}")
        self.logger.closing_s = _WAIT_AT_THE_END_S
        self.logger.open_in_background()

    def _connect(self) -> MlflowConnection:
        try:
            connection = self._open()
        except Exception:
            self.is_starting = False  # the server is unreachable, and retries cost little
            raise
        return dataclasses.replace(connection, server=_Writer(connection.writer, self))

    def _open(self) -> MlflowConnection:
        """Continue the run whose id is in the folder if it still exists, else open a new run."""
        # MLflow's telemetry thread changes the environment: a thread that copies it may crash.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        folder, target = self.folder, self.target
        if target.is_server:
            TrackingServer(target.uri).check()
        if target.is_own_file:
            _make_database(folder, MlflowClient)
        client = MlflowClient(target.uri)
        run_id = _find_earlier_run(client, folder, target)
        if client.get_experiment_by_name(_EXPERIMENT) is None:
            place = folder.mlflow_artifacts.absolute().as_uri() if target.is_own_file else None
            client.create_experiment(_EXPERIMENT, artifact_location=place)
        run = open_mlflow(
            _EXPERIMENT, folder.path.absolute().name, tracking_uri=target.uri,
            params=None if run_id else config_params(self.settings), run_id=run_id,
            only_new_steps=True,
        )  # fmt: skip
        self.check_ours()
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
        _write_facts(folder, target, client.get_run(run.run_id).info)
        self._send_earlier(run)
        return run.open()

    def _send_earlier(self, run: MlflowRun) -> None:
        """Send metrics of earlier starts that MLflow lacks. Closes ``run``."""
        metrics, received = self.folder.metrics, min(run.open().last_steps.values(), default=0)
        for record in records_of(metrics) if metrics.exists() else ():
            step = record.pop("step")
            if not received < step <= self.first_step:
                continue
            values = {
                mlflow_metric_name(n): math.nan if v is None else v for n, v in record.items()
            }
            run.log_metrics(values, step, time_s=self._started_s)
        run.release()
        if run.num_missing:
            raise ConnectionError(f"{run.num_missing} values of earlier steps were not received")

    def check_ours(self) -> None:
        """Raise RuntimeError if a later start of the job has claimed the folder."""
        if not self.is_ours():
            raise RuntimeError("a later start of the job uses the run folder and the MLflow run")

    def end(self, status: str) -> None:
        """Send the remaining metrics and set the status, within seconds."""
        self.logger.closing_s = _WAIT_WHEN_IT_FAILED_S
        with contextlib.suppress(Exception):  # an error here must not hide the error of the job
            self.logger.close(status)

    def summary(self) -> str:
        """The command or address that shows the ended run."""
        run, shown = self.logger, self.target.shown
        if run.num_missing or not run.is_open:
            return (
                f"{shown} did not receive {run.num_missing} of {run.num_logged} values. "
                f"They are in {self.folder.metrics}"
            )
        if self.target.is_server:
            facts = read_facts(self.folder)
            page = f"#/experiments/{facts['experiment_id']}/runs/{facts['run_id']}"
            return f"{shown.rstrip('/')}/{page}"
        return f"hatch run mlflow ui --backend-store-uri {shlex.quote(shown)}"


def warn_like_the_job() -> None:
    """Prefix the library's warnings, in the whole process, as lines of the job."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("pretrain: %(message)s"))
    logging.getLogger("mcore.observe.sinks").addHandler(handler)
    # The summary names the values that have not arrived.
    runs = logging.getLogger("mcore.observe.sinks.delivery.tracker_run")
    runs.addFilter(lambda record: "have not arrived" not in str(record.msg))


class _Writer:
    """Writes only while the job holds its folder: a frozen job may wake after a successor."""

    def __init__(self, writer: Any, job: JobRun) -> None:
        self._writer = writer
        self._job = job

    def log_batch(self, run_id: str, metrics: Sequence[Any]) -> None:
        self._job.check_ours()
        try:
            self._writer.log_batch(run_id, metrics=metrics)
        finally:
            self._job.is_starting = False

    def set_terminated(self, run_id: str, status: str) -> None:
        self._job.check_ours()
        self._writer.set_terminated(run_id, status)


def _make_database(folder: RunFolder, client: Any) -> None:
    """Create the store under another name: MLflow never completes a half-created store."""
    target = folder.mlflow_database
    if target.exists():
        os.close(open_plain(target, os.O_RDWR))
        # The journal of an interrupted write may end with a name. SQLite deletes that file.
        journal = target.with_name(f"{target.name}-journal")
        with contextlib.suppress(FileNotFoundError), open(journal, "rb", opener=open_plain) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(_JOURNAL_OF_MANY)))
            if file.read() == _JOURNAL_OF_MANY:
                raise OSError(errno.EPERM, "it names another file: remove it", str(journal))
        return
    logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # it logs each table
    partial = target.with_suffix(".db.partial")
    partial.unlink(missing_ok=True)
    os.close(open_plain(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    client(f"sqlite:///{partial}").search_experiments(max_results=1)
    partial.replace(target)


def _find_earlier_run(client: Any, folder: RunFolder, target: MlflowTarget) -> str | None:
    from mlflow.exceptions import MlflowException

    facts = read_facts(folder)
    if "run_id" not in facts or facts.get("tracking_uri") != _choose_stored_uri(target):
        return None
    run_id: str = facts["run_id"]
    try:
        found = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run_id if found.info.lifecycle_stage == "active" else None


def _write_facts(folder: RunFolder, target: MlflowTarget, info: Any) -> None:
    facts = {
        "tracking_uri": _choose_stored_uri(target),
        "experiment_id": info.experiment_id,
        "run_id": info.run_id,
    }
    with replacing(folder.mlflow_facts) as file:
        file.write(json.dumps(facts, indent=2).encode() + b"\n")


def _choose_stored_uri(target: MlflowTarget) -> str | None:
    return None if target.is_own_file else target.shown
