"""Folders of Hugging Face: safetensors with an index, of which each rank has byte ranges.

In a save, the first rank makes each file at its full size, with its header. Then each rank writes
the rows, or parts of rows, that it holds, at their positions. A load reads them as it reads
checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import secrets
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore.parallel.checkpoint import load
from mcore.parallel.checkpoint.builders import sharded_state_dict_default
from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    describe_error,
    name_checkpoint,
    raise_as_damage,
)
from mcore.parallel.checkpoint.figures import Clock
from mcore.parallel.checkpoint.files.directory import LocalSave, reserve, sync_file, write_file
from mcore.parallel.checkpoint.files.manifest import Index, Piece, StoredKey
from mcore.parallel.checkpoint.files.places import PathLike, local_path, open_regular, read_regular
from mcore.parallel.checkpoint.hugging_face.names import Names, find_rule
from mcore.parallel.checkpoint.planning import staging
from mcore.parallel.checkpoint.planning.description import describe_leaves
from mcore.parallel.checkpoint.planning.writers import WRITTEN, GlobalPlan
from mcore.parallel.checkpoint.run_state.model_state import model_state
from mcore.parallel.checkpoint.save import save_sharded_state_dict
from mcore.parallel.checkpoint.selection import LoadReport, Selection
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor
from mcore.parallel.checkpoint.state_tree import Entries, bare_shard
from mcore.parallel.checkpoint.team import team_of
from mcore.parallel.groups import GroupLike
from mcore.parallel.shortened import titled_list
from mcore.parallel.tensor_memory import memory_of, row_major_on_cpu

logger = logging.getLogger(__name__)

State = Mapping[str, Any] | torch.nn.Module | Iterable[torch.nn.Module]
_Listed = tuple[list[ShardedTensor], dict[str, list[str]], list[str]]
_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}


def save_hf(
    folder: PathLike,
    state: State,
    mapping: Names = None,
    *,
    config: Mapping[str, Any] | PathLike | None = None,
    max_shard_size: int | str = "5GB",
    process_group: GroupLike | None = None,
) -> None:
    """Write tensors in any layout as a folder that ``from_pretrained`` of transformers reads.

    Collective over ``process_group``: all its ranks call it with the same arguments, each with its
    part of the state. Each rank writes the byte ranges of its part into files that the first rank
    has made at their full size. Beyond its part, a rank needs memory for one tensor at most.
    Replicas that several ranks hold are compared. When all files are on storage, one rename makes
    the folder appear. Without torch.distributed this process writes alone.

    Args:
        folder: The folder to make, on a file system that all ranks share. It must not exist.
        state: A model in any layout, or a state dict of ShardedTensor, DTensor and plain tensors.
            For a model with ``sharded_state_dict()``, its result is used. A tensor that has several
            keys is written once, under the first.
        mapping: The names in the folder by the keys of the state, as a dict or a function. A value
            is a name, an :class:`HFTensor`, or None to leave a key out. ``*`` in a key of a dict is
            one part of a key between dots, and replaces ``*`` in the names. Without a mapping, keys
            are names: for the models of transformers.
        config: The content of ``config.json``, or a file to copy there.
        max_shard_size: The most bytes of tensors in a file: a number, or a text such as "5GB" (10^9
            bytes each) or "5GiB". A larger tensor gets a separate file.
        process_group: The ranks that save. None is the world.

    Raises:
        CheckpointingException: On every rank, and no folder is left: it exists or cannot be
            written, the mapping has no name for a key or does not fit a shape, the parts of all
            ranks do not make whole tensors, safetensors has no such dtype, replicas differ, the
            extra ``mcore-parallel[safetensors]`` is not installed, or a rank failed or died.
        ValueError: This rank is not a member of the group.

    Example:
        >>> import tempfile, torch
        >>> from mcore.parallel.checkpoint import load_hf
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> save_hf(folder, {"w": torch.arange(3.0)}, {"w": "model.w"}, config={"model_type": "x"})
        >>> weight = torch.zeros(3)
        >>> load_hf(folder, {"w": weight}, {"w": "model.w"}).loaded
        {'w': 'model.w'}
        >>> weight
        tensor([0., 1., 2.])
    """
    team, clock = team_of(process_group), Clock()

    def describe() -> tuple[tuple[Path, list[Any], bytes], list[int]]:
        final, shards = local_path(folder), _list_stored(state, mapping)[0]
        if team.is_first:
            reserve(final)
        entries = Entries([((one.key,), one) for one in shards], [], {}, [])
        facts = {"folders": f"{final}"}  # equal on all ranks
        leaves = staging.list_candidates(entries)
        described = describe_leaves(entries, leaves, team.size, facts, check_replicas=True)
        payload = pickle.dumps(described)
        return (final, leaves, payload), [len(payload)]

    def decide() -> list[bytes]:
        if not team.is_first:
            return [b""]
        plan = GlobalPlan([pickle.loads(one) for one in payloads])
        plan.require_whole()
        records = [one.record for rank in range(team.size) for one in plan.iterate_writes(rank)]
        tensors = {one.key: (getattr(torch, one.dtype), one.global_shape) for one in records}
        save = LocalSave(final, token := secrets.randbits(62))
        cleanup.callback(save.discard)  # a published folder has another name
        save.begin()
        _make_files(save.folder, tensors, _parse_size(max_shard_size))
        if isinstance(config, Mapping):
            write_file(save.folder / "config.json", json.dumps(config, indent=2).encode())
        elif config is not None:
            write_file(save.folder / "config.json", local_path(config).read_bytes())
        return [pickle.dumps((token, read_folder(save.folder).keys, plan.flags))]

    def write() -> None:
        for leaf, flag in zip(leaves, flags[team.rank], strict=True):
            if not flag & WRITTEN or not prod(leaf.local_shape):
                continue
            [piece] = stored[leaf.key].pieces
            tensor = row_major_on_cpu(leaf.data)
            with (save.folder / piece.file).open("r+b", buffering=0) as stream:
                _write_box(stream.fileno(), piece.at, piece.shape, leaf.global_offset, tensor)
        for file in {one.pieces[0].file for one in stored.values()}:
            sync_file(save.folder / file)

    with ExitStack() as cleanup, name_checkpoint("save", folder):
        (final, leaves, payload), [longest] = team.agree_max(describe, 1)
        payloads = team.gather(payload, longest)
        clock.end_phase("describe")
        token, stored, flags = pickle.loads(team.share(decide)[0])
        save = LocalSave(final, token)
        clock.end_phase("decide")
        team.agree(write)
        clock.end_phase("write")
        team.agree(partial(save.publish, {}) if team.is_first else list)
    clock.end_phase("publish")
    if team.is_first:
        sizes = [file.stat().st_size for file in final.iterdir()]
        logger.info("saved %s: %s", final, clock.stop(sum(sizes), len(sizes)))


def load_hf(
    folder: PathLike,
    state: State,
    mapping: Names = None,
    *,
    strict: bool = True,
    cast: bool = False,
    process_group: GroupLike | None = None,
) -> LoadReport:
    """Read safetensors of Hugging Face into tensors in any layout, which are filled in place.

    Collective over ``process_group``: all its ranks call it, each with its part of the state. The
    first rank reads index and headers for all. Then each rank reads the rows that it needs, through
    a buffer of 1 MiB. Names, shapes and dtypes are checked first: if one does not fit on a rank, no
    tensor on any rank has changed. Without torch.distributed this process loads alone.

    Args:
        folder: A folder of ``save_pretrained`` or :func:`save_hf`, with an index or one file.
        state: As in :func:`save_hf`, with tensors on real devices.
        mapping: As in :func:`save_hf`.
        strict: Raise if the folder lacks a tensor, with the closest unused name for the mapping.
            Otherwise the present values stay.
        cast: Cast floating-point tensors to the dtypes of the state. False refuses other dtypes.
        process_group: The ranks that load. None is the world.

    Returns:
        The keys of this rank's state that were loaded, with their names, joined by commas, the keys
        that the mapping leaves out, the missing keys, and the names that no rank loaded. A missing
        key is filled in part if the folder has some of its names.

    Raises:
        DamagedCheckpointError: On every rank: the index or a file is missing or damaged, or the
            index names a file outside the folder.
        CheckpointingException: On every rank: a tensor is missing, a shape or dtype does not fit,
            the mapping has no name for a key, or the extra is not installed.
        ValueError: This rank is not a member of the group.

    Example:
        >>> import torch
        >>> load_hf("/no/such/folder", torch.nn.Linear(2, 1))
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.DamagedCheckpointError: cannot load ...
    """
    team, report, clock = team_of(process_group), LoadReport(), Clock()

    def read() -> list[bytes]:
        with raise_as_damage():
            return [pickle.dumps(read_folder(local_path(folder))) if team.is_first else b""]

    def choose() -> _Listed:
        shards, names, left = _list_stored(state, mapping)
        pairs = [(one, keys[one.key].dtype) for one in shards if one.key in keys]
        casts = [f"{one.key!r}: {kind} to {one.dtype}" for one, kind in pairs if kind != one.dtype]
        if casts and not cast:
            raise CheckpointingException(titled_list("casts need cast=True", casts, "tensor"))
        if strict:
            _require_names(shards, names, keys)
        return shards, names, left

    with name_checkpoint("load", folder):
        index = pickle.loads(team.share(read)[0])
        keys = index.keys
        shards, names, left = team.agree(choose)
    clock.end_phase("index")
    opened = load.OpenCheckpoint(local_path(folder), len(keys), b"", index, clock)
    options = load.LoadOptions(strict, "ignore", True, False, False)
    selection = Selection(report=report)
    load.load_opened(opened, lambda: {"tensors": shards}, team, options, selection=selection)
    opened.log_figures(team)
    loaded = {key: ", ".join(one) for key, one in names.items() if keys.keys() >= {*one}}
    return LoadReport(loaded, left, [key for key in names if key not in loaded], report.unused)


def _list_stored(state: State, mapping: Names) -> _Listed:
    """Return shards as they are stored, the names of each key, and the keys that are left out."""
    tree: Any = state
    if hasattr(state, "sharded_state_dict"):
        tree = sharded_state_dict_default(tree)
    elif not isinstance(state, Mapping):
        modules = model_state(state)  # tensors that hooks compute cannot be filled in place
        leaves = {name: leaf.value for name, leaf in modules.leaves.items()}
        tree = {name: one if id(one) in modules.in_place else None for name, one in leaves.items()}
    shards: list[ShardedTensor] = []
    names, left, seen = {}, [], dict[Any, str]()
    for name, leaf in tree.items():
        key = getattr(leaf, "key", name)
        rule = find_rule(mapping, key)
        if rule is None:
            left.append(key)
            continue
        shard = bare_shard(leaf, key) if isinstance(leaf, torch.Tensor) else leaf
        [local] = staging.list_local([shard])
        problem: str | None = "is no parameter, buffer or tensor with data"
        if local is not None:
            problem = staging.data_problem(local := staging.view_box(shard, local))
        if local is None or problem or local.dtype not in _KINDS:
            problem = problem or f"has {leaf.dtype}, which safetensors lacks"
            raise CheckpointingException(f"key {key!r} {problem}. None in the mapping omits it")
        memory = (local.data_ptr() or id(leaf), local.shape, local.stride(), shard.global_offset)
        if seen.setdefault(memory, key) == key:  # else it is tied to the first key
            shards += rule.cut(shard, local)
            names[key] = rule.listed
    return shards, names, left


def _require_names(
    shards: Iterable[ShardedTensor], names: Mapping[str, list[str]], keys: Mapping[str, StoredKey]
) -> None:
    """Raise for tensors that the folder lacks, with the way to name them otherwise."""
    wanted = {one.key for one in shards if prod(one.global_shape)}
    pairs = [(key, name) for key in names for name in names[key] if name in wanted - keys.keys()]
    if not pairs:
        return
    key, name = pairs[0]
    [closest] = get_close_matches(name, [*keys.keys() - wanted], 1, 0) or ["a name in the folder"]
    title = (
        "the folder lacks some tensors. If it has them under other names, or in several parts, "
        f"pass a mapping to these, such as mapping=lambda key: {{{key!r}: {closest!r}}}.get(key, "
        "key), with an HFTensor for parts. strict=False keeps the present values"
    )
    lines = [f"key {key!r} has no tensor {name!r} in the folder" for key, name in pairs]
    if closest in keys:
        lines[0] += f". The unused name closest to it is {closest!r}"
    raise CheckpointingException(titled_list(title, lines, "tensor"))


def _make_files(folder: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]], limit: int) -> None:
    """Make the index, and files of their full size with their headers."""
    headers: list[dict[str, Any]] = [{}]
    ends = [0]
    # Tensors with wide elements first, so each starts at a multiple of its element's size.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: -one[1][0].itemsize):
        size = prod(shape) * dtype.itemsize
        if headers[-1] and ends[-1] + size > limit:
            headers.append({})
            ends.append(0)
        offsets = [ends[-1], ends[-1] + size]
        headers[-1][name] = {"dtype": _KINDS[dtype], "shape": shape, "data_offsets": offsets}
        ends[-1] += size
    files: dict[str, str] = {}
    for number, (header, end) in enumerate(zip(headers, ends, strict=True), 1):
        file = f"model-{number:05}-of-{len(headers):05}.safetensors" if headers[1:] else _ONE_FILE
        files |= dict.fromkeys(header, file)
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("xb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
    if headers[1:]:
        index = {"metadata": {"total_size": sum(ends)}, "weight_map": files}
        write_file(folder / _INDEX, json.dumps(index, indent=2).encode())


def _write_box(descriptor: int, at: int, whole: Shape, start: Shape, tensor: torch.Tensor) -> None:
    """Write a box of a tensor that is stored row-major at a position of a file."""
    row_bytes = prod(whole[1:]) * tensor.itemsize
    if tensor.shape[1:] != whole[1:]:
        for number, row in enumerate(tensor, start[0]):
            _write_box(descriptor, at + number * row_bytes, whole[1:], start[1:], row)
        return
    memory, at = memory_of(tensor), at + sum(start[:1]) * row_bytes
    while memory:
        count = os.pwrite(descriptor, memory, at)
        memory, at = memory[count:], at + count


def _parse_size(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(I?)B?", f"{size}".strip().upper())
    base = 1024 if match and match[3] else 1000
    number = int(float(match[1]) * base ** " KMGT".index(match[2] or " ")) if match else 0
    if number < 1:
        raise CheckpointingException(f"max_shard_size is bytes or such as '5GB', got {size!r}")
    return number


def read_folder(folder: Path) -> Index:
    """Read the index and headers of a folder. The library checks each header first."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ModuleNotFoundError('pip install "mcore-parallel[safetensors]"') from error
    place, keys = folder / _INDEX, dict[str, StoredKey]()
    try:
        listed = json.loads(read_regular(place, b"{"))["weight_map"] if place.exists() else {}
        for file in sorted({*listed.values()}) or [_ONE_FILE]:
            if Path(file).name != file:
                raise CheckpointingException(f"the index in {folder} names {file!r}, outside of it")
            place = folder / file
            with open_regular(place) as stream:  # a FIFO would block the library
                safe_open(place, framework="pt")
                [length] = struct.unpack("<Q", stream.read(8) or b"")
                header = json.loads(stream.read(length) or b"")
            header.pop("__metadata__", None)
            for name in [one for one in listed if listed[one] == file] or header:
                dtype, shape = _DTYPES[header[name]["dtype"]], tuple(header[name]["shape"])
                start, size = header[name]["data_offsets"][0], prod(shape) * dtype.itemsize
                piece = Piece(file, 8 + length + start, size, size, "", 0, (0,) * len(shape), shape)
                keys[name] = StoredKey(dtype, shape, (piece,))
    except Exception as error:  # of the library, or of JSON of another form
        raise CheckpointingException(f"{place} is unreadable ({describe_error(error)})") from error
    return Index(keys, {}, has_checksums=False)


def to_hf(path: str, new: str, prefix: str, output: Any, **options: Any) -> int:
    """Write the tensors of a checkpoint whose keys start with ``prefix`` as a folder."""
    stored = load.open_checkpoint(path, team_of(None)).index.keys
    keys = [key for key in stored if key.startswith(prefix)]
    if not keys:
        raise CheckpointingException(f"{path} has no key that starts with {prefix!r}")
    found = load.load_sharded_state_dict(dict.fromkeys(keys), path, unexpected="ignore")
    save_hf(new, {key.removeprefix(prefix): one for key, one in found.items()}, **options)
    output.report({"new": new, "keys": keys}, [f"{new}: {len(keys)} tensors"])
    return 0


def from_hf(path: str, new: str, prefix: str, output: Any) -> int:
    """Write the tensors of a folder as a checkpoint, with keys that start with ``prefix``."""
    stored = read_folder(local_path(path)).keys
    state = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    load_hf(path, state)
    renamed = {prefix + name: tensor for name, tensor in state.items()}
    save_sharded_state_dict(renamed, new)
    output.report({"new": new, "keys": [*renamed]}, [f"{new}: {len(renamed)} tensors"])
    return 0
