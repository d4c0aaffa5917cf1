"""Weights & Biases: runs that are written in the background, and the files of offline runs."""

from __future__ import annotations

import collections
import contextlib
import glob
import json
import os
import struct
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore.observe.sinks.base import TrackerSpec, accepts
from mcore.observe.sinks.delivery.process_end import exit_code_of
from mcore.observe.sinks.delivery.spool import StepMetrics
from mcore.observe.sinks.delivery.tracker_run import ClientRun, Opening, TrackerRun
from mcore.observe.sinks.scalars import plain_numbers
from mcore.observe.sinks.secrets import config_params, without_secrets

_PROBE_S = 5.0
# W&B's process writes its file block by block. If it is killed with the training process, the
# last block is lost, so the spool keeps that much.
_KEPT_BACK_BYTES = 256 << 10
# The files have the format of LevelDB's log: blocks of records, and parts of records.
_BLOCK_BYTES = 32 << 10
_HEADER_BYTES = 7
_PARTS = (1, 2, 3, 4)  # a whole record, its first part, a middle part, its last part
_FIRST_PARTS = (1, 2)
_LAST_PARTS = (1, 4)
_WRITTEN_S = 10.0


class WandbSink:
    """Passes metrics to anything with ``log(dict, step)``, one call for each step.

    Args:
        run: A W&B run, or the ``wandb`` module with a run open. Its steps must not decrease.

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
        """Log the metrics in one call. An empty name, which W&B drops, becomes ``unnamed``."""
        named = {name or "unnamed": value for name, value in plain_numbers(metrics).items()}
        self._run.log(named, step)

    def flush(self) -> None:
        """Wait until a run that is written in the background has them. W&B flushes other runs."""
        if isinstance(self._run, TrackerRun):
            self._run.flush()

    def close(self, status: str = "FINISHED") -> None:
        """Finish the run, with an exit code unless it is ``"FINISHED"``."""
        if isinstance(self._run, TrackerRun):
            self._run.close(status)
        else:
            _finish(self._run, status, exit_code_of(status))


def _finish(run: Any, status: str, exit_code: int) -> None:
    if status != "FINISHED" and accepts(run.finish, "exit_code"):
        run.finish(exit_code=exit_code)
    else:
        run.finish()


@dataclass(frozen=True)
class _Connection:
    """A W&B run, and the last step that it had when it was continued."""

    run: Any
    run_id: str
    last_step: int = -1


class WandbRun(ClientRun[_Connection]):
    """A W&B run that is opened in the background. Metrics wait for it."""

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
            exit_code: Exit code of the process. None uses the run's status.
        """
        self.close(None if exit_code is None else "FAILED" if exit_code else "FINISHED")

    def get_client(self) -> Any:
        """Return W&B's run, waiting until it is open."""
        return self.open().run

    def _get_run_id(self, connection: _Connection) -> str:
        return connection.run_id

    def _write(self, connection: _Connection, entries: Sequence[StepMetrics]) -> None:
        for entry in entries:
            if entry.step > connection.last_step:
                connection.run.log(dict(entry.metrics), entry.step)

    def _settle(self, entries: Iterable[StepMetrics]) -> None:
        """Remove entries from the spool once W&B's process has surely written them."""
        for entry in entries:
            # The size of the record is a guess. If it is too low, more is kept back, which is safe.
            size = sum(len(name) + 24 for name in entry.metrics)
            self._held.append((entry, size))
            self._held_bytes += size
        arrived = []
        while self._held_bytes > _KEPT_BACK_BYTES:
            entry, size = self._held.popleft()
            self._held_bytes -= size
            arrived.append(entry)
        super()._settle(arrived)

    def _drop_known(
        self, connection: _Connection, entries: Sequence[StepMetrics]
    ) -> Sequence[StepMetrics]:
        return [entry for entry in entries if entry.step > connection.last_step]

    def _end_run(self, connection: _Connection, status: str) -> None:
        _finish(connection.run, status, self.exit_code)
        wait_until_written(connection.run)
        super()._settle([entry for entry, _ in self._held])
        self._held.clear()


def _open(opening: Opening) -> WandbRun:
    params = config_params(opening.config)
    run_id = opening.run_id or getattr(opening.settings, "wandb_run_id", None)
    is_new = run_id is None
    # Chosen here, not by W&B: a replay continues the run even if it was never opened.
    run_id = run_id or uuid.uuid4().hex[:8]
    if opening.spool is not None:
        opening.spool.note({"run_id": run_id})

    def connect() -> _Connection:
        TRACKER.require()
        with run.preparing():
            import wandb

            known = wandb.setup().settings
        if known.mode in ("online", "shared"):
            # Raises within seconds if no server responds: wandb.init would wait for minutes, and
            # the library waits for that call even at the end of the process.
            with contextlib.suppress(urllib.error.HTTPError):  # a response
                urllib.request.urlopen(known.base_url, timeout=_PROBE_S).close()
        with without_secrets(TRACKER.label):
            is_online = known.mode == "online"
            return _connect(opening, params, run_id, is_new=is_new, is_online=is_online)

    run = WandbRun(connect, name=TRACKER.label, **opening.options())
    run.open_in_background()
    return run


def _connect(
    opening: Opening, params: Mapping[str, str], run_id: str, *, is_new: bool, is_online: bool
) -> _Connection:
    import wandb

    settings = opening.settings
    records: dict[str, Any] = {}  # that may contain secrets
    if not getattr(settings, "wandb_log_console", False):
        records["console"] = "off"
    if not getattr(settings, "wandb_log_environment", False):
        records |= {"x_disable_meta": True, "x_save_requirements": False, "disable_git": True}
    options: dict[str, Any] = {
        "project": settings.wandb_project,
        "name": settings.wandb_exp_name,
        "dir": settings.wandb_save_dir,
        "entity": settings.wandb_entity,
        "config": dict(params),
        "settings": records,
    }
    if is_new:
        return _Connection(wandb.init(**options, id=run_id), run_id)
    if is_online and opening.resume_step is not None:
        try:  # drops the later steps, if the server supports it
            source = f"{run_id}?_step={opening.resume_step}"
            return _Connection(wandb.init(**options, resume_from=source), run_id)
        except Exception:
            wandb.teardown()
    run = wandb.init(**options, id=run_id, resume="allow")
    last_step = (
        int(run.step) - 1 if is_online else last_offline_step(settings.wandb_save_dir, run_id)
    )
    return _Connection(run, run_id, last_step)


def last_offline_step(save_dir: str | None, run_id: str) -> int:
    """Return the last step in the files of a run that was written offline, else -1."""
    folder = Path(save_dir or os.environ.get("WANDB_DIR") or ".") / "wandb"
    # Two starts within a second have folders with the same time. The later gets a suffix.
    files = folder.glob(f"offline-run-*/run-{glob.escape(run_id)}.wandb")
    return max((step for path in files for step in offline_steps(path)), default=-1)


def offline_steps(path: Path) -> Iterator[int]:
    """Yield the step of each record of metrics."""
    for record in _read_records(path.read_bytes(), _HEADER_BYTES):
        if record.WhichOneof("record_type") == "history":
            history = record.history
            named = (item.value_json for item in history.item if item.key == "_step")
            yield int(json.loads(next(named, str(history.step.num))))


def wait_until_written(run: Any) -> None:
    """Wait until a finished offline run's file has its end, and so all of its metrics.

    W&B's process writes the last block some time after ``finish`` has returned, and loses it if
    it is killed before that.
    """
    path = Path(run.settings.sync_file) if getattr(run, "offline", False) else None
    deadline_s = time.monotonic() + _WRITTEN_S
    while path is not None and path.exists() and not _has_end(path):
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.01)


def _has_end(path: Path) -> bool:
    """Return whether one of the last records is the run's end."""
    whole_blocks = max(0, path.stat().st_size // _BLOCK_BYTES - 2) * _BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(whole_blocks)
        data = file.read()
    ends = _read_records(data, 0 if whole_blocks else _HEADER_BYTES)
    return any(record.WhichOneof("record_type") == "exit" for record in ends)


def _read_records(data: bytes, at: int) -> Iterator[Any]:
    """Yield the complete records from a position to the end. The data starts with a block."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    record: bytes | None = None
    while at + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER_BYTES:  # no header fits: the rest of the block is padding
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += _HEADER_BYTES + size
        if kind not in _PARTS or at > len(data):  # a killed process leaves an incomplete end
            return
        if kind in _FIRST_PARTS:
            record = b""
        if record is None:  # its first part is in an earlier block
            continue
        record += data[at - size : at]
        if kind in _LAST_PARTS:
            yield messages.Record.FromString(record)
            record = None


TRACKER = TrackerSpec(
    name="wandb",
    label="Weights & Biases",
    module="wandb",
    wanted_by="wandb_project",
    named_by="wandb_exp_name",
    other_settings=("wandb_save_dir", "wandb_entity", "wandb_log_console", "wandb_log_environment"),
    open=_open,
    adapt=WandbSink,
    restart=lambda run: run.finish(),
)
