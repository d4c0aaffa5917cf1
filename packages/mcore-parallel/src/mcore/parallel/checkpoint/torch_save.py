"""Write a sharded state dict in the steps of torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.writer import DurableWriter
from mcore.parallel.checkpoint.save_planner import ShardedSavePlanner
from mcore.parallel.checkpoint.state_tree import Entries
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
    writer = DurableWriter(incomplete, final, team.rank)
    try:
        _write(planner, writer, team)
    except CheckpointingException as error:
        if team.is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise CheckpointingException(f"cannot save {final}: {error}") from error


def _write(planner: ShardedSavePlanner, writer: DurableWriter, team: Team) -> None:
    """Plan, write and publish; each step only after all ranks have done the one before.

    ``torch.distributed.checkpoint.save`` takes the same steps, but needs NumPy for its messages,
    and warns when there is one process only.
    """
    plan = team.agree(lambda: _local_plan(planner, writer, team))
    plans = team.gather_bytes(pickle.dumps(plan))
    metadata = team.agree(lambda: _global_plan(planner, plans))
    written = team.agree(lambda: writer.write(plan, planner))
    everything = team.gather_bytes(pickle.dumps(written))
    team.agree(lambda: _publish(writer, metadata, everything))


def _local_plan(planner: ShardedSavePlanner, writer: DurableWriter, team: Team) -> SavePlan:
    writer.begin()
    planner.set_up_planner({}, is_coordinator=team.is_first)
    return planner.create_local_plan()


def _global_plan(planner: ShardedSavePlanner, plans: list[bytes]) -> Metadata | None:
    """Check all plans against each other, on the first rank, which alone has them."""
    if not plans:
        return None
    return planner.create_global_plan([pickle.loads(plan) for plan in plans])[1]


def _publish(writer: DurableWriter, metadata: Metadata | None, everything: list[bytes]) -> None:
    if metadata is not None:
        writer.publish(metadata, [pickle.loads(written) for written in everything])
