"""When a run writes its checkpoints, how many it keeps, and what happens when one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist

from mcore.parallel import logical_and_across_model_parallel_group
from mcore.parallel.checkpoint import SaveHandle, keep_last, remove_incomplete
from pretrain.checkpoints import CheckpointedState
from pretrain.run_folder import RunFolder


class Saver:
    """Saves the state of a run, in the background where asked for, and deletes what is surplus.

    All ranks make one and call its methods together, at the same steps. Rank 0 first deletes what
    saves of an earlier start left unfinished.

    Args:
        folder: where the run writes.
        state: what is saved.
        keep: how many checkpoints stay; 0 keeps all.
        in_background: go on training while a checkpoint is written.
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
            _try(lambda: remove_incomplete(folder.checkpoints), "delete unfinished checkpoints")

    def save(self, step: int) -> None:
        """Write the checkpoint of a step, or start to; waits for the one before.

        Raises:
            CheckpointingException: on all ranks, this one or the one before could not be written.
        """
        self.wait()
        self._pending = self.state.save(self.folder.checkpoint(step), async_=self.in_background)
        if self._pending is None:
            self._delete_surplus()

    def poll(self) -> None:
        """Take note of a background save that has ended on all ranks; call it after each step.

        One all-reduce over all ranks while a save is under way.

        Raises:
            CheckpointingException: on all ranks, it has failed.
        """
        if self._pending is None:
            return
        if logical_and_across_model_parallel_group(self._pending.done(), dist.group.WORLD):
            self.wait()

    def wait(self) -> None:
        """Wait for the background save that is under way, if any.

        Raises:
            CheckpointingException: on all ranks, it has failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        if self.keep and dist.get_rank() == 0:
            _try(lambda: keep_last(self.folder.checkpoints, self.keep), "delete old checkpoints")


def _try(delete: Callable[[], object], what: str) -> None:
    """Delete; what cannot be deleted is no reason to end the run."""
    try:
        delete()
    except OSError as error:
        print(f"pretrain: warning: cannot {what}: {error}", file=sys.stderr, flush=True)
