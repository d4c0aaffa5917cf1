"""Weights & Biases runs."""

from __future__ import annotations

import collections
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore.observe.extras import require_extra
from mcore.observe.settings.secrets import config_params, without_secrets
from mcore.observe.sinks.background import BackgroundRun, ClientRun
from mcore.observe.sinks.base import Opening, Tracker, accepts, plain_numbers
from mcore.observe.sinks.spool import StepMetrics
from mcore.observe.sinks.wandb_files import last_offline_step, wait_until_written

_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 143}
_PROBE_S = 5.0
# W&B's own process writes its file block by block: what it took last is lost when it is killed
# with the training process, so the spool keeps that much.
_KEPT_BACK_BYTES = 256 << 10


class WandbSink:
    """Hands metrics to anything with ``log(dict, step)``, one call for each step.

    Args:
        run: A W&B run, or the ``wandb`` module with a run open. Its steps must not go back.

    Example:
        >>> class Run:
        ...     def log(self, metrics, step):
        ...         print(metrics, step)
        >>> WandbSink(Run()).log({"lm loss": 2.5}, 1)
        {'lm loss': 2.5} 1
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics in one call; the client drops an empty name, so it gets another."""
        named = {name or "unnamed": value for name, value in plain_numbers(metrics).items()}
        self._run.log(named, step)

    def flush(self) -> None:
        """Wait until a run that is opened in the background has them; others send by themselves."""
        if isinstance(self._run, BackgroundRun):
            self._run.flush()

    def close(self, status: str = "FINISHED") -> None:
        """Finish the run, with an exit code unless it is ``"FINISHED"``."""
        if isinstance(self._run, BackgroundRun):
            self._run.close(status)
        else:
            _finish(self._run, status)


def _finish(run: Any, status: str) -> None:
    if status != "FINISHED" and accepts(run.finish, "exit_code"):
        run.finish(exit_code=_EXIT_CODES.get(status, 1))
    else:
        run.finish()


@dataclass(frozen=True)
class _Connection:
    """A W&B run, and the last step that it had when it was continued."""

    run: Any
    run_id: str
    last_step: int = -1


class WandbRun(ClientRun[_Connection]):
    """A W&B run that is opened in the background; metrics wait for it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: collections.deque[tuple[StepMetrics, int]] = collections.deque()
        self._held_bytes = 0

    def log(self, data: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics of one step in the background.

        Args:
            data: Numbers by name.
            step: The step, never smaller than before.
        """
        self.log_metrics(data, step)

    def finish(self, exit_code: int | None = None) -> None:
        """Finish the run.

        Args:
            exit_code: That of the process; None is that of the run's status.
        """
        self.close(None if exit_code is None else "FAILED" if exit_code else "FINISHED")

    def _client_of(self, connection: _Connection) -> Any:
        return connection.run

    def _id_of(self, connection: _Connection) -> str:
        return connection.run_id

    def _write(self, connection: _Connection, entries: Sequence[StepMetrics]) -> None:
        for entry in entries:
            if entry.step > connection.last_step:
                connection.run.log(dict(entry.metrics), entry.step)

    def _settle(self, entries: Iterable[StepMetrics]) -> None:
        for entry in entries:
            size = sum(len(name) + 24 for name in entry.metrics)
            self._held.append((entry, size))
            self._held_bytes += size
        arrived = []
        while self._held_bytes > _KEPT_BACK_BYTES:
            entry, size = self._held.popleft()
            self._held_bytes -= size
            arrived.append(entry)
        super()._settle(arrived)

    def _without_known(
        self, connection: _Connection, entries: Sequence[StepMetrics]
    ) -> Sequence[StepMetrics]:
        return [entry for entry in entries if entry.step > connection.last_step]

    def _end(self, connection: _Connection, status: str) -> None:
        _finish(connection.run, status)
        wait_until_written(connection.run)
        super()._settle([entry for entry, _ in self._held])
        self._held.clear()


def _open(opening: Opening) -> WandbRun:
    params = config_params(opening.config)
    run_id = opening.run_id or getattr(opening.settings, "wandb_run_id", None)
    is_new = run_id is None
    run_id = run_id or uuid.uuid4().hex[:8]
    if opening.spool is not None:
        opening.spool.note({"run_id": run_id})

    def connect() -> _Connection:
        require_extra("wandb", "wandb_project")
        with run.preparing():
            import wandb

            known = wandb.setup().settings
        mode = known.mode
        if mode in ("online", "shared"):
            _probe(known.base_url)
        with without_secrets("Weights & Biases"):
            return _connect(opening, params, run_id, is_new=is_new, is_online=mode == "online")

    run = WandbRun(connect, name="Weights & Biases", **opening.options())
    run.open_in_background()
    return run


def _probe(base_url: str) -> None:
    """Raise within seconds where no server answers: ``wandb.init`` would wait for minutes.

    At the end of a process even its library would wait for that call.
    """
    try:
        urllib.request.urlopen(base_url, timeout=_PROBE_S).close()
    except urllib.error.HTTPError:  # it answers
        return


def _connect(
    opening: Opening, params: Mapping[str, str], run_id: str, *, is_new: bool, is_online: bool
) -> _Connection:
    import wandb

    settings = opening.settings
    options: dict[str, Any] = {
        "project": settings.wandb_project,
        "name": settings.wandb_exp_name,
        "dir": settings.wandb_save_dir,
        "entity": settings.wandb_entity,
        "config": dict(params),
    }
    if is_new:
        return _Connection(wandb.init(**options, id=run_id), run_id)
    if is_online and opening.resume_step is not None:
        try:  # drops the later steps, where the server can
            source = f"{run_id}?_step={opening.resume_step}"
            return _Connection(wandb.init(**options, resume_from=source), run_id)
        except Exception:
            wandb.teardown()
    run = wandb.init(**options, id=run_id, resume="allow")
    last_step = (
        int(run.step) - 1 if is_online else last_offline_step(settings.wandb_save_dir, run_id)
    )
    return _Connection(run, run_id, last_step)


TRACKER = Tracker(
    attribute="wandb_logger",
    label="Weights & Biases",
    extra="wandb",
    asked_by="wandb_project",
    named_by="wandb_exp_name",
    settings=("wandb_project", "wandb_exp_name", "wandb_save_dir", "wandb_entity"),
    open=_open,
    adapt=WandbSink,
    module="wandb",
    restart=lambda run: run.finish(),
)
