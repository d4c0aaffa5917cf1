"""The command ``to-torch``: a checkpoint as one file of ``torch.save``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, find_passing
from mcore.parallel.checkpoint.files.index import PICKLE_START, nested_paths
from mcore.parallel.checkpoint.files.places import PathLike, Place, local_path, read_regular
from mcore.parallel.checkpoint.files.save_place import sync_directory, sync_file
from mcore.parallel.checkpoint.inspection.contents import Contents, num_bytes_of
from mcore.parallel.checkpoint.inspection.output import Output, escaped, size_text
from mcore.parallel.shortened import counted
from mcore.parallel.torch_compat import METADATA_FILE


def to_torch(path: PathLike, file: str, patterns: Sequence[str], output: Output) -> int:
    """Write a checkpoint, or some keys, as one dict. One rename makes the file appear."""
    target = local_path(file)
    if os.path.lexists(target):
        raise CheckpointingException(f"{target} already exists and is not overwritten")
    if not target.parent.is_dir():
        raise CheckpointingException(f"cannot write {target}: there is no folder {target.parent}")
    values: dict[str, Any] = {}
    with Contents(path) as contents:
        names = contents.names(patterns)
        contents.require_whole(names)
        total, done = sum(num_bytes_of(contents.index.keys[name]) for name in names), 0
        for name in names:
            stored = contents.index.keys[name]
            if stored.dtype is None:
                values[name] = contents.value(name)
            else:
                values[name] = contents.box(name, (0,) * len(stored.shape), stored.shape)
            done += num_bytes_of(stored)
            output.progress(done, total, "read")
    incomplete = target.with_name(f".{target.name}.incomplete-{secrets.token_hex(8)}")
    try:
        torch.save(_nest(values, nested_paths(_read_metadata(contents.directory))), incomplete)
        sync_file(incomplete)
        incomplete.rename(target)
        sync_directory(target.parent)
    finally:
        incomplete.unlink(missing_ok=True)
    report = {"path": str(contents.directory), "file": str(target), "keys": names, "bytes": total}
    text = f"{escaped(str(target))}: {counted(len(names), 'key')}, {size_text(total)}"
    output.report(report, [text])
    return 0


def _read_metadata(directory: Place) -> bytes:
    """Return torch's index, which has the nesting of a state dict, or nothing without one."""
    try:
        return read_regular(directory / METADATA_FILE, PICKLE_START)
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
