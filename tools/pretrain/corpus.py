"""The text: source files of the running Python's standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from pretrain.usage import UsageError

VOCABULARY_SIZE = 256
_TRAIN_SHARE = 0.95
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Two parts of the text as uint8 tensors, and a checksum of the whole."""

    train: torch.Tensor
    validation: torch.Tensor
    checksum: int


def standard_library_files() -> list[Path]:
    """Sources of the standard library in sorted order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names: list[str] = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]  # these may be large
        inside = Path(folder).relative_to(root)
        names += [(inside / name).as_posix() for name in files if name.endswith(".py")]
    return [root / name for name in sorted(names)]


def require_text(seq_length: int) -> None:
    """Raise UsageError where the text, known by its size alone, is too short for a sequence."""
    total = sum(path.stat().st_size for path in standard_library_files())
    shorter = total - int(total * _TRAIN_SHARE)
    if shorter <= seq_length:
        raise UsageError(
            f"--seq-length {seq_length} is not below the {shorter} bytes of validation text"
        )


def load_corpus() -> Corpus:
    """Read and concatenate the files; the first 95 % of the bytes are for training."""
    data = b"".join(path.read_bytes() for path in standard_library_files())
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    split = int(len(data) * _TRAIN_SHARE)
    return Corpus(text[:split], text[split:], zlib.crc32(data))


def draw_batch(
    text: torch.Tensor, *, rows: slice, batch_size: int, seq_length: int, seed: int, step: int
) -> dict[str, torch.Tensor]:
    """Draw the batch of one step: the same sequences in every layout, even after a resume."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq_length, (batch_size,), generator=generator)[rows]
    positions = torch.arange(seq_length)
    index = starts[:, None] + torch.arange(seq_length + 1)
    window = text[index].long()
    return {
        "tokens": window[:, :-1],
        "labels": window[:, 1:],
        "loss_mask": torch.ones(len(starts), seq_length),
        "position_ids": positions.expand(len(starts), -1),
    }
