"""``metrics.jsonl``: read and cut back up to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records_up_to(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The records of steps up to this one, of a file that may grow or be replaced meanwhile."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # a killed process leaves the last one cut off
                record = json.loads(line)
                if record["step"] <= step:
                    yield record


def forget_later_steps(path: Path, step: int) -> None:
    """Drop what an earlier start logged after the checkpoint that this one goes on from."""
    if not path.exists():
        return
    partial = path.with_suffix(".jsonl.partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records_up_to(path, step))
    partial.replace(path)
