"""Writing to the run folder: its settings and its checkpoints, of which old ones are deleted."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch.distributed as dist

from mcore.modules import MegatronModule
from mcore.parallel import (
    ProcessGroups,
    check_param_hashes_across_dp_replicas,
    logical_and_across_model_parallel_group,
)
from mcore.parallel.checkpoint import SaveHandle, keep_last, remove_incomplete
from pretrain.corpus import run_on_all
from pretrain.model.stages import chunks_of
from pretrain.run.checkpoints import CheckpointedState
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, format_flag, surroundings, write_settings
from pretrain.usage import UsageError


@dataclasses.dataclass(eq=False)
class Saver:
    """Saves the state of a run, optionally in the background, and deletes old checkpoints.

    All ranks create one and call its methods together, at the same steps. Rank 0 first deletes
    unfinished checkpoints of an earlier start.
    """

    folder: RunFolder
    state: CheckpointedState
    _pending: SaveHandle | None = None

    def __post_init__(self) -> None:
        self.keep = self.state.settings.keep_last
        if dist.get_rank() == 0:
            checkpoints = self.folder.checkpoints
            attempt(lambda: remove_incomplete(checkpoints), "delete unfinished checkpoints")

    def save(self, step: int) -> None:
        """Write the checkpoint of a step, or start to. Waits for the previous save."""
        self.wait()
        in_background = self.state.settings.async_save
        self._pending = self.state.save(self.folder.checkpoint(step), async_=in_background)
        if self._pending is None:
            self._delete_surplus()

    def poll(self) -> None:
        """Finish a background save that has ended on all ranks. Call it between steps.

        Costs one all-reduce over all ranks while a save is running.
        """
        pending, world = self._pending, dist.group.WORLD
        if pending and logical_and_across_model_parallel_group(pending.done(), world):
            self.wait()

    def wait(self) -> None:
        """Wait for the running background save, if any."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        if self.keep and dist.get_rank() == 0:
            attempt(lambda: keep_last(self.folder.checkpoints, self.keep), "delete old checkpoints")


def attempt(action: Callable[[], object], name: str) -> None:
    """Run an optional action. An error of the disk or a missing library is only a warning."""
    try:
        action()
    except (OSError, ImportError) as error:
        print(f"pretrain: warning: cannot {name}: {error}", file=sys.stderr, flush=True)


class ReplicasDifferError(Exception):
    """Replicas of a parameter differ. Earlier lines name the parameter and the rank."""


def check_replicas(model: MegatronModule, groups: ProcessGroups, step: int) -> None:
    """Compare the parameters bit by bit over ``dp_cp``, and those of experts over ``expt_dp``.

    All ranks call it together. A rank logs each of its parameters that differs from the replica on
    the first rank of its group.
    """
    equal = check_param_hashes_across_dp_replicas(
        chunks_of(model), cross_check=True, dp_group=groups.dp_cp, expert_dp_group=groups.expt_dp
    )
    if logical_and_across_model_parallel_group(equal, dist.group.WORLD):
        return
    raise ReplicasDifferError(
        f"copies of the parameters differ between ranks after step {step}, as the lines "
        "'Hash not matching' show: a bit has flipped or the ranks have diverged. The checkpoint of "
        "this step is not written"
    )


def write_config(settings: Settings, folder: RunFolder, text_checksum: int, step: int) -> None:
    """Write ``config.json`` on rank 0, and report the settings that this start changes.

    Raises UsageError on all ranks if the disk refuses it. One all-gather over the world.
    """

    def write() -> None:
        facts = [("corpus_crc32", text_checksum), ("started_with", surroundings())]
        try:
            changes = write_settings(settings, folder.path, facts, step)
        except OSError as error:
            problem = f"cannot write config.json in {folder.path}: {error.strerror}"
            raise UsageError(problem) from None
        for name, (old, new) in changes.items():
            line = f"pretrain: from step {step + 1} on {format_flag(name)} is {new}, before {old}"
            print(line, file=sys.stderr, flush=True)

    world = dist.group.WORLD
    run_on_all(write if dist.get_rank() == 0 else lambda: None, world)  # type: ignore[arg-type]
