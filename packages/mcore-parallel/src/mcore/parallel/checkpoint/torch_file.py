"""Checkpoints from and into files of ``torch.save``."""

from __future__ import annotations

import os
import secrets
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException, describe_error
from mcore.parallel.checkpoint.figures import show_progress
from mcore.parallel.checkpoint.files import places
from mcore.parallel.checkpoint.files.directory import new_large_file, sync_directory
from mcore.parallel.checkpoint.files.index import read_nested_paths
from mcore.parallel.checkpoint.inspection.contents import Contents, num_bytes_of
from mcore.parallel.checkpoint.save import SaveOptions, name_failure, save_tree
from mcore.parallel.checkpoint.team import team_of

if TYPE_CHECKING:
    from mcore.parallel.groups import GroupLike


def to_torch(
    path: places.PathLike,
    file: places.PathLike,
    *,
    keys: Sequence[str] = (),
    progress_bar: bool = False,
) -> list[str]:
    """Write a checkpoint as one file for ``torch.load``, with whole tensors in host memory.

    Without communication: call it on one rank. The file has the dicts and lists that were saved. As
    with torch's converter, a dict of the keys 0, 1, ... becomes a list, other keys become text, and
    an empty dict or list is left out, also as an element of a list. So the state of an optimizer is
    not one for its ``load_state_dict``: :func:`load_training_state` loads it from the checkpoint.
    The file appears in one step, when it is on storage. No code in the checkpoint is run.

    Args:
        path: The checkpoint, or its URL. It may be one of torch.distributed.checkpoint.
        file: The file, which must not exist.
        keys: Only these keys, with the wildcards ``*``, ``?`` and ``[...]``. None means all keys.
        progress_bar: If the reads take over 5 s, show a bar on a terminal. Needs tqdm.

    Returns:
        The keys that were written.

    Raises:
        CheckpointingException: The file exists or cannot be written, the checkpoint lacks a key, or
            is incomplete or damaged.

    Example:
        >>> import tempfile, torch
        >>> from mcore.parallel.checkpoint import from_torch
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"model": {"w": torch.ones(2)}, "step": 3}, folder + "/old.pt")
        >>> from_torch(folder + "/old.pt", folder + "/step_3")
        >>> to_torch(folder + "/step_3", folder + "/new.pt")
        ['model.w', 'step']
        >>> torch.load(folder + "/new.pt")
        {'model': {'w': tensor([1., 1.])}, 'step': 3}
    """
    target = places.local_path(file)
    if not target.parent.is_dir():
        raise CheckpointingException(f"cannot write {target}: there is no folder {target.parent}")
    _require_absent(target)
    values: dict[str, Any] = {}
    with Contents(path) as contents:
        names = contents.names(keys)
        contents.require_whole(names)
        sizes = {name: num_bytes_of(contents.index.keys[name]) for name in names}
        stream = sys.stderr if progress_bar else None
        with show_progress("read", sum(sizes.values()), stream) as report:
            for name in names:
                stored = contents.index.keys[name]
                if stored.dtype is None:
                    values[name] = contents.value(name)
                else:
                    values[name] = contents.box(name, (0,) * len(stored.shape), stored.shape)
                report(sizes[name])
    # Not longer than a name may be, whatever the name of the file.
    incomplete = target.with_name(f".{target.name[:50]}.incomplete-{secrets.token_hex(8)}")
    try:
        # torch hides the error of a write, such as a full disk, unless Python makes the write.
        with new_large_file(incomplete) as stream:
            torch.save(_nest(values, read_nested_paths(contents.directory)), stream)
            stream.flush()
            os.fsync(stream.fileno())
        _require_absent(target)  # another program may have made it since
        incomplete.rename(target)
        sync_directory(target.parent)
    except (OSError, RuntimeError) as error:
        raise name_failure(error, target) from error
    finally:
        incomplete.unlink(missing_ok=True)
    return names


def _require_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointingException(f"{target} already exists and is not overwritten")


def from_torch(
    file: places.PathLike,
    path: places.PathLike,
    *,
    process_group: GroupLike | None = None,
    weights_only: bool = True,
) -> None:
    """Write a file of ``torch.save``, with dicts and lists of tensors and values, as a checkpoint.

    Collective over ``process_group``: all its ranks call it and map the file into memory. Each
    writes a part of large tensors. Without torch.distributed this process writes alone.

    Args:
        file: The file.
        path: The checkpoint to make, or its URL. It must not exist.
        process_group: The ranks that save. None is the world.
        weights_only: Refuse to run code from the file, and objects that a load would refuse.

    Raises:
        CheckpointingException: On every rank: the file cannot be read or has no dict, or the
            checkpoint exists or cannot be written.
        ValueError: This rank is not a member of the group.

    Example:
        >>> from_torch("/no/such/file.pt", "/tmp/step_0")
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.CheckpointingException: cannot save ...
    """

    def build() -> tuple[Mapping[str, Any], Mapping[str, str]]:
        source = places.local_path(file)
        try:
            is_mapped = zipfile.is_zipfile(source)  # files of torch before 1.6 are not
            found = torch.load(source, "cpu", weights_only=weights_only, mmap=is_mapped)
        except Exception as error:  # torch.load raises errors of many types
            text = f"{source} cannot be read as a file of torch.save ({describe_error(error)})"
            raise CheckpointingException(text) from error
        if not isinstance(found, Mapping):
            raise CheckpointingException(f"{source} has a {type(found).__name__}, not a dict")
        return found, {}

    save_tree(build, path, team_of(process_group), SaveOptions(False, False, weights_only, False))


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
