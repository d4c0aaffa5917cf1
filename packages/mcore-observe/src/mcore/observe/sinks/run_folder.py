"""The folder of a run: its metrics, its trackers' run ids, and metrics that wait for trackers."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore.observe.files import open_plain, replacing
from mcore.observe.sinks.delivery.spool import lock

logger = logging.getLogger(__name__)

_WITHOUT_FOLDER = Path("mcore-spool")
_NOTING = threading.Lock()


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run, and the notes that one start leaves for the next."""

    path: Path

    @property
    def metrics(self) -> Path:
        """JSON objects, one or more for each step."""
        return self.path / "metrics.jsonl"

    @property
    def slow_ranks(self) -> Path:
        """JSON objects, one for each comparison of the ranks: the slow ones."""
        return self.path / "slow_ranks.jsonl"

    @property
    def spool(self) -> Path:
        """Folder of the metrics that have not arrived in trackers."""
        return self.path / "spool"

    @property
    def notes(self) -> Path:
        """Run ids by tracker."""
        return self.path / "trackers.json"

    def set_aside(self, before_s: float) -> None:
        """Rename the files of an earlier run that is not continued, with one WARNING."""
        left = [file for file in (self.metrics, self.slow_ranks) if _is_left(file, before_s)]
        if self.metrics not in left:
            return
        number = 1
        while any(_add_number(file, number).exists() for file in left):
            number += 1
        for file in left:
            file.rename(_add_number(file, number))
        logger.warning(
            "%s had the metrics of an earlier run, which are now in %s. To continue a run, load "
            "its counters before the first step, else give each run a separate folder",
            self.path,
            _add_number(self.metrics, number).name,
        )

    def run_id(self, tracker: str) -> str | None:
        """Return the id that an earlier start noted for a tracker."""
        return self._read_notes().get(tracker, {}).get("run_id") or None

    def note(self, tracker: str, facts: Mapping[str, Any]) -> None:
        """Note facts about the run in a tracker."""
        with _NOTING:  # trackers open in different threads and share the file
            self.replace_json(self.notes, self._read_notes() | {tracker: dict(facts)})

    def replace_json(self, file: Path, content: Mapping[str, Any]) -> None:
        """Replace a file of the folder in one step."""
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write(json.dumps(content, indent=2).encode() + b"\n")

    def _read_notes(self) -> dict[str, Any]:
        try:
            with open(self.notes, opener=open_plain) as file:  # a pipe would never end
                notes = json.load(file)
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}


def _add_number(file: Path, number: int) -> Path:
    return file.with_name(f"{file.stem}.{number}{file.suffix}")


def _is_left(file: Path, before_s: float) -> bool:
    """Return whether a file has content from before a time, and no run is writing it."""
    try:
        with file.open("rb") as opened:
            lock(opened.fileno())
            found = os.fstat(opened.fileno())
    except (FileNotFoundError, BlockingIOError):
        return False
    return found.st_size > 0 and found.st_mtime < before_s


def run_folder_of(settings: Any) -> RunFolder | None:
    """Return the run's folder in logger settings, or None."""
    given = getattr(settings, "run_dir", None)
    return RunFolder(Path(given)) if isinstance(given, (str, os.PathLike)) else None


def spool_folder_of(settings: Any) -> Path:
    """Return the folder of spool files: in the run's folder, else in the current one."""
    folder = run_folder_of(settings)
    return _WITHOUT_FOLDER.absolute() if folder is None else folder.spool.absolute()
