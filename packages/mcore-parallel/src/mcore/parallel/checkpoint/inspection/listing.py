"""The commands ``ls``, ``show``, ``to-torch`` and ``from-torch``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mcore.parallel.checkpoint import torch_file
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files import places
from mcore.parallel.checkpoint.files.directory import is_incomplete_name
from mcore.parallel.checkpoint.files.index import file_problems, read_index
from mcore.parallel.checkpoint.files.manifest import DTYPES, Index, StoredKey
from mcore.parallel.checkpoint.inspection.contents import (
    Contents,
    Output,
    checkpoints_in,
    dtype_text,
    escaped,
    num_bytes_of,
    size_text,
    table,
)
from mcore.parallel.shortened import counted, ranks_text, shorten

_RANK_FILE = re.compile(r"__(\d+)_\d+.*\.distcp")
_OUR_FORMAT = "mcore-parallel, version 3, checksums XXH3 of 64 bits"
_TORCH_FORMAT = "torch.distributed.checkpoint, no checksums but the CRC-32 of archives"


def ls(path: places.PathLike, keys: Sequence[str], output: Output) -> int:
    """List the keys of a checkpoint, or the checkpoints of a run."""
    found = checkpoints_in(places.place_of(path))
    if found and not keys:
        entries = [_describe_checkpoint(one) for one in found]
        rows = [[e["name"], e["state"], e["keys"], size_text(e["bytes"])] for e in entries]
        content = {"path": str(places.place_of(path)), "checkpoints": entries}
        output.report(content, table(["checkpoint", "state", "keys", "size"], rows))
        return 0
    with Contents(path) as contents:
        names = contents.names(keys)
        described = [_describe_key(name, contents.index.keys[name]) for name in names]
    total = sum(key["bytes"] for key in described)
    content = {"path": str(contents.directory), "keys": described, "bytes": total}
    rows = [
        [
            key["key"],
            key["dtype"],
            key["shape"] if key["dtype"] in DTYPES else "",
            size_text(key["bytes"]),
            key["pieces"],
            format_writers(key["files"]),
        ]
        for key in described
    ]
    titles = ["key", "dtype", "shape", "size", "pieces", "written by"]
    total_text = f"{counted(len(described), 'key')}, {size_text(total)}"
    output.report(content, [*table(titles, rows), total_text])
    return 0


def _describe_checkpoint(path: places.Place) -> dict[str, Any]:
    """Describe a checkpoint by its index and the sizes of its files."""
    state, num_keys, num_bytes = "complete", 0, 0
    try:
        index = read_index(path)
        num_keys, num_bytes = len(index.keys), sum(index.files.values())
        if (problem := _find_problem(path, index)) is not None:
            state = f"damaged: {problem}"
    except CheckpointingException as error:
        state = f"damaged: {error}"
    if is_incomplete_name(path.name):
        state = "left by an unfinished save"
    return {"name": path.name, "state": state, "keys": num_keys, "bytes": num_bytes}


def _find_problem(path: places.Place, index: Index) -> str | None:
    return next((problem for _, problem in file_problems(path, index)), None)


def _describe_key(name: str, stored: StoredKey) -> dict[str, Any]:
    return {
        "key": name,
        "dtype": dtype_text(name, stored),
        "shape": list(stored.shape),
        "bytes": num_bytes_of(stored),
        "pieces": len(stored.pieces),
        "files": sorted({piece.file for piece in stored.pieces}),
    }


def format_writers(files: Iterable[str]) -> str:
    """Name the ranks that wrote some files, and the files whose names have no rank."""
    matches = [(name, _RANK_FILE.fullmatch(name)) for name in files]
    ranks = sorted({int(match[1]) for _, match in matches if match})
    others = sorted(name for name, match in matches if not match)
    return ", ".join(([ranks_text(ranks)] if ranks else []) + shorten(others, 3, "{} more files"))


def show(path: places.PathLike, keys: Sequence[str], output: Output) -> int:
    """Describe a checkpoint and its files, or the pieces of some keys."""
    with Contents(path) as contents:
        if keys:
            pieces = [_describe_pieces(name, contents) for name in contents.names(keys)]
            report = {"path": str(contents.directory), "keys": pieces}
            output.report(report, (line for key in pieces for line in _format_pieces(key)))
            return 0
        summary = _summarize(contents.directory, contents.index)
    output.report(summary, _format_summary(summary))
    return 0


def _summarize(directory: places.Place, index: Index) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    keys_in: Counter[str] = Counter()
    for name, stored in index.keys.items():
        numbers[dtype_text(name, stored)] += 1
        dtypes[dtype_text(name, stored)] += num_bytes_of(stored)
        keys_in.update({piece.file for piece in stored.pieces})
    return {
        "path": str(directory),
        "format": _OUR_FORMAT if index.has_checksums else _TORCH_FORMAT,
        "keys": len(index.keys),
        "bytes": sum(index.files.values()),
        "problem": _find_problem(directory, index),
        "dtypes": {
            name: {"keys": numbers[name], "bytes": size} for name, size in dtypes.most_common()
        },
        "files": [
            {
                "file": name,
                "bytes": size,
                "keys": keys_in[name],
                "writer": format_writers([name] if keys_in[name] else []),
            }
            for name, size in sorted(index.files.items())
        ],
    }


def _format_summary(summary: dict[str, Any]) -> Iterator[str]:
    yield escaped(summary["path"])
    yield f"written by {summary['format']}"
    files = counted(len(summary["files"]), "file")
    yield f"{counted(summary['keys'], 'key')}, {size_text(summary['bytes'])} in {files}"
    if summary["problem"] is not None:
        yield f"DAMAGED: {escaped(summary['problem'])}"
    yield ""
    dtypes = summary["dtypes"].items()
    rows = [[name, found["keys"], size_text(found["bytes"])] for name, found in dtypes]
    yield from table(["dtype", "keys", "size"], rows)
    yield ""
    named = [
        [one["file"], size_text(one["bytes"]), one["keys"], one["writer"]]
        for one in summary["files"]
    ]
    yield from table(["file", "size", "keys", "written by"], named)


def _describe_pieces(name: str, contents: Contents) -> dict[str, Any]:
    stored = contents.index.keys[name]
    value = contents.preview(name) if stored.dtype is None else ""
    pieces = [
        {
            "file": piece.file,
            "at": piece.at,
            "bytes": piece.length,
            "start": list(piece.start),
            "shape": list(piece.shape),
            "checksum": piece.checksum,
        }
        for piece in stored.pieces
    ]
    return {**_describe_key(name, stored), "pieces": pieces, **({"value": value} if value else {})}


def _format_pieces(key: dict[str, Any]) -> Iterator[str]:
    shape = f" {key['shape']}" if key["dtype"] in DTYPES else ""
    value = f" = {escaped(key['value'])}" if "value" in key else ""
    yield f"{escaped(key['key'])}: {key['dtype']}{shape}, {size_text(key['bytes'])}{value}"
    titles = ["file", "at", "bytes", "start", "shape", "checksum"]
    rows = [[piece[title] for title in titles] for piece in key["pieces"]]
    yield from (f"  {line}" for line in table(titles, rows))


def to_torch(path: places.PathLike, file: str, keys: Sequence[str], output: Output) -> int:
    """Write a checkpoint, or some keys, as one file for torch.load."""
    names = torch_file.to_torch(path, file, keys=keys, progress_bar=True)
    size = places.local_path(file).stat().st_size
    text = f"{escaped(file)}: {counted(len(names), 'key')}, {size_text(size)}"
    output.report({"file": file, "keys": names, "bytes": size}, [text])
    return 0


def from_torch(path: str, new: str, output: Output) -> int:
    """Write a file of torch.save as a checkpoint."""
    torch_file.from_torch(path, new)
    output.report({"new": new}, [escaped(new)])
    return 0
