"""The borders of documents packed into one sequence, and the positions a rank takes of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_divisible", "check_length", "read_borders", "zigzag_positions"]


def read_borders(cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Return the borders of packed documents as int64 `[n]` on the CPU.

    Args:
        cu_seqlens: `[n]` or `[1, n]` integers that start at 0 and do not decrease; document i is
            `[cu_seqlens[i], cu_seqlens[i + 1])`. On an accelerator it is copied with a host sync.

    Returns:
        The borders; no communication.

    Raises:
        ValueError: It is anything else.

    Example:
        >>> read_borders([[0, 4, 16]])
        tensor([ 0,  4, 16])
    """
    borders = torch.as_tensor(cu_seqlens)
    shape = tuple(borders.shape)
    if len(shape) == 2 and shape[0] > 1:
        raise ValueError(
            f"cu_seqlens of shape {shape} has {shape[0]} rows, expected one: flatten the "
            "micro-batch into one packed sequence first"
        )
    if len(shape) not in (1, 2):
        raise ValueError(f"cu_seqlens must be [n] or [1, n], got shape {shape}")
    if borders.numel() and (borders.is_floating_point() or borders.is_complex()):
        raise ValueError(f"cu_seqlens must hold integers, got {borders.dtype}")
    borders = borders.flatten().to("cpu", torch.int64)
    if not borders.numel() or borders[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {borders.tolist()}")
    if (borders.diff() < 0).any():
        raise ValueError(f"cu_seqlens must not decrease, got {borders.tolist()}")
    return borders


def check_length(borders: Tensor, length: int, what: str) -> None:
    """Raise ValueError unless the documents fill a sequence of this length.

    Example:
        >>> check_length(torch.tensor([0, 4]), 5, "tokens")
        Traceback (most recent call last):
        ValueError: cu_seqlens ends at 4, expected 5, the length of tokens
    """
    end = int(borders[-1])
    if end != length:
        raise ValueError(f"cu_seqlens ends at {end}, expected {length}, the length of {what}")


def check_divisible(borders: Tensor, cp_size: int) -> None:
    """Raise ValueError unless every document can be cut into `2 * cp_size` equal chunks.

    Example:
        >>> check_divisible(torch.tensor([0, 8, 14]), 2)
        Traceback (most recent call last):
        ValueError: document 1 [8, 14) has length 6, not divisible by 4 (2 * context-parallel size \
2): pad it; 1 of 2 documents are like that
    """
    uneven = (borders.diff() % (2 * cp_size)).nonzero().flatten().tolist()
    if uneven:
        start, end = borders[uneven[0] : uneven[0] + 2].tolist()
        raise ValueError(
            f"document {uneven[0]} [{start}, {end}) has length {end - start}, not divisible by "
            f"{2 * cp_size} (2 * context-parallel size {cp_size}): pad it; {len(uneven)} of "
            f"{len(borders) - 1} documents are like that"
        )


def zigzag_positions(borders: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of one context-parallel rank: of every document, two chunks.

    Args:
        borders: int64 `[n]` on the CPU, as from `read_borders`, with lengths divisible by
            `2 * cp_size`.
        cp_size: Number of context-parallel ranks, cp.
        cp_rank: The rank asked for, 0 to cp - 1.

    Returns:
        int64 `[total / cp]` on the CPU: documents in order, each as chunk r, then
        `2 * cp - 1 - r`.

    Example:
        >>> zigzag_positions(torch.tensor([0, 8, 16]), 2, 0).tolist()
        [0, 1, 6, 7, 8, 9, 14, 15]
    """
    starts, chunks = borders[:-1], borders.diff() // (2 * cp_size)
    firsts = starts + cp_rank * chunks
    seconds = starts + (2 * cp_size - 1 - cp_rank) * chunks
    lengths = chunks.repeat_interleave(2)
    places = lengths.cumsum(0) - lengths
    shifts = torch.stack((firsts, seconds), dim=1).flatten() - places
    return torch.arange(int(lengths.sum()), device="cpu") + shifts.repeat_interleave(lengths)
