"""The commands ``ls``, ``show`` and ``to-torch``: tables of a checkpoint, and it as one file."""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, find_passing
from mcore.parallel.checkpoint.files import places
from mcore.parallel.checkpoint.files.directory import (
    is_incomplete_name,
    new_large_file,
    sync_directory,
)
from mcore.parallel.checkpoint.files.index import (
    PICKLE_START,
    file_problems,
    nested_paths,
    read_index,
)
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
from mcore.parallel.checkpoint.save import name_failure
from mcore.parallel.shortened import counted, ranks_text, shorten
from mcore.parallel.torch_compat import METADATA_FILE

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
    """Write a checkpoint, or some keys, as one dict. One rename makes the file appear."""
    target = places.local_path(file)
    if os.path.lexists(target):
        raise CheckpointingException(f"{target} already exists and is not overwritten")
    if not target.parent.is_dir():
        raise CheckpointingException(f"cannot write {target}: there is no folder {target.parent}")
    values: dict[str, Any] = {}
    with Contents(path) as contents:
        names = contents.names(keys)
        contents.require_whole(names)
        total = sum(num_bytes_of(contents.index.keys[name]) for name in names)
        with output.progress("read", total) as report:
            for name in names:
                stored = contents.index.keys[name]
                if stored.dtype is None:
                    values[name] = contents.value(name)
                else:
                    values[name] = contents.box(name, (0,) * len(stored.shape), stored.shape)
                report(num_bytes_of(stored))
    incomplete = target.with_name(f".{target.name}.incomplete-{secrets.token_hex(8)}")
    try:
        # torch hides the error of a write, such as a full disk, unless Python makes the write.
        with new_large_file(incomplete) as stream:
            torch.save(_nest(values, nested_paths(_read_metadata(contents.directory))), stream)
            stream.flush()
            os.fsync(stream.fileno())
        incomplete.rename(target)
        sync_directory(target.parent)
    except (OSError, RuntimeError) as error:
        raise name_failure(error, target) from error
    finally:
        incomplete.unlink(missing_ok=True)
    found = {"path": str(contents.directory), "file": str(target), "keys": names, "bytes": total}
    text = f"{escaped(str(target))}: {counted(len(names), 'key')}, {size_text(total)}"
    output.report(found, [text])
    return 0


def _read_metadata(directory: places.Place) -> bytes:
    """Return torch's index, which has the nesting of a state dict, or nothing without one."""
    try:
        return places.read_regular(directory / METADATA_FILE, PICKLE_START)
    except CheckpointingException as error:
        if find_passing(error):
            raise
        return b""


class _Node(dict[Any, Any]):
    """A dict or list made here, to distinguish it from a value that is a dict."""


def _nest(values: dict[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> Any:
    """Return values in dicts and lists as they were saved, or by key if the paths do not fit."""
    root = _Node()
    for name, value in values.items():
        node, (*inner, last) = root, paths.get(name) or (name,)
        for step in inner:
            node = node.setdefault(step, _Node())
            if type(node) is not _Node:
                return values
        if last in node:
            return values
        node[last] = value
    return _make_plain_containers(root)


def _make_plain_containers(node: Any) -> Any:
    if type(node) is not _Node:
        return node
    inside = {step: _make_plain_containers(value) for step, value in node.items()}
    if {type(step) for step in inside} == {int} and max(inside) == len(inside) - 1:
        return [inside[place] for place in range(len(inside))]
    return inside
