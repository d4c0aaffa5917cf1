"""Run a save through torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    describe_error,
    merge_reports,
)
from mcore.parallel.checkpoint.save_planner import ShardedSavePlanner
from mcore.parallel.checkpoint.state_tree import Entries
from mcore.parallel.checkpoint.storage import DurableWriter
from mcore.parallel.checkpoint.team import Team

__all__ = ["write_checkpoint"]


def write_checkpoint(entries: Entries, incomplete: Path, final: Path, team: Team) -> None:
    """Write the leaves of all ranks and publish them; collective over the team.

    Args:
        entries: This rank's leaves.
        incomplete: Where to write; deleted again after a failure that this process survives.
        final: The name of the finished checkpoint.
        team: The ranks that save.

    Raises:
        CheckpointingException: On every rank; there is nothing new at ``final``.
    """
    planner = ShardedSavePlanner(entries)
    writer = DurableWriter(incomplete, final)
    try:
        if team.group is None:
            _save_alone(planner, writer)
        else:
            save({}, storage_writer=writer, planner=planner, process_group=team.group)
    except (Exception, CheckpointException) as error:
        if team.is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise CheckpointingException(f"cannot save {final}: {_reasons(error)}") from error


def _save_alone(planner: ShardedSavePlanner, writer: DurableWriter) -> None:
    """Take the steps of a save in one process, without the warning that torch gives for it."""
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan(plans)
    writes = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [writes])


def _reasons(error: BaseException) -> str:
    """Name every rank that failed; torch's exception is no Exception and hides them in itself."""
    if not isinstance(error, CheckpointException):
        return describe_error(error)
    return merge_reports({rank: describe_error(why) for rank, (why, _) in error.failures.items()})
