"""The chunks of a model and its process groups."""

from __future__ import annotations

from typing import Any

import torch

from mcore.parallel.process_groups import get_default_process_groups


def model_chunks(model: Any) -> list[Any]:
    """Return the virtual-pipeline chunks of a model: a list, one module, or None."""
    if model is None:
        return []
    return list(model) if isinstance(model, (list, tuple)) else [model]


def find_process_groups(pg_collection: Any, model: Any) -> Any:
    """Return the given groups, else those of the first chunk or a module in it, else the default.

    No communication. The result is None without default groups, which means one process.
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
