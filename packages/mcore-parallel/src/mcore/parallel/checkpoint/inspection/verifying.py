"""The content of checkpoints against their checksums, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from typing import Any, NamedTuple

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.files.archive import FileSlice, archive_problem
from mcore.parallel.checkpoint.files.checksums import Scratch, checksum_in, sums_in
from mcore.parallel.checkpoint.files.index import Index, Piece
from mcore.parallel.checkpoint.files.manifest import MANIFEST_FILE, file_problems, read_index
from mcore.parallel.checkpoint.files.regular_files import PathLike, Place, open_regular, place_of
from mcore.parallel.checkpoint.files.remote import RemotePath, is_unreachable
from mcore.parallel.checkpoint.inspection.contents import checkpoints_in, is_checkpoint
from mcore.parallel.checkpoint.inspection.output import Output, escaped, size_text
from mcore.parallel.shortened import counted

_BATCH_BYTES = 1 << 26  # what one worker takes at a time, in one file
_BATCH_PIECES = 1000
_FEW_BYTES = 1 << 28  # processes are worth their start above


class Damage(NamedTuple):
    """Something of a checkpoint that is not as it was saved."""

    key: str  # empty: the file as a whole
    file: str
    problem: str


class _Batch(NamedTuple):
    """Pieces of one file, and their keys, that one worker reads."""

    path: Place
    checksums: str
    pieces: list[tuple[str, Piece]]

    @property
    def num_bytes(self) -> int:
        return sum(piece.span for _, piece in self.pieces)


def verify(path: PathLike, workers: int | None, output: Output) -> int:
    """Read every byte of a checkpoint, or of all of a run, and name the damaged keys."""
    directory = place_of(path)
    found = checkpoints_in(directory) or [directory]
    if not is_checkpoint(found[0]):
        read_index(directory)  # which says what it is
    reports = [_report(one, workers, output) for one in found]
    content = (
        reports[0] if found == [directory] else {"path": str(directory), "checkpoints": reports}
    )
    output.report(content, (line for report in reports for line in _lines(report)))
    return 0 if all(report["ok"] for report in reports) else 1


def _report(directory: Place, workers: int | None, output: Output) -> dict[str, Any]:
    report = {"path": str(directory), "ok": True, "bytes": 0, "pieces": 0, "damaged": []}
    try:
        index = read_index(directory)
    except CheckpointingException as error:
        if is_unreachable(error):
            raise
        damaged = [Damage("", MANIFEST_FILE, str(error))]
    else:
        batches = list(_batches(directory, index))
        report["bytes"] = sum(batch.num_bytes for batch in batches)
        report["pieces"] = sum(len(batch.pieces) for batch in batches)
        damaged = _damage(directory, index, batches, workers, output)
    report["ok"], report["damaged"] = not damaged, [one._asdict() for one in damaged]
    return report


def _lines(report: dict[str, Any]) -> Iterator[str]:
    path = escaped(report["path"])
    if report["ok"]:
        amount = f"{counted(report['pieces'], 'piece')}, {size_text(report['bytes'])}"
        yield f"{path}: as it was saved ({amount})"
        return
    yield f"{path}: DAMAGED"
    for one in report["damaged"]:
        subject = f"key {one['key']!r} in {one['file']}" if one["key"] else one["file"]
        yield f"  {escaped(subject)}: {escaped(one['problem'])}"


def _batches(directory: Place, index: Index) -> Iterator[_Batch]:
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
                yield _Batch(directory / file, index.checksums, batch)
                batch = []
            batch.append((key, piece))
        yield _Batch(directory / file, index.checksums, batch)


def _damage(
    directory: Place, index: Index, batches: Sequence[_Batch], workers: int | None, output: Output
) -> list[Damage]:
    damaged = [Damage("", *one) for one in file_problems(directory, index)]
    unreadable = {one.file for one in damaged}
    for name, checksum in index.whole_files.items():
        if name not in unreadable:
            with open_regular(directory / name) as stream:
                found = checksum_in(stream, 0, index.files[name], Scratch())
            if found != checksum:
                damaged.append(Damage("", name, "its checksum differs"))
    done, total = 0, sum(batch.num_bytes for batch in batches)
    are_local = not isinstance(directory, RemotePath)
    with _executor(workers, total if are_local else 0) as executor:
        started: dict[Future[list[Damage]], int] = {
            executor.submit(_check, batch): batch.num_bytes for batch in batches
        }
        try:
            for future in as_completed(started):
                damaged += future.result()
                done += started[future]
                output.progress(done, total, directory.name)
        finally:
            executor.shutdown(cancel_futures=True)
    return sorted(damaged)


def _executor(workers: int | None, num_bytes: int) -> Executor:
    """Return processes where there is much to add up, which Python does in one thread at a time."""
    workers = workers or len(os.sched_getaffinity(0))
    if num_bytes < _FEW_BYTES or workers == 1:
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))


def _check(batch: _Batch) -> list[Damage]:
    scratch, damaged = Scratch(), []
    try:
        with open_regular(batch.path) as stream:
            for key, piece in batch.pieces:
                problem = _problem(stream, batch.checksums, piece, scratch)
                if problem is not None:
                    damaged.append(Damage(key, piece.file, problem))
    except (CheckpointingException, OSError) as error:
        if is_unreachable(error):
            raise
        keys = dict.fromkeys(key for key, _ in batch.pieces)
        return [Damage(key, batch.path.name, describe_error(error)) for key in keys]
    return damaged


def _problem(stream: Any, checksums: str, piece: Piece, scratch: Scratch) -> str | None:
    if not checksums:
        is_archive = not piece.transforms
        return archive_problem(FileSlice(stream, piece.at, piece.length)) if is_archive else None
    compute = checksum_in if checksums == "xxh3" else sums_in
    try:
        found = compute(stream, piece.at, piece.span, scratch)
    except EOFError as error:
        return str(error)
    return None if found == piece.checksum else "its checksum differs"
