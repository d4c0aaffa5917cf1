"""Saves in the background, one after the other, on their own process group."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from mcore.parallel.checkpoint.files.regular_files import Place
from mcore.parallel.checkpoint.team import Team, lost_ranks_named
from mcore.parallel.groups import group_ranks
from mcore.parallel.torch_compat import group_timeout

logger = logging.getLogger(__name__)


class SaveHandle:
    """A save in the background.

    Args:
        path: Where the checkpoint appears.
        future: Settled when the save has finished or failed.

    Attributes:
        path: Where the checkpoint appears.

    Example:
        >>> import tempfile, torch
        >>> from mcore.parallel.checkpoint import ShardedTensor, save_sharded_state_dict
        >>> shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2))
        >>> folder = tempfile.mkdtemp()
        >>> handle = save_sharded_state_dict({"w": shard}, folder + "/step_1", async_=True)
        >>> handle.result().name
        'step_1'
        >>> handle.done()
        True
    """

    def __init__(self, path: Place, future: concurrent.futures.Future[None]) -> None:
        self.path = path
        self._future = future

    def done(self) -> bool:
        """Return whether the save has finished or failed on this rank."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Place:
        """Wait until the checkpoint is complete under its name.

        Args:
            timeout: Longest wait in seconds; None waits as long as it takes.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointingException: The save failed; all ranks get it.
            TimeoutError: It is not finished yet; it continues.
        """
        try:
            self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            raise TimeoutError(
                f"the save to {self.path} is not finished after {timeout} s"
            ) from error
        return self.path

    def wait(self, timeout: float | None = None) -> None:
        """Do the same as :meth:`result`, but return nothing."""
        self.result(timeout)


@dataclass
class _Lane:
    """The background saves of one set of ranks, which run in the order of the calls.

    They have their own group, because other threads keep using the caller's.
    """

    world: dist.ProcessGroup | None
    team: Team
    last: concurrent.futures.Future[None] | None = None


_lock = threading.Lock()
_lanes: dict[tuple[int, ...], _Lane] = {}


def _lane_of(team: Team) -> _Lane:
    """Return the lane of a team, made at the first use; collective over the team then."""
    world = None if team.group is None else dist.group.WORLD
    ranks = () if team.group is None else tuple(group_ranks(team.group))
    with _lock:
        for old in [key for key, lane in _lanes.items() if lane.world is not world]:
            del _lanes[old]
        lane = _lanes.get(ranks)
    if lane is None:
        lane = _Lane(world, _private_team(team, list(ranks)))
        with _lock:
            _lanes[ranks] = lane
    return lane


def _private_team(team: Team, ranks: list[int]) -> Team:
    if team.group is None:
        return team
    everyone = len(ranks) == dist.get_world_size()
    with lost_ranks_named():
        group = dist.new_group(
            ranks,
            timeout=group_timeout(team.group),
            backend="gloo",
            use_local_synchronization=not everyone,
        )
    return Team(group, team.rank, team.size)


def start_in_background(path: Place, team: Team, save: Callable[[Team], None]) -> SaveHandle:
    """Run a save in a thread, after the same ranks' earlier ones, in a team with its own group.

    Collective over the team: the first call makes a gloo group. The interpreter waits for the save.
    """
    lane = _lane_of(team)
    before, future = lane.last, concurrent.futures.Future[None]()
    lane.last = future

    def work() -> None:
        if before is not None:
            concurrent.futures.wait([before])
        try:
            save(lane.team)
        except BaseException as error:
            logger.error("the background save to %s failed: %s", path, error)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=work, name=f"save-{path.name}").start()
    return SaveHandle(path, future)
