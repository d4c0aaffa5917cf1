"""The rank of this process, the number of ranks, and log records of rank 0."""

from __future__ import annotations

import os
import sys

LOGGER_NAME = "mcore.versioning"


def process_rank() -> int:
    """Return the global rank of this process, 0 if it is unknown."""
    return known_rank() or 0


def process_world_size() -> int:
    """Return the number of ranks of the job, 1 if it is unknown."""
    return known_world_size() or 1


def known_rank() -> int | None:
    """Return the rank in the world group, else ``RANK``, else ``SLURM_PROCID``, else None."""
    return _ask_process_group("get_rank", ("RANK", "SLURM_PROCID"))


def known_world_size() -> int | None:
    """Return the size of the world group, else ``WORLD_SIZE``, else ``SLURM_NTASKS``, else None."""
    return _ask_process_group("get_world_size", ("WORLD_SIZE", "SLURM_NTASKS"))


def log_on_rank_zero(level: int, message: str) -> None:
    """Write one record to the logger ``mcore.versioning`` if this process is rank 0."""
    if process_rank() == 0:
        import logging

        logging.getLogger(LOGGER_NAME).log(level, message)


def _ask_process_group(question: str, variables: tuple[str, ...]) -> int | None:
    """Return the answer of torch.distributed if initialised, else the first integer variable."""
    distributed = sys.modules.get("torch.distributed")
    # During `import torch` the module exists before its functions do.
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
