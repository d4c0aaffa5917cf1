"""The folder of a run: its metrics, its trackers' run ids, and what they have not taken yet."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WITHOUT_FOLDER = Path("mcore-spool")


@dataclass(frozen=True)
class RunFolder:
    """Paths in the folder of a run, and the notes that its starts leave to each other."""

    path: Path

    @property
    def metrics(self) -> Path:
        """JSON objects, one or more for each step."""
        return self.path / "metrics.jsonl"

    @property
    def slow_ranks(self) -> Path:
        """JSON objects, one for each comparison of the ranks: who was slow."""
        return self.path / "slow_ranks.jsonl"

    @property
    def spool(self) -> Path:
        """What trackers have not taken."""
        return self.path / "spool"

    @property
    def notes(self) -> Path:
        """Run ids by tracker."""
        return self.path / "trackers.json"

    def run_id(self, tracker: str) -> str | None:
        """Return the id that an earlier start noted for a tracker."""
        return self._read().get(tracker, {}).get("run_id") or None

    def note(self, tracker: str, facts: Mapping[str, Any]) -> None:
        """Note facts about the run in a tracker."""
        with _NOTING:
            notes = self._read() | {tracker: dict(facts)}
            self.path.mkdir(parents=True, exist_ok=True)
            partial = self.notes.with_name(f"{self.notes.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(notes, indent=2) + "\n")
            partial.replace(self.notes)

    def _read(self) -> dict[str, Any]:
        try:
            notes = json.loads(self.notes.read_text())
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) else {}


def run_folder_of(settings: Any) -> RunFolder | None:
    """Return the run's folder that logger settings name, if they name one."""
    given = getattr(settings, "run_dir", None)
    return RunFolder(Path(given)) if isinstance(given, (str, os.PathLike)) else None


def spool_folder_of(settings: Any) -> Path:
    """Return where spool files go: into the run's folder, else into the current one."""
    folder = run_folder_of(settings)
    return _WITHOUT_FOLDER.absolute() if folder is None else folder.spool.absolute()


_NOTING = threading.Lock()
