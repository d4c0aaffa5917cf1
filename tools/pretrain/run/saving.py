"""When a run writes its checkpoints, how many it keeps, and what happens when one fails."""

from __future__ import annotations

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
from pretrain.model.stages import chunks_of
from pretrain.run.checkpoints import CheckpointedState
from pretrain.run_folder import RunFolder


class Saver:
    """Saves the state of a run, in the background if asked to, and deletes surplus ones.

    All ranks make one and call its methods together, at the same steps. Rank 0 first deletes what
    saves of an earlier start left unfinished.
    """

    def __init__(
        self, folder: RunFolder, state: CheckpointedState, *, keep: int, in_background: bool
    ) -> None:
        self.folder = folder
        self.state = state
        self.keep = keep
        self.in_background = in_background
        self._pending: SaveHandle | None = None
        if dist.get_rank() == 0:
            attempt(lambda: remove_incomplete(folder.checkpoints), "delete unfinished checkpoints")

    def save(self, step: int) -> None:
        """Write the checkpoint of a step, or start to; waits for the one before."""
        self.wait()
        self._pending = self.state.save(self.folder.checkpoint(step), async_=self.in_background)
        if self._pending is None:
            self._delete_surplus()

    def poll(self) -> None:
        """Take note of a background save that has ended on all ranks; call it after each step.

        One all-reduce over all ranks while a save is under way.
        """
        if self._pending is None:
            return
        if logical_and_across_model_parallel_group(self._pending.done(), dist.group.WORLD):
            self.wait()

    def wait(self) -> None:
        """Wait for the background save that is under way, if any."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        if self.keep and dist.get_rank() == 0:
            attempt(lambda: keep_last(self.folder.checkpoints, self.keep), "delete old checkpoints")


def attempt(action: Callable[[], object], what: str) -> None:
    """Do what a run can do without: where the disk refuses, warn."""
    try:
        action()
    except OSError as error:
        print(f"pretrain: warning: cannot {what}: {error}", file=sys.stderr, flush=True)


class ReplicasDifferError(Exception):
    """Copies of a parameter are not equal; lines before name the parameter and the rank."""


def check_replicas(model: MegatronModule, groups: ProcessGroups, step: int) -> None:
    """Compare the parameters of all ranks of ``dp_cp``, bit by bit; all ranks call it together.

    Those of experts are compared over ``expt_dp``.

    A rank logs each parameter of its own that differs from the copy on its group's first rank.
    """
    equal = check_param_hashes_across_dp_replicas(
        chunks_of(model), cross_check=True, dp_group=groups.dp_cp, expert_dp_group=groups.expt_dp
    )
    if logical_and_across_model_parallel_group(equal, dist.group.WORLD):
        return
    raise ReplicasDifferError(
        f"copies of the parameters differ between ranks after step {step}, as the lines "
        "'Hash not matching' show: a bit has flipped or the ranks have diverged; the checkpoint of "
        "this step is not written"
    )
