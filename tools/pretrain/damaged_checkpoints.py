"""Checkpoints of a run that cannot be used, so that a start goes on from an earlier one."""

from __future__ import annotations

from pathlib import Path

from mcore.parallel.checkpoint import (
    CheckpointingException,
    is_complete_checkpoint,
    load_sharded_state_dict,
)
from pretrain.checkpoints import first_problem, step_of
from pretrain.run_folder import RunFolder
from pretrain.usage import UsageError


def damaged_after(folder: RunFolder, step: int) -> dict[Path, str]:
    """What is wrong with each damaged checkpoint of a later step, oldest first.

    Call it before there is a process group: it reads checkpoints as one process.

    Args:
        folder: the run; what its saves left unfinished is no checkpoint.
        step: -1 for all of them.
    """
    entries = sorted(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
    return {
        entry: _damage(entry)
        for entry in entries
        if entry.is_dir() and step_of(entry) > step and not is_complete_checkpoint(entry)
    }


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that a new one of its step can be saved; returns the path.

    Raises:
        UsageError: it cannot be renamed.
    """
    number, aside = 1, checkpoint.with_name(f"{checkpoint.name}.damaged")
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
    try:
        return checkpoint.rename(aside)
    except OSError as error:
        raise UsageError(f"cannot rename the damaged {checkpoint}: {error.strerror}") from None


def _damage(checkpoint: Path) -> str:
    path = checkpoint.absolute()
    try:
        load_sharded_state_dict({}, path)
    except CheckpointingException as error:
        said = first_problem(error).removeprefix(f"cannot load {path}: ")
        return said.replace(f"{path}/", "").removeprefix(f"{path} ")
    return "it is not complete"
