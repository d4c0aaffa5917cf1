"""Which rank of the job this process is, with one process as the answer before a group exists."""

from __future__ import annotations

import torch.distributed as dist

from mcore.parallel.torch_compat import is_distributed

__all__ = ["is_last_rank", "job_rank", "job_world_size"]


def job_rank() -> int:
    """Return this process's global rank.

    No communication.

    Returns:
        The rank in the world group; 0 when torch.distributed is not initialised.

    Example:
        >>> job_rank()
        0
    """
    return dist.get_rank() if is_distributed() else 0


def job_world_size() -> int:
    """Return the number of ranks of the job.

    No communication.

    Returns:
        The size of the world group; 1 when torch.distributed is not initialised.

    Example:
        >>> job_world_size()
        1
    """
    return dist.get_world_size() if is_distributed() else 1


def is_last_rank() -> bool:
    """Say whether this is the rank that writes logs: the last one, where pipelines end.

    No communication.

    Returns:
        True on global rank ``world_size - 1``, and when torch.distributed is not initialised.

    Example:
        >>> is_last_rank()
        True
    """
    return job_rank() == job_world_size() - 1
