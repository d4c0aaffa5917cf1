"""The command ``verify``: the content of checkpoints against their checksums, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error, find_passing
from mcore.parallel.checkpoint.files import places
from mcore.parallel.checkpoint.files.index import (
    file_problems,
    piece_problem,
    read_index,
    whole_file_problems,
)
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, Index, Piece
from mcore.parallel.checkpoint.files.pieces import Scratch
from mcore.parallel.checkpoint.inspection import contents
from mcore.parallel.shortened import counted
from mcore.parallel.torch_compat import METADATA_FILE

_BATCH_BYTES = 1 << 26  # per task of a worker, in one file
_BATCH_PIECES = 1000
_FEW_BYTES = 1 << 28  # below, starting processes takes longer than it saves


class Damage(NamedTuple):
    """A key or file that has changed since it was saved."""

    key: str  # empty: the whole file
    file: str
    problem: str


class _Batch(NamedTuple):
    """Pieces of one file, with their keys, for one worker."""

    path: places.Place
    has_checksums: bool
    pieces: list[tuple[str, Piece]]

    @property
    def num_bytes(self) -> int:
        return sum(piece.span for _, piece in self.pieces)


def verify(path: places.PathLike, workers: int | None, output: contents.Output) -> int:
    """Read every byte of a checkpoint, or of a run's checkpoints, and name the damaged keys."""
    directory = places.place_of(path)
    found = contents.checkpoints_in(directory) or [directory]
    if not contents.is_checkpoint(found[0]):
        read_index(directory)  # raises an error that describes the path
    reports = [_check_checkpoint(one, workers, output) for one in found]
    content = (
        reports[0] if found == [directory] else {"path": str(directory), "checkpoints": reports}
    )
    output.report(content, (line for report in reports for line in _format_lines(report)))
    return 0 if all(report["ok"] for report in reports) else 1


def _check_checkpoint(
    directory: places.Place, workers: int | None, output: contents.Output
) -> dict[str, Any]:
    report = {"path": str(directory), "ok": True, "bytes": 0, "pieces": 0, "damaged": []}
    try:
        index = read_index(directory)
        batches = list(_make_batches(directory, index))
        report["bytes"] = sum(batch.num_bytes for batch in batches)
        report["pieces"] = sum(len(batch.pieces) for batch in batches)
        damaged = _find_damage(directory, index, batches, workers, output)
    except CheckpointingException as error:
        if find_passing(error):
            raise
        damaged = [Damage("", MANIFEST_FILE, str(error))]
    report["ok"], report["damaged"] = not damaged, [one._asdict() for one in damaged]
    return report


def _format_lines(report: dict[str, Any]) -> Iterator[str]:
    path = contents.escaped(report["path"])
    if report["ok"]:
        amount = f"{counted(report['pieces'], 'piece')}, {contents.size_text(report['bytes'])}"
        yield f"{path}: as it was saved ({amount})"
        return
    yield f"{path}: DAMAGED"
    for one in report["damaged"]:
        subject = f"key {one['key']!r} in {one['file']}" if one["key"] else one["file"]
        yield f"  {contents.escaped(subject)}: {contents.escaped(one['problem'])}"


def _make_batches(directory: places.Place, index: Index) -> Iterator[_Batch]:
    """Yield all pieces, in the order of the files."""
    inside: dict[str, list[tuple[str, Piece]]] = {}
    for name, stored in index.keys.items():
        for piece in stored.pieces:
            inside.setdefault(piece.file, []).append((name, piece))
    for file, pieces in sorted(inside.items()):
        batch: list[tuple[str, Piece]] = []
        for key, piece in sorted(pieces, key=lambda one: one[1].at):
            is_full = batch and piece.at + piece.span - batch[0][1].at > _BATCH_BYTES
            if is_full or len(batch) == _BATCH_PIECES:
                yield _Batch(directory / file, index.has_checksums, batch)
                batch = []
            batch.append((key, piece))
        yield _Batch(directory / file, index.has_checksums, batch)


def _find_damage(
    directory: places.Place,
    index: Index,
    batches: Sequence[_Batch],
    workers: int | None,
    output: contents.Output,
) -> list[Damage]:
    damaged = [Damage("", *one) for one in file_problems(directory, index)]
    unreadable = {one.file for one in damaged}
    if not unreadable.intersection(index.whole_files):
        damaged += [Damage("", *one) for one in whole_file_problems(directory, index)]
    damaged += [
        Damage(name, MANIFEST_FILE if index.has_checksums else METADATA_FILE, problem)
        for name, stored in index.keys.items()
        if (problem := contents.coverage_problem(stored))
    ]
    total = sum(batch.num_bytes for batch in batches)
    are_local = not isinstance(directory, places.RemotePath)
    workers = workers or len(os.sched_getaffinity(0))
    # Processes, since checksums in Python hold the interpreter lock. Remote reads wait for the
    # network, so threads are enough for them.
    executor: futures.Executor
    if are_local and total >= _FEW_BYTES and workers > 1:
        executor = futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
    else:
        executor = futures.ThreadPoolExecutor(workers)
    with output.progress(directory.name, total) as report, executor:
        started: dict[futures.Future[list[Damage]], int] = {
            executor.submit(_check_batch, batch): batch.num_bytes for batch in batches
        }
        try:
            for future in futures.as_completed(started):
                damaged += future.result()
                report(started[future])
        finally:
            executor.shutdown(cancel_futures=True)
    return sorted(damaged)


def _check_batch(batch: _Batch) -> list[Damage]:
    scratch, damaged = Scratch(), []
    try:
        with places.open_regular(batch.path) as stream:
            for key, piece in batch.pieces:
                try:
                    problem = piece_problem(stream, key, piece, batch.has_checksums, scratch)
                except EOFError as error:
                    problem = str(error)
                if problem is not None:
                    damaged.append(Damage(key, piece.file, problem))
    except (CheckpointingException, OSError) as error:
        if find_passing(error) and places.without_damage(batch.path, error) is not None:
            raise
        keys = dict.fromkeys(key for key, _ in batch.pieces)
        return [Damage(key, batch.path.name, describe_error(error)) for key in keys]
    return damaged
