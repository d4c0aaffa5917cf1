"""Which process groups belong to a model."""

from __future__ import annotations

from typing import Any

import torch

from mcore.parallel.process_groups import get_default_process_groups

__all__ = ["find_process_groups", "model_chunks"]


def model_chunks(model: Any) -> list[Any]:
    """Return the chunks of a model.

    Args:
        model: A list of virtual-pipeline chunks, one module, or None.

    Returns:
        A list of chunks, empty for None.

    Example:
        >>> len(model_chunks(torch.nn.Linear(2, 2)))
        1
    """
    if model is None:
        return []
    return list(model) if isinstance(model, (list, tuple)) else [model]


def find_process_groups(pg_collection: Any, model: Any) -> Any:
    """Return the groups to reduce over. No communication.

    Args:
        pg_collection: Those that the caller gave, or None.
        model: As for :func:`model_chunks`.

    Returns:
        What was given; else ``pg_collection`` of the first chunk or of what it wraps; else the
        default ProcessGroups; else None: one process.

    Example:
        >>> find_process_groups(None, None) is None
        True
    """
    if pg_collection is not None:
        return pg_collection
    chunk = next(iter(model_chunks(model)), None)
    while chunk is not None:
        found = getattr(chunk, "pg_collection", None)
        if found is not None:
            return found
        inner = getattr(chunk, "module", None)
        chunk = inner if isinstance(inner, torch.nn.Module) else None
    return get_default_process_groups()
