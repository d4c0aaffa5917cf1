"""Documents packed into windows, without attention between them and with separate positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore.parallel import cp_zigzag_index, get_batch_on_this_cp_rank, get_pg_rank, get_pg_size

Numbers = NDArray[np.int64]


class PackedText:
    """A text whose documents are padded to a multiple, and its windows.

    Windows have ``seq_length`` places, also a multiple, and start at multiples. The rest of a
    document in the next window is a new document. ``borders`` are the starts of the documents in
    ``tokens``, from 0, and the end of the last document.
    """

    def __init__(self, tokens: NDArray[Any], borders: NDArray[Any], multiple: int) -> None:
        borders = np.unique(borders.astype(np.int64))  # drops empty documents
        lengths = np.diff(borders)
        self.tokens = tokens
        self.multiple = multiple
        self._firsts = borders[:-1]
        self._lengths = lengths
        self._places = _accumulate(-(-lengths // multiple) * multiple)
        self._labels = _accumulate(lengths - 1)

    def __len__(self) -> int:
        """The number of places + 1, since callers reserve a token for the last label."""
        return int(self._places[-1]) + 1

    @property
    def num_documents(self) -> int:
        """The number of documents with at least one token."""
        return len(self._lengths)

    @property
    def num_labels(self) -> int:
        """The number of tokens that are the label of another token."""
        return int(self._labels[-1])

    def windows_at(
        self, starts: torch.Tensor, rows: slice, seq_length: int
    ) -> dict[str, torch.Tensor]:
        """The windows of some rows of a batch, ``[b, s]``, and ``cu_seqlens`` of all their parts.

        The loss mask is zero for tokens without a label. Its mean over the windows of all
        ``starts`` is 1, so the mean of the masked losses is the mean over all labels of the batch.
        """
        all_firsts = starts.numpy() // self.multiple * self.multiple
        # Counted from the ends of the windows, without a look at each place.
        labels_before, labels_to_end = map(
            self._count_labels_before, (all_firsts, all_firsts + seq_length)
        )
        num_labels = int((labels_to_end - labels_before).sum())
        weight = starts.numel() * seq_length / max(1, num_labels)
        firsts = all_firsts[rows, None]
        places = firsts + np.arange(seq_length)
        document, inside = self._find(places)
        last = self._lengths[document] - 1
        positions = places - np.maximum(firsts, places - inside)
        begins = np.flatnonzero(positions == 0)
        return {
            "tokens": self._take_tokens(document, inside),
            "labels": self._take_tokens(document, np.minimum(inside, last) + 1),
            "loss_mask": torch.from_numpy(np.where(inside < last, weight, 0.0)).float(),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(np.append(begins, positions.size)),
        }

    def _find(self, places: Numbers) -> tuple[Numbers, Numbers]:
        """The document of each place, and the position in that document."""
        document = np.searchsorted(self._places, places, side="right") - 1
        return document, places - self._places[document]

    def _take_tokens(self, document: Numbers, inside: Numbers) -> torch.Tensor:
        """Tokens at places of documents, with zeros after the end of a document."""
        is_there = inside < self._lengths[document]
        tokens = self.tokens[np.where(is_there, self._firsts[document] + inside, 0)]
        return torch.from_numpy(np.where(is_there, tokens, 0).astype(np.int64))

    def _count_labels_before(self, places: Numbers) -> Numbers:
        """The number of labels before each place. The last place is the end of the text."""
        document = np.searchsorted(self._places[1:-1], places, side="right")
        inside = np.minimum(places - self._places[document], self._lengths[document] - 1)
        counted: Numbers = self._labels[document] + inside
        return counted


def _accumulate(numbers: Numbers) -> Numbers:
    return np.concatenate(([0], np.cumsum(numbers)))


def part_of_batch(
    batch: dict[str, torch.Tensor], cp_group: torch.distributed.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """This cp rank's part of each sequence or packed document, ``[b, s / cp]``."""
    if "cu_seqlens" not in batch:
        return get_batch_on_this_cp_rank(batch, cp_group)
    rows = len(batch["tokens"])
    borders = batch["cu_seqlens"]
    joined = {name: value.reshape(1, -1) for name, value in batch.items() if value is not borders}
    part = get_batch_on_this_cp_rank({**joined, "cu_seqlens": borders}, cp_group)
    # Documents end with their window, so a rank has equally many tokens of each window.
    return {
        name: value if value is borders else value.reshape(rows, -1) for name, value in part.items()
    }


def copy_without_wait(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device from pinned memory, for which the host need not wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def document_mask(
    cu_seqlens: torch.Tensor,
    rows: int,
    cp_group: torch.distributed.ProcessGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """The attention mask of packed windows, ``[b, 1, s / cp, s]``, True for allowed keys.

    A query attends to earlier tokens of its document. Keys are in the order of the cp ranks.
    """
    size, length = get_pg_size(cp_group), int(cu_seqlens[-1])
    of_ranks = [
        cp_zigzag_index(length, size, rank, cu_seqlens=cu_seqlens).view(rows, -1)
        for rank in range(size)
    ]
    keys = torch.cat(of_ranks, dim=1)
    queries = of_ranks[get_pg_rank(cp_group)]
    ends = cu_seqlens[1:]
    first_of_query = torch.cat((ends.new_zeros(1), ends))[
        torch.bucketize(queries, ends, right=True)
    ]
    queries, keys, first = (
        copy_without_wait(places, device) for places in (queries, keys, first_of_query)
    )
    keys = keys[:, None, :]
    mask = (keys <= queries[:, :, None]) & (keys >= first[:, :, None])
    return mask[:, None]
