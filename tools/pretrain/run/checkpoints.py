"""The content of a checkpoint, the choice of the checkpoint to load, and damaged checkpoints."""

from __future__ import annotations

import dataclasses
import re
import sys
from itertools import count
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
from pretrain.settings import Settings, format_flag, read_settings
from pretrain.usage import UsageError, clean

_NAME = re.compile(r"step_(\d+)")
_SHAPE = (
    "vocabulary_size", "hidden_size", "num_layers", "num_attention_heads", "untied", "value_head",
    "experts", "mtp",
)  # fmt: skip


def latest_step(folder: RunFolder, option: str = "--resume") -> int:
    """The step of the last complete checkpoint. Raises UsageError if there is none."""
    return _require_step(_find_newest(folder), folder, option)


def step_to_load(folder: RunFolder, option: str = "--resume") -> int:
    """As :func:`latest_step`, but the error lists damaged checkpoints. Needs no process group."""
    try:
        return latest_step(folder, option)
    except UsageError as error:
        damaged = damaged_after(folder, -1)
        if not damaged:
            raise
        listed = ", ".join(f"{path} ({problem})" for path, problem in damaged.items())
        raise UsageError(f"{error}. Damaged checkpoints: {listed}") from None


def has_checkpoint(folder: RunFolder) -> bool:
    """Whether a run has saved a complete checkpoint."""
    return _find_newest(folder) >= 0


def _find_newest(folder: RunFolder) -> int:
    """The step of the last complete checkpoint, or -1."""
    path = latest_checkpoint(folder.checkpoints) if folder.checkpoints.is_dir() else None
    return -1 if path is None else _read_step(path)


def _require_step(step: int, folder: RunFolder, option: str = "--resume") -> int:
    if step < 0:
        raise UsageError(f"{option} {folder.path}: no complete checkpoint in {folder.checkpoints}")
    return step


def _read_step(checkpoint: Path) -> int:
    """The step in a checkpoint's name, or -1 for a foreign name."""
    match = _NAME.fullmatch(checkpoint.name)
    return -1 if match is None else int(match[1])


def describe_latest(folder: RunFolder, options: str = "") -> str:
    """A sentence on how to continue, with which options, after a run ended early."""
    try:
        step = latest_step(folder)
    except UsageError:
        return "There is no complete checkpoint yet."
    return (
        f"The last complete checkpoint is {folder.checkpoint(step)}. Continue with: "
        f"{folder.resume_command}{options}"
    )


def _find_first_problem(error: CheckpointingException) -> str:
    """The first problem in a loading error, without advice for callers of the library."""
    lines = str(error).splitlines()
    listed = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
    return clean(re.split(r"; |\. (?=[A-Z])", (listed or lines)[0])[0])


def find_weights(settings: Settings) -> Path:
    """The checkpoint of ``--init-from``: a run's last, or the given one.

    Raises UsageError if it has other weights than a model of the settings.
    """
    given, option = Path(settings.init_from), "--init-from"
    is_run = (given / "config.json").exists()
    if not (is_run or is_complete_checkpoint(given)):
        raise UsageError(f"{option} {given}: neither a run nor a complete checkpoint of one")
    run = given if is_run else given.absolute().parent.parent
    stored = read_settings(run, option)
    for name in _SHAPE:
        theirs, ours = stored[name], getattr(settings, name)
        if theirs != ours:
            raise UsageError(
                f"{option} {given}: its {format_flag(name)} is {theirs}, this run's {ours}: make "
                "them equal"
            )
    return RunFolder(run).checkpoint(step_to_load(RunFolder(run), option)) if is_run else given


def load_weights(model: MegatronModule, groups: ProcessGroups, path: Path) -> None:
    """Load the weights of a checkpoint of any layout. Raises UsageError. Collective."""
    metadata = {"dp_cp_group": groups.dp_cp, "tp_group": groups.tp}
    state = model.sharded_state_dict(prefix="model.", metadata=metadata)
    try:
        load_sharded_state_dict(state, path, unexpected="ignore")
    except CheckpointingException as error:
        raise UsageError(f"cannot read {path} ({_find_first_problem(error)})") from None


@dataclasses.dataclass(eq=False)
class CheckpointedState:
    """Model, optimizer, counters and random streams of a run, as one sharded state.

    All ranks build it over their parts of the same run and call its methods together.
    """

    settings: Settings
    model: MegatronModule
    optimizer: TrainingOptimizer
    train_state: TrainState
    groups: ProcessGroups
    device: torch.device

    def save(self, path: Path, *, async_: bool = False) -> SaveHandle | None:
        """Write a checkpoint. It becomes visible after all ranks have written their parts.

        With ``async_`` the save continues in the background and returns a handle. The state may
        change as soon as the call returns.
        """
        state = {**self._describe_tensors(), **self._describe_facts(), **self._describe_streams()}
        return save_sharded_state_dict(state, path, async_=async_)

    def load_latest(self, folder: RunFolder, *, past_damage: bool) -> None:
        """Load the last complete checkpoint that rank 0 sees, as :meth:`load` does.

        With ``past_damage``, rank 0 renames a damaged checkpoint, and the previous one is loaded.
        """
        while True:
            path = folder.checkpoint(self._agree_on_step(folder))
            try:
                self.load(path)
                return
            except UsageError as error:
                if not (past_damage and isinstance(error.__cause__, DamagedCheckpointError)):
                    raise
                problem = _find_first_problem(error.__cause__)
            dist.barrier()  # other ranks may still be reading the folder
            if dist.get_rank() == 0:
                aside = set_aside(path, "damaged").name
                line = f"pretrain: warning: skipped a checkpoint ({problem}), now {aside}"
                print(line, file=sys.stderr, flush=True)
            dist.barrier()

    def _agree_on_step(self, folder: RunFolder) -> int:
        """Rank 0's :func:`latest_step`. Network file systems may show others old folders."""
        found = _find_newest(folder) if dist.get_rank() == 0 else -1
        step = torch.tensor(found, device=self.device)
        dist.broadcast(step, src=0)
        return _require_step(int(step.item()), folder)

    def load(self, path: Path) -> None:
        """Load a checkpoint of any layout. Random streams are loaded only for the same layout."""
        try:
            self._load(path)
        except CheckpointingException as error:
            raise UsageError(
                f"--resume cannot read {path} ({_find_first_problem(error)}): it is damaged or "
                "from another job. Remove it to continue from the previous checkpoint, or start "
                "a new run"
            ) from error

    def _load(self, path: Path) -> None:
        facts = load_sharded_state_dict(self._describe_facts(), path, unexpected="ignore")
        state = self._describe_tensors()
        if facts["layout"] == self._describe_layout():
            state.update(self._describe_streams())
        loaded = load_sharded_state_dict(state, path, unexpected="ignore")
        if "random_streams" in loaded:
            restore_streams(loaded["random_streams"], self.device)
        self.train_state.load_state_dict(facts["train_state"])
        self.optimizer.adamw.set_updates(facts["updates"])

    def _describe_tensors(self) -> dict[str, Any]:
        metadata = {"dp_cp_group": self.groups.dp_cp, "tp_group": self.groups.tp}
        model = self.model.sharded_state_dict(prefix="model.", metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model)
        if self.settings.fsdp:  # its parameters are the fp32 main weights: save them rounded too
            model = {
                name: _round_entry(entry) if f"optimizer.main.{name}" in optimizer else entry
                for name, entry in model.items()
            }
        return {**model, **optimizer}

    def _describe_facts(self) -> dict[str, Any]:
        return {
            "layout": self._describe_layout(),
            "updates": self.optimizer.adamw.updates,
            "train_state": self.train_state.state_dict(),
        }

    def _describe_layout(self) -> list[int]:
        settings = self.settings
        pipeline = [settings.pp, settings.vpp] if settings.pp > 1 else []
        return [settings.tp, settings.cp, settings.dp, *pipeline]

    def _describe_streams(self) -> dict[str, Any]:
        axes = ("tp", "dp_cp", "pp") if self.settings.pp > 1 else ("tp", "dp_cp")
        offsets = tuple(
            (axis, self.groups.rank(name), self.groups.size(name)) for axis, name in enumerate(axes)
        )
        streams = make_sharded_object_for_checkpoint(
            save_streams(self.device), "random_streams", offsets, replica_id=0
        )
        return {"random_streams": streams}


def _round_entry(entry: ShardedTensor) -> ShardedTensor:
    """A parameter in bfloat16, the dtype in which the model computes."""
    data = None if entry.data is None else entry.data.detach().bfloat16()
    return dataclasses.replace(entry, data=data, dtype=torch.bfloat16)


def damaged_after(folder: RunFolder, step: int) -> dict[Path, str]:
    """The problem of each damaged checkpoint after a step (-1: of all), oldest first.

    Call it before a process group exists: it reads checkpoints as one process.
    """
    entries = sorted(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
    return {
        entry: _describe_damage(entry)
        for entry in entries
        if entry.is_dir() and _read_step(entry) > step and not is_complete_checkpoint(entry)
    }


def set_aside(folder: Path, why: str) -> Path:
    """Rename the folder of a checkpoint or run, to free its name."""
    names = (f"{folder.name}.{why}" + f"-{number}" * (number > 1) for number in count(1))
    aside = next(path for path in map(folder.with_name, names) if not path.exists())
    try:
        return folder.rename(aside)
    except OSError as error:
        raise UsageError(f"cannot rename the {why} {folder}: {error.strerror}") from None


def _describe_damage(checkpoint: Path) -> str:
    path = checkpoint.absolute()
    try:
        load_sharded_state_dict({}, path, unexpected="ignore")
    except CheckpointingException as error:
        problem = _find_first_problem(error).removeprefix(f"cannot load {path}: ")
        return problem.replace(f"{path}/", "").removeprefix(f"{path} ")
    return "it is not complete"
