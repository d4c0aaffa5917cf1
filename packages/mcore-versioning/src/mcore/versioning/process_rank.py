"""Which rank of the job this process is, how many there are, and records that one rank writes."""

from __future__ import annotations

import os
import sys

LOGGER_NAME = "mcore.versioning"


def process_rank() -> int:
    """Return the global rank of this process, also before torch.distributed is initialised.

    Imports nothing and does not communicate.

    Returns:
        The rank in the world group where `torch.distributed` is imported and initialised; else the
        environment variable `RANK`, else `SLURM_PROCID`, else 0. A variable that is not an integer
        counts as absent.

    Example:
        >>> import os
        >>> os.environ["RANK"] = "3"
        >>> process_rank()
        3
        >>> del os.environ["RANK"]
    """
    return known_rank() or 0


def process_world_size() -> int:
    """Return the number of ranks of the job, also before torch.distributed is initialised.

    Imports nothing and does not communicate.

    Returns:
        The size of the world group where `torch.distributed` is imported and initialised; else the
        environment variable `WORLD_SIZE`, else `SLURM_NTASKS`, else 1.

    Example:
        >>> process_world_size()
        1
    """
    return known_world_size() or 1


def known_rank() -> int | None:
    """Return the rank as `process_rank` does, or None where nothing tells it."""
    return _from_process_group("get_rank", ("RANK", "SLURM_PROCID"))


def known_world_size() -> int | None:
    """Return the size as `process_world_size` does, or None where nothing tells it."""
    return _from_process_group("get_world_size", ("WORLD_SIZE", "SLURM_NTASKS"))


def log_on_rank_zero(level: int, message: str) -> None:
    """Write one record to the logger `mcore.versioning`, if this process is rank 0."""
    if process_rank() == 0:
        import logging

        logging.getLogger(LOGGER_NAME).log(level, message)


def _from_process_group(question: str, variables: tuple[str, ...]) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    # During `import torch` the module is there before its functions are.
    is_available = getattr(distributed, "is_available", None)
    is_initialized = getattr(distributed, "is_initialized", None)
    answer = getattr(distributed, question, None)
    if is_available and is_initialized and answer and is_available() and is_initialized():
        return int(answer())
    for variable in variables:
        try:
            return int(os.environ[variable])
        except (KeyError, ValueError):
            continue
    return None
