"""What the operating system holds of files in memory, and how fast the disk is without it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mcore.parallel.tensor_memory import memory_of

_PIECE_BYTES = 1 << 24


def forget(folder: Path) -> None:
    """Have the next read of the files below a folder come from the disk."""
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet cannot be forgotten
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def write_raw(path: Path, tensors: list[torch.Tensor]) -> None:
    """Write the bytes of tensors, one after the other, and wait until the disk has them."""
    with path.open("xb", buffering=0) as stream:
        for tensor in tensors:
            content = memory_of(tensor)
            for start in range(0, len(content), _PIECE_BYTES):
                stream.write(content[start : start + _PIECE_BYTES])
        os.fsync(stream.fileno())


def read_raw(path: Path, tensors: list[torch.Tensor]) -> None:
    """Read what ``write_raw`` wrote into the tensors."""
    with path.open("rb", buffering=0) as stream:
        for tensor in tensors:
            content = memory_of(tensor)
            done = 0
            while done < len(content):
                done += stream.readinto(content[done : done + _PIECE_BYTES])


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
