"""A digest of plain values, equal on all ranks that hold equal values."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu

__all__ = ["digest_of"]

Update = Callable[[bytes | memoryview], None]


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that depend on type and content, not on dict order or hash seeds.

    Args:
        value: Nested containers of numbers, strings, tensors; anything else goes through pickle.

    Returns:
        The digest. Tensors on a meta device count by dtype and shape.

    Example:
        >>> digest_of({"lr": 0.1, "betas": [0.9, 0.95]}) == digest_of(
        ...     {"betas": [0.9, 0.95], "lr": 0.1}
        ... )
        True
    """
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher.update, value)
    return hasher.digest()


def _feed(update: Update, value: Any) -> None:
    update(f"<{type(value).__name__}>".encode())
    if isinstance(value, torch.Tensor):
        _feed_tensor(update, value)
    elif isinstance(value, Mapping):
        for entry in sorted(digest_of(key) + digest_of(item) for key, item in value.items()):
            update(entry)
    elif isinstance(value, list | tuple):
        for item in value:
            update(digest_of(item))
    elif isinstance(value, set | frozenset):
        for entry in sorted(map(digest_of, value)):
            update(entry)
    elif isinstance(value, bytes | bytearray):
        update(bytes(value))
    elif value is None or isinstance(value, bool | int | float | complex | str):
        update(repr(value).encode())
    else:
        update(pickle.dumps(value))


def _feed_tensor(update: Update, tensor: torch.Tensor) -> None:
    update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if not tensor.is_meta:
        update(memory_of(row_major_on_cpu(tensor)))
