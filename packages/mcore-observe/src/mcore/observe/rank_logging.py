"""Logging on one rank, or on one rank of each pipeline stage."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.groups import GroupLike, get_pg_rank, get_pg_size, world_size
from mcore.parallel.process_groups import get_default_process_groups
from mcore.versioning.process_rank import (
    known_rank,
    known_world_size,
    process_rank,
    process_world_size,
)

logger = logging.getLogger(__name__)
# Call it as ``warn_once(logger, message, *arguments)``.
warn_once = functools.lru_cache(maxsize=1024)(logging.Logger.warning)


def safe_get_rank() -> int:
    """Return this process's global rank, even before torch.distributed is initialised.

    No communication.

    Returns:
        The rank in the world group. Before that exists: the variable ``RANK`` or
        ``SLURM_PROCID``, else 0.

    Example:
        >>> safe_get_rank()
        0
    """
    return process_rank()


def safe_get_world_size() -> int:
    """Return the number of ranks of the job, even before torch.distributed is initialised.

    No communication.

    Returns:
        The size of the world group. Before that exists: the variable ``WORLD_SIZE`` or
        ``SLURM_NTASKS``, else 1.

    Example:
        >>> safe_get_world_size()
        1
    """
    return process_world_size()


def is_last_rank() -> bool:
    """Return whether this is the last rank. It writes logs, since pipelines end there."""
    return process_rank() == process_world_size() - 1


def writes_log(global_state: Any) -> bool:
    """Return whether this rank writes a state's log: its ``writing_rank``, else the last one."""
    rank = getattr(global_state, "writing_rank", None)
    return process_rank() == rank if isinstance(rank, int) else is_last_rank()


def log_single_rank(
    logger: logging.Logger, *args: Any, rank: int = 0, group: GroupLike | None = None, **kwargs: Any
) -> None:
    """Log on one rank. The record names the caller's file, line and function.

    Any subset of ranks may call it, since there is no communication. The rank is that of
    torch.distributed. Before it is initialised, the rank is read from the variables of
    :func:`safe_get_rank`, and a process without them logs.

    Args:
        logger: The logger. While it is disabled for the level, nothing else is read.
        args: As for :meth:`logging.Logger.log`: level, message and the message's arguments.
        rank: The rank that logs. Negative ranks count from the last. If it does not exist, no
            rank logs.
        group: Count ranks in this group instead of in the job. Ranks outside it do not log.
        kwargs: As for :meth:`logging.Logger.log`. ``stacklevel`` counts from the caller.

    Raises:
        TypeError: The level is missing or not an integer.

    Example:
        >>> log_single_rank(logging.getLogger("train"), logging.INFO, "step %d", 7, rank=-1)
    """
    if not logger.isEnabledFor(_check_level(args, kwargs)):
        return
    if _is_rank(rank, group):
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        logger.log(*args, **kwargs)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    *args: Any,
    tp_group: GroupLike | None = None,
    dp_cp_group: GroupLike | None = None,
    **kwargs: Any,
) -> None:
    """Log on one rank of each pipeline stage: the first of its TP and of its DP-CP group.

    Any subset of ranks may call it, since there is no communication. Without torch.distributed,
    or in a job of one rank, it logs.

    Args:
        logger: The logger. While it is disabled for the level, no rank is read.
        args: As for :meth:`logging.Logger.log`: level, message and the message's arguments.
        tp_group: Tensor parallel: a process group, a 1-D mesh or an object with ``rank()``. A rank
            outside of it does not log.
        dp_cp_group: Data and context parallel, of the same types. Pass both groups or neither.
            Neither means those of the default ``ProcessGroups``. Without a default only global
            rank 0 logs, with one WARNING that the groups are missing.
        kwargs: As for :meth:`logging.Logger.log`. ``stacklevel`` counts from the caller.

    Raises:
        ValueError: Only one of the groups is given.
        TypeError: The level is missing or not an integer.

    Example:
        >>> log_on_each_pipeline_stage(logging.getLogger("train"), logging.INFO, "layers 0-11")
    """
    if (tp_group is None) != (dp_cp_group is None):
        given, missing = "tp_group", "dp_cp_group"
        if dp_cp_group is not None:
            given, missing = missing, given
        raise ValueError(f"got {given} without {missing}: give both groups or neither")
    if not logger.isEnabledFor(_check_level(args, kwargs)):
        return
    if world_size() == 1 or _is_first_of_stage(tp_group, dp_cp_group):
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        logger.log(*args, **kwargs)


def _check_level(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    level = args[0] if args else kwargs.get("level")
    if not isinstance(level, int):
        raise TypeError(
            f"got {level!r} as the level: give an integer such as logging.INFO after the logger"
        )
    return level


def _is_rank(rank: int, group: GroupLike | None) -> bool:
    """Return whether this process has a rank, or its rank is unknown."""
    if group is not None and _is_outside(group):
        return False
    mine = known_rank() if group is None else _get_rank(group)
    if rank < 0:
        if group is None:
            size = known_world_size()
        else:
            size = get_pg_size(group) if isinstance(group, DeviceMesh) else group.size()
        if size is None:
            return True
        rank += size
    return mine is None or mine == rank


def _is_first_of_stage(tp_group: GroupLike | None, dp_cp_group: GroupLike | None) -> bool:
    if tp_group is None or dp_cp_group is None:
        default = get_default_process_groups()
        if default is None:
            warn_once(
                logger,
                "log_on_each_pipeline_stage got no groups and there is no default ProcessGroups, "
                "so only rank 0 logs. Pass tp_group and dp_cp_group, or call "
                "set_default_process_groups",
            )
            return process_rank() == 0
        return default.rank("tp") == 0 and default.rank("dp_cp") == 0
    return all(
        not _is_outside(group) and _get_rank(group) == 0 for group in (tp_group, dp_cp_group)
    )


def _is_outside(group: object) -> bool:
    """Return whether this rank is no member. ``new_group`` returns an integer on such ranks."""
    if isinstance(group, DeviceMesh):
        return group.get_coordinate() is None
    return group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, int)


def _get_rank(group: GroupLike) -> int:
    return get_pg_rank(group) if isinstance(group, DeviceMesh) else group.rank()
