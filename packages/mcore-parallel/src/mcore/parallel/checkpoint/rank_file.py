"""The file that one rank writes in a save."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mcore.parallel.checkpoint.archive import elements_at
from mcore.parallel.checkpoint.checksums import checksum_of_part
from mcore.parallel.checkpoint.durable_files import new_large_file
from mcore.parallel.checkpoint.manifest import FileRecord, Part
from mcore.parallel.checkpoint.raw_reads import Scratch
from mcore.parallel.torch_compat import file_part

__all__ = ["RankFile"]

_ALIGNMENT_BYTES = 64  # as in archives of torch.save: memory is copied half as fast from odd places
Content = torch.Tensor | io.BytesIO


class RankFile:
    """The file that one rank writes in a save: objects, then tensors, each an archive of its own.

    Args:
        path: Its name.

    Attributes:
        path: Its name.
        key: The key whose content was asked for or written last, None before the first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key: str | None = None
        self._results: list[WriteResult] = []
        self._bytes_of_elements: dict[MetadataIndex, int] = {}

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write what a plan lists, and return where each item is."""
        with new_large_file(self.path) as stream:
            for item, content in self._contents(plan, planner):
                self._results.append(self._written(stream, item, content))
        return self._results

    def record(self) -> FileRecord:
        """Read the file again and describe what it holds."""
        scratch, parts, size = Scratch(), [], self.path.stat().st_size
        places = [result.storage_data for result in self._results]
        ends = [place.offset for place in places[1:]] + [size]
        with self.path.open("rb", buffering=0) as stream:
            for result, place, end in zip(self._results, places, ends, strict=True):
                elements = None
                if result.index in self._bytes_of_elements:
                    num_bytes = self._bytes_of_elements[result.index]
                    elements = elements_at(stream, place.offset, place.length, num_bytes)
                length = end - place.offset
                checksum = checksum_of_part(stream, place.offset, length, scratch)
                parts.append(Part(place.offset, length, checksum, elements))
        return FileRecord(size, tuple(parts))

    def _contents(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Iterator[tuple[WriteItem, Content]]:
        """Yield objects, then tensors, each of which is copied while the one before is written."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                self.key = item.index.fqn
                yield item, cast(io.BytesIO, planner.resolve_data(item))
        copies = self._started_copies(plan, planner)
        ahead = next(copies, None)
        while ahead is not None:
            (item, finish), ahead = ahead, next(copies, None)
            self.key = item.index.fqn
            yield item, finish()

    def _started_copies(
        self, plan: SavePlan, planner: SavePlanner
    ) -> Iterator[tuple[WriteItem, Callable[[], torch.Tensor]]]:
        for item in plan.items:
            if item.type != WriteItemType.BYTE_IO:
                self.key = item.index.fqn
                tensor = cast(torch.Tensor, planner.resolve_data(item))
                yield item, _copy_to_cpu(tensor.detach())

    def _written(self, stream: BinaryIO, item: WriteItem, content: Content) -> WriteResult:
        stream.write(bytes(-stream.tell() % _ALIGNMENT_BYTES))
        offset = stream.tell()
        if isinstance(content, torch.Tensor):
            torch.save(content, stream)
            self._bytes_of_elements[item.index] = content.nbytes
        else:
            stream.write(content.getbuffer())
        length = stream.tell() - offset
        return WriteResult(item.index, length, file_part(self.path.name, offset, length))


def _copy_to_cpu(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy a tensor to the CPU; what is returned waits for the end and gives the copy."""
    if tensor.is_cpu:
        return lambda: _without_neighbours(tensor)
    copy = tensor.to("cpu", non_blocking=True)
    event = torch.accelerator.current_stream(tensor.device).record_event()

    def finished() -> torch.Tensor:
        event.synchronize()
        return copy

    return finished


def _without_neighbours(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its storage for itself: archives hold storages as a whole."""
    alone = tensor.untyped_storage().nbytes() == prod(tensor.shape) * tensor.itemsize
    return tensor if alone else tensor.clone()
