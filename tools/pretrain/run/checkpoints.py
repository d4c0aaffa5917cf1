"""The contents of a checkpoint, the one that a run continues from, and the damaged ones."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore.modules import MegatronModule
from mcore.observe import TrainState
from mcore.parallel import ProcessGroups
from mcore.parallel.checkpoint import (
    CheckpointingException,
    DamagedCheckpointError,
    SaveHandle,
    ShardedTensor,
    is_complete_checkpoint,
    latest_checkpoint,
    load_sharded_state_dict,
    make_sharded_object_for_checkpoint,
    save_sharded_state_dict,
)
from pretrain.model.randomness import restore_streams, save_streams
from pretrain.optim.adamw import TrainingOptimizer
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.usage import UsageError

_NAME = re.compile(r"step_(\d+)")


def latest_step(folder: RunFolder, option: str = "--resume") -> int:
    """The step of the last complete checkpoint; UsageError where there is none."""
    return _existing(_newest(folder), folder, option)


def step_to_load(folder: RunFolder, option: str = "--resume") -> int:
    """As :func:`latest_step`, but the error names damaged ones; before there is a process group."""
    try:
        return latest_step(folder, option)
    except UsageError as error:
        damaged = damaged_after(folder, -1)
        if not damaged:
            raise
        told = ", ".join(f"{path} ({problem})" for path, problem in damaged.items())
        raise UsageError(f"{error}, but damaged ones: {told}") from None


def has_checkpoint(folder: RunFolder) -> bool:
    """Whether a run has saved a complete checkpoint."""
    return _newest(folder) >= 0


def _newest(folder: RunFolder) -> int:
    """The step of the last complete checkpoint; -1 where there is none."""
    path = latest_checkpoint(folder.checkpoints) if folder.checkpoints.is_dir() else None
    return -1 if path is None else _step_of(path)


def _existing(step: int, folder: RunFolder, option: str = "--resume") -> int:
    if step < 0:
        raise UsageError(f"{option} {folder.path}: no complete checkpoint in {folder.checkpoints}")
    return step


def _step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 where it is not named as this job names them."""
    match = _NAME.fullmatch(checkpoint.name)
    return -1 if match is None else int(match[1])


def describe_latest(folder: RunFolder) -> str:
    """A sentence on how to continue after a run ended early."""
    try:
        step = latest_step(folder)
    except UsageError:
        return "There is no complete checkpoint yet."
    return (
        f"The last complete checkpoint is {folder.checkpoint(step)}; continue with: "
        f"{folder.resume_command}"
    )


def _first_problem(error: CheckpointingException) -> str:
    """The first of the problems that loading lists, without advice for callers of the library."""
    lines = str(error).splitlines()
    listed = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    return re.split(r"; |\. (?=[A-Z])", (listed or lines)[0])[0]


class CheckpointedState:
    """Model, optimizer, counters and random streams of a run, as one sharded state.

    All ranks build it over their parts of the same run and call its methods together.
    """

    def __init__(
        self,
        settings: Settings,
        model: MegatronModule,
        optimizer: TrainingOptimizer,
        train_state: TrainState,
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        self.settings = settings
        self.model = model
        self.optimizer = optimizer
        self.train_state = train_state
        self.groups = groups
        self.device = device

    def save(self, path: Path, *, async_: bool = False) -> SaveHandle | None:
        """Write a checkpoint, which appears under its name when all ranks have written it.

        With ``async_`` the save continues behind the returned handle; the state may change.
        """
        state = {**self._tensors(), **self._facts(), **self._streams()}
        return save_sharded_state_dict(state, path, async_=async_)

    def load_latest(self, folder: RunFolder, *, past_damage: bool) -> None:
        """Read the last complete checkpoint that rank 0 sees, as :meth:`load` does.

        With ``past_damage`` one whose content has changed is set aside by rank 0, and the one
        before is read.
        """
        while True:
            path = folder.checkpoint(self._agreed_step(folder))
            try:
                self.load(path)
                return
            except UsageError as error:
                if not (past_damage and isinstance(error.__cause__, DamagedCheckpointError)):
                    raise
                problem = _first_problem(error.__cause__)
            dist.barrier()  # a rank that is still reading would find nothing
            if dist.get_rank() == 0:
                aside = set_aside(path, "damaged").name
                line = f"pretrain: warning: skipped a checkpoint ({problem}), now {aside}"
                print(line, file=sys.stderr, flush=True)
            dist.barrier()

    def _agreed_step(self, folder: RunFolder) -> int:
        """What :func:`latest_step` is on rank 0; network file systems show others older folders."""
        found = _newest(folder) if dist.get_rank() == 0 else -1
        step = torch.tensor(found, device=self.device)
        dist.broadcast(step, src=0)
        return _existing(int(step.item()), folder)

    def load(self, path: Path) -> None:
        """Read a checkpoint of any layout; random streams only where the layout is the same."""
        try:
            self._load(path)
        except CheckpointingException as error:
            raise UsageError(
                f"--resume cannot read {path} ({_first_problem(error)}): it is damaged or from "
                "another job; remove it to continue from the one before, or start a new run"
            ) from error

    def _load(self, path: Path) -> None:
        facts = load_sharded_state_dict(self._facts(), path, unexpected="ignore")
        state = self._tensors()
        if facts["layout"] == self._layout():
            state.update(self._streams())
        loaded = load_sharded_state_dict(state, path, unexpected="ignore")
        if "random_streams" in loaded:
            restore_streams(loaded["random_streams"], self.device)
        self.train_state.load_state_dict(facts["train_state"])
        self.optimizer.set_updates(facts["updates"])

    def _tensors(self) -> dict[str, Any]:
        metadata = {"dp_cp_group": self.groups.dp_cp, "tp_group": self.groups.tp}
        model = self.model.sharded_state_dict(prefix="model.", metadata=metadata)
        beside = self.optimizer.sharded_state_dict(model)
        if self.settings.fsdp:  # whose parameters are the main weights, so that any layout fits
            model = {
                name: _rounded(entry) if f"optimizer.main.{name}" in beside else entry
                for name, entry in model.items()
            }
        return {**model, **beside}

    def _facts(self) -> dict[str, Any]:
        return {
            "layout": self._layout(),
            "updates": self.optimizer.updates,
            "train_state": self.train_state.state_dict(),
        }

    def _layout(self) -> list[int]:
        settings = self.settings
        pipeline = [settings.pp, settings.vpp] if settings.pp > 1 else []
        return [settings.tp, settings.cp, settings.dp, *pipeline]

    def _streams(self) -> dict[str, Any]:
        axes = ("tp", "dp_cp", "pp") if self.settings.pp > 1 else ("tp", "dp_cp")
        offsets = tuple(
            (axis, self.groups.rank(name), self.groups.size(name)) for axis, name in enumerate(axes)
        )
        streams = make_sharded_object_for_checkpoint(
            save_streams(self.device), "random_streams", offsets, replica_id=0
        )
        return {"random_streams": streams}


def _rounded(entry: ShardedTensor) -> ShardedTensor:
    """A parameter as the model computes with it, in bfloat16."""
    data = None if entry.data is None else entry.data.detach().bfloat16()
    return dataclasses.replace(entry, data=data, dtype=torch.bfloat16)


def damaged_after(folder: RunFolder, step: int) -> dict[Path, str]:
    """What is wrong with each damaged checkpoint after a step (-1: with all), oldest first.

    Call it before there is a process group: it reads checkpoints as one process.
    """
    entries = sorted(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
    return {
        entry: _damage(entry)
        for entry in entries
        if entry.is_dir() and _step_of(entry) > step and not is_complete_checkpoint(entry)
    }


def set_aside(folder: Path, why: str) -> Path:
    """Rename the folder of a checkpoint or run, so that a new one can take its name."""
    number, aside = 1, folder.with_name(f"{folder.name}.{why}")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{why}-{number}")
    try:
        return folder.rename(aside)
    except OSError as error:
        raise UsageError(f"cannot rename the {why} {folder}: {error.strerror}") from None


def _damage(checkpoint: Path) -> str:
    path = checkpoint.absolute()
    try:
        load_sharded_state_dict({}, path, unexpected="ignore")
    except CheckpointingException as error:
        said = _first_problem(error).removeprefix(f"cannot load {path}: ")
        return said.replace(f"{path}/", "").removeprefix(f"{path} ")
    return "it is not complete"
