"""The windows of a text as batches, and their order: each once per epoch, in a new order."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.packing import PackedText

Batch = dict[str, torch.Tensor]
Text = torch.Tensor | NDArray[Any] | PackedText
_ROUNDS = 8


def batch_at(text: Text, starts: torch.Tensor, rows: slice, seq_length: int) -> Batch:
    """Some rows of the batch whose sequences of ``seq_length`` tokens begin at ``starts``.

    The label of each token is the next token of the text, also for the last token of a sequence.
    """
    if isinstance(text, PackedText):
        return text.windows_at(starts, rows, seq_length)
    starts = starts[rows]
    index = starts[:, None] + torch.arange(seq_length + 1)
    if isinstance(text, torch.Tensor):
        window = text[index].long()
    else:
        window = torch.from_numpy(np.asarray(text[index.numpy()], dtype=np.int64))
    return {
        "tokens": window[:, :-1],
        "labels": window[:, 1:],
        "loss_mask": torch.ones(len(starts), seq_length),
        "position_ids": torch.arange(seq_length).expand(len(starts), -1),
    }


def starts_in_order(
    num_tokens: int, *, seq_length: int, seed: int, first: int, count: int
) -> torch.Tensor:
    """The starts of the windows of ``count`` samples of a run, from its sample ``first`` (from 0).

    Windows have ``seq_length + 1`` tokens and start ``seq_length`` apart: each token but the first
    is a label once. A rest that is shorter than a window is skipped.
    """
    windows = (num_tokens - 1) // seq_length
    epochs, places = np.divmod(np.arange(first, first + count), windows)
    for epoch in np.unique(epochs):
        among = epochs == epoch
        places[among] = permute(places[among], windows, f"{seed} {epoch}")
    return torch.from_numpy(places * seq_length)


def permute(places: NDArray[Any], size: int, key: str) -> NDArray[Any]:
    """Map each place by a pseudorandom permutation of ``range(size)`` that depends on ``key``.

    A Feistel network over the next power of four, repeated until the result is below ``size``
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). Needs no memory per place.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    digests = [hashlib.sha256(f"{key} {number}".encode()).digest() for number in range(_ROUNDS)]
    keys = [np.array(int.from_bytes(digest[:8], "little"), np.uint64) for digest in digests]
    result = places.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        result[outside] = _apply_network(result[outside], half, keys)
        outside = result >= size
    return result.astype(np.int64)


def _apply_network(
    numbers: NDArray[Any], half: np.uint64, keys: list[NDArray[Any]]
) -> NDArray[Any]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    joined: NDArray[Any] = (left << half) | right
    return joined


def _mix(numbers: NDArray[Any]) -> NDArray[Any]:
    """Hash each number: every bit depends on all bits of the input (splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    mixed: NDArray[Any] = numbers ^ (numbers >> np.uint64(31))
    return mixed
