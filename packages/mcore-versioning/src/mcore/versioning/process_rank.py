"""Which rank this process is, and log records that only one rank writes."""

from __future__ import annotations

import os
import sys

LOGGER_NAME = "mcore.versioning"


def process_rank() -> int:
    """The rank of this process, as far as it can be told without importing torch.

    Returns:
        The rank in the default process group where `torch.distributed` is already imported,
        available and initialised; else the environment variable `RANK`, else `SLURM_PROCID`,
        else 0. A variable that is no integer counts as absent.

    Example:
        >>> import os
        >>> os.environ["RANK"] = "3"
        >>> process_rank()
        3
        >>> del os.environ["RANK"]
    """
    rank = _initialised_rank()
    for variable in ("RANK", "SLURM_PROCID"):
        if rank is None:
            rank = _integer_from_environment(variable)
    return 0 if rank is None else rank


def log_on_rank_zero(level: int, message: str) -> None:
    """Write one record to the logger `mcore.versioning`, if this process is rank 0.

    Args:
        level: A level of the `logging` module.
        message: The finished text.
    """
    if process_rank() == 0:
        import logging

        logging.getLogger(LOGGER_NAME).log(level, message)


def _initialised_rank() -> int | None:
    distributed = sys.modules.get("torch.distributed")
    # During `import torch` the module is there before its functions are.
    is_available = getattr(distributed, "is_available", None)
    is_initialized = getattr(distributed, "is_initialized", None)
    get_rank = getattr(distributed, "get_rank", None)
    if is_available is None or is_initialized is None or get_rank is None:
        return None
    return int(get_rank()) if is_available() and is_initialized() else None


def _integer_from_environment(variable: str) -> int | None:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return None
