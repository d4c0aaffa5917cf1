"""Saves and loads of sharded state dicts, collectively over all ranks."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from mcore.parallel.checkpoint.async_save import SaveHandle, start_async_save
from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    name_checkpoint,
    raise_as_damage,
)
from mcore.parallel.checkpoint.files.index import (
    file_problems,
    format_keys,
    parse_index,
    read_index_file,
    whole_file_problems,
)
from mcore.parallel.checkpoint.files.manifest import Index
from mcore.parallel.checkpoint.files.places import (
    PathLike,
    Place,
    place_of,
)
from mcore.parallel.checkpoint.files.save_place import (
    LocalSave,
    RemoteSave,
    is_incomplete_name,
    reserve,
    save_at,
)
from mcore.parallel.checkpoint.planning.staging import reject_unsavable, stage_entries
from mcore.parallel.checkpoint.planning.writers import choose_writers
from mcore.parallel.checkpoint.state_tree import Entries, flatten_state_dict
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

    from mcore.parallel.checkpoint.files.reader import CheckedReader, Verify
    from mcore.parallel.checkpoint.planning.load_planner import ShardedLoadPlanner
    from mcore.parallel.groups import GroupLike

Unexpected = Literal["raise", "warn", "ignore"]
_MEGATRON_FILE = "metadata.json"  # next to torch's index in checkpoints of Megatron-LM


@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: Literal[False] = False,
    check_replicas: bool = False,
    weights_only: bool = True,
) -> None: ...
@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: Literal[True],
    check_replicas: bool = False,
    weights_only: bool = True,
) -> SaveHandle: ...
@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool,
    check_replicas: bool = False,
    weights_only: bool = True,
) -> SaveHandle | None: ...
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool = False,
    check_replicas: bool = False,
    weights_only: bool = True,
) -> SaveHandle | None:
    """Write the state dicts of all ranks as one checkpoint, which becomes visible in one step.

    Collective over ``process_group``: all its ranks call it with the same path. Main replicas of
    tensors and objects are written. If a DTensor's mesh lacks some ranks, several ranks may hold a
    replica of a shard: these must be equal, and one is written. Any other leaf is written by the
    first rank that has it, with a warning if it differs between ranks.

    Files are written into a hidden directory next to ``path``. When they are on storage on all
    ranks, one rename makes it ``path``. If a process is killed before that, only the hidden
    directory is left, which :func:`remove_incomplete` deletes. At a URL, the manifest is written
    last and completes the checkpoint. A later save to the URL removes the files of a failed save.

    ``torch.distributed.checkpoint.load`` can read the files too. An additional ``manifest.json``
    has the index and checksums for loads of this package. The random state does not change.
    Without torch.distributed this process writes the same files alone.

    Args:
        sd: Nested dicts and lists of ShardedTensor, ShardedObject, LocalNonpersistentObject (not
            saved), DTensor (named by its path) and plain values, equal on all ranks.
        path: The directory to make, on a file system that all ranks share, or a URL of fsspec such
            as ``s3://bucket/step_1``. It must not exist. A leading ``~`` is expanded.
        process_group: The ranks that save. None is the world.
        async_: Copy this rank's data to the CPU, return, and write in a thread. Later changes of
            the tensors do not reach the checkpoint. Asynchronous saves run in the order of the
            calls, over a separate gloo group, which must not be destroyed before they are done.
        check_replicas: Before writing, compare all replicas on several ranks byte by byte. Every
            rank reads its whole state once.
        weights_only: Refuse objects and values that a load would refuse, since unpickling them
            runs code: NumPy values, paths, dates, enums, dataclasses, ...

    Returns:
        None, or the handle of an asynchronous save. Its ``result()`` waits for the rename.

    Raises:
        CheckpointingException: On every rank, and ``path`` is not changed: it exists, cannot be
            written, ranks named different paths, the shards do not make whole tensors, ranks hold
            different tensors under one key, a value cannot be pickled or would not be loaded, or a
            rank failed or died.
        ValueError: This rank is not a member of the group.

    Example:
        >>> import tempfile, torch
        >>> from mcore.parallel.checkpoint import make_sharded_tensor_for_checkpoint
        >>> path = tempfile.mkdtemp() + "/step_1"
        >>> weight = make_sharded_tensor_for_checkpoint(torch.arange(3.0), "weight")
        >>> save_sharded_state_dict({"weight": weight, "step": 1}, path)
        >>> target = make_sharded_tensor_for_checkpoint(torch.zeros(3), "weight")
        >>> load_sharded_state_dict({"weight": target, "step": 0}, path)
        {'weight': tensor([0., 1., 2.]), 'step': 1}
    """
    team = team_of(process_group)
    entries, final = team.agree(lambda: _prepare(sd, path, team))
    save = save_at(final, _agree_on_token(final, team))
    try:
        entries = choose_writers(entries, team, check_replicas=check_replicas)
        team.agree(lambda: reject_unsavable(entries, is_first=team.is_first))
    except CheckpointingException as error:
        raise CheckpointingException(f"cannot save {final}: {error}") from error

    def write(entries: Entries, team: Team) -> None:
        _write(entries, save, team, weights_only=weights_only)

    if not async_:
        write(entries, team)
        return None
    staged = team.agree(
        lambda: stage_entries(entries, is_first=team.is_first, weights_only=weights_only)
    )
    return start_async_save(final, team, lambda writers: write(staged, writers))


def _prepare(sd: Mapping[str, Any], path: PathLike, team: Team) -> tuple[Entries, Place]:
    entries, final = flatten_state_dict(sd), place_of(path)
    if is_incomplete_name(final.name):
        raise CheckpointingException(
            f"{final} has the name of an unfinished checkpoint. Choose another name"
        )
    if team.is_first:
        reserve(final)
    return entries, final


def _agree_on_token(final: Place, team: Team) -> int:
    """Return a random number of the first rank. Raise on all ranks if their paths differ."""
    place = int.from_bytes(hashlib.blake2b(os.fsencode(final), digest_size=7).digest(), "big")
    token = secrets.randbits(62) if team.is_first else 0
    # All digests are equal if and only if the largest digest is the smallest one, and the smallest
    # is minus the maximum of the negated digests. So one all-reduce of maxima compares them.
    highest, minus_lowest, token = team.max([place, -place, token])
    if highest != -minus_lowest:
        raise CheckpointingException(
            f"the ranks were given different paths, this rank {final}. Broadcast one path first"
        )
    return token


def _write(
    entries: Entries, save: LocalSave | RemoteSave, team: Team, *, weights_only: bool
) -> None:
    """Plan, write and publish the leaves of all ranks. A failure leaves no files.

    Each step starts after all ranks have finished the previous step.
    ``torch.distributed.checkpoint.save`` does the same, but needs NumPy, and warns without a group.
    """
    # Imported here: torch.distributed.checkpoint takes seconds that only a save or load needs.
    from mcore.parallel.checkpoint.files.writer import DurableWriter
    from mcore.parallel.checkpoint.planning.save_planner import ShardedSavePlanner

    planner = ShardedSavePlanner(entries, weights_only=weights_only)
    writer = DurableWriter(save, team.rank)

    def plan_locally() -> SavePlan:
        writer.begin()
        planner.set_up_planner({}, is_coordinator=team.is_first)
        return planner.create_local_plan()

    def plan_globally() -> Metadata | None:
        if not plans:  # only the first rank has them
            return None
        return planner.create_global_plan([pickle.loads(one) for one in plans])[1]

    def publish() -> None:
        if metadata is not None:
            writer.publish(metadata, [pickle.loads(one) for one in everything])

    try:
        plan = team.agree(plan_locally)
        plans = team.gather_bytes(pickle.dumps(plan))
        metadata = team.agree(plan_globally)
        written = team.agree(lambda: writer.write(plan, planner))
        everything = team.gather_bytes(pickle.dumps(written))
        team.agree(publish)
    except CheckpointingException as error:
        if team.is_first:
            save.discard()
        raise CheckpointingException(f"cannot save {save.final}: {error}") from error


def load_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    strict: bool = True,
    unexpected: Unexpected = "warn",
    process_group: GroupLike | None = None,
    weights_only: bool = True,
    verify: Verify = "while_reading",
) -> dict[str, Any]:
    """Read a checkpoint into the tensors of ``sd``. It may have been saved in another layout.

    Collective over ``process_group``: all its ranks call it. The first rank reads the manifest for
    all. Then each rank reads the data that it needs, replicas included. Keys, shapes, dtypes,
    targets and file sizes are checked first, on all ranks: if one does not fit, no tensor on any
    rank has changed. Floating-point tensors are cast to the target's dtype. Checkpoints of
    ``torch.distributed.checkpoint.save`` can be read too. Without torch.distributed this process
    reads alone. Only objects are unpickled, without running code.

    Args:
        sd: As in :func:`save_sharded_state_dict`. Its leaves name the values to load. Its tensors
            are filled in place, except that a ShardedTensor without data and a plain tensor on
            the meta device get a new tensor. Other values in it do not change.
        path: The checkpoint, or its URL. A leading ``~`` is expanded.
        strict: Raise if the checkpoint lacks a key. Otherwise the local value stays.
        unexpected: The reaction to keys in the checkpoint that are in no rank's ``sd``.
        process_group: The ranks that load. None is the world.
        weights_only: Refuse to run code from a checkpoint. Objects other than plain values and
            tensors need False.
        verify: ``"while_reading"`` compares the checksum of each piece while it is copied. If a
            piece is damaged, targets are partly filled, and the error message has a warning.
            ``"before"`` reads the data of this rank once more and fills no target if a piece is
            damaged. False compares no checksums. Index and manifest are always checked.
            Checkpoints of torch.distributed.checkpoint have only the CRC-32 in their archives.

    Returns:
        A dict of the structure of ``sd``, with tensors and values instead of their descriptions. A
        LocalNonpersistentObject becomes its local value.

    Raises:
        DamagedCheckpointError: On every rank: the path is not a complete checkpoint, or a file is
            missing, truncated, damaged or not a regular file. The text names file or key.
        CheckpointingException: On every rank: a key, dtype or shape does not fit, a tensor cannot
            be filled in place, or the optimizer state in ``sd`` is empty and the one in the
            checkpoint is not. The text names the key.
        ValueError: This rank is not a member of the group, or ``verify`` or ``unexpected`` has an
            unknown value.

    Example:
        >>> load_sharded_state_dict({}, "/no/such/checkpoint")
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.DamagedCheckpointError: cannot load ...
    """
    _require_one_of("verify", verify, ("while_reading", "before", False))
    _require_one_of("unexpected", unexpected, ("raise", "warn", "ignore"))
    team = team_of(process_group)
    directory, index = open_checkpoint(path, team)
    return load_opened(
        directory,
        index,
        lambda: sd,
        team,
        strict=strict,
        unexpected=unexpected,
        weights_only=weights_only,
        verify=verify,
    )


def open_checkpoint(path: PathLike, team: Team) -> tuple[Place, Index]:
    """Return, on all ranks, the place and the index of a checkpoint, after a check of its files."""
    directory: Place = Path()

    def read() -> list[bytes]:
        nonlocal directory
        directory = place_of(path)
        with raise_as_damage():
            if not team.is_first:
                return [b""]
            if is_incomplete_name(directory.name):
                raise CheckpointingException(
                    "it is the leftover of an unfinished save. Take a complete checkpoint"
                )
            return [read_index_file(directory)]

    def parse() -> Index:
        with raise_as_damage():
            index = parse_index(directory, raw)
            if team.is_first:
                _check_files(directory, index)
        return index

    with name_checkpoint(path):
        [raw] = team.share(read)
        return directory, team.agree(parse)


def load_opened(
    directory: Place,
    index: Index,
    build: Callable[[], Mapping[str, Any]],
    team: Team,
    *,
    strict: bool,
    unexpected: Unexpected,
    weights_only: bool,
    verify: Verify,
    accounted: Collection[str] = (),
) -> dict[str, Any]:
    """Load into the state dict that ``build`` makes. ``accounted`` keys are not unexpected."""
    from mcore.parallel.checkpoint.files.reader import CheckedReader
    from mcore.parallel.checkpoint.planning.load_planner import ShardedLoadPlanner

    planner = ShardedLoadPlanner(strict=strict, weights_only=weights_only)
    planner.has_listed_objects = not index.has_checksums and (directory / _MEGATRON_FILE).is_file()

    def plan_reads() -> tuple[tuple[CheckedReader, LoadPlan], list[bool]]:
        sd = build()
        wanted = planner.take(sd)
        keys = {name: index.keys[name] for name in wanted if name in index.keys}
        reader = CheckedReader(directory, index, keys, verify)
        planner.set_up_planner(cast("dict[str, Any]", sd), reader.metadata, team.is_first)
        plan = planner.create_local_plan()
        _reject_empty_optimizer((), sd, index.keys)
        with raise_as_damage():
            reader.check_plan(plan)
            reader.read_objects(plan, planner)
        expected = planner.wanted.union(accounted)
        return (reader, plan), [key in expected for key in index.keys]

    with name_checkpoint(directory):
        (reader, plan), expected = team.agree_any(plan_reads, len(index.keys))
        extra = [key for key, flag in zip(index.keys, expected, strict=True) if not flag]
        if extra:  # ``extra`` is equal on all ranks, ``unexpected`` may not be
            team.agree(lambda: _handle_unexpected(extra, unexpected, team))
        _fill(reader, plan, planner, team)
    return planner.loaded_state_dict()


def _require_one_of(name: str, given: object, choices: tuple[object, ...]) -> None:
    if not any(given is choice or (given == choice and choice) for choice in choices):
        raise ValueError(f"{name} must be one of {choices}, got {given!r}")


def _check_files(directory: Place, index: Index) -> None:
    """Check the size of every file, and the content of those without pieces."""
    for name, problem in file_problems(directory, index):
        inside = [
            key
            for key, stored in index.keys.items()
            if any(piece.file == name for piece in stored.pieces)
        ]
        held = f"; {format_keys(inside)}" if inside else ""
        raise CheckpointingException(f"{problem}{held}. Take another checkpoint")
    for name, problem in whole_file_problems(directory, index):
        raise CheckpointingException(
            f"{directory / name} has changed since it was saved ({problem}). Take another "
            "checkpoint"
        )


def _reject_empty_optimizer(
    path: tuple[Any, ...], node: Mapping[Any, Any], keys: Mapping[str, Any]
) -> None:
    """Raise if the empty state of a new optimizer would ignore the state in the checkpoint."""
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        _reject_empty_optimizer((*path, key), value, keys)
    groups = node.get("param_groups")
    if node.get("state") != {} or not isinstance(groups, list | tuple):
        return
    if not any(group.get("params") for group in groups if isinstance(group, Mapping)):
        return
    prefix = ".".join(map(str, (*path, "state", "")))
    inside = [name for name in keys if name.startswith(prefix)]
    if inside:
        raise CheckpointingException(
            "the optimizer in the state dict has no state yet, so nothing of the "
            f"{len(inside)} keys of its state in the checkpoint would be loaded, such as "
            f"{inside[0]!r}. Make the state with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or leave "
            f"{prefix.rstrip('.')!r} out if you do not need it"
        )


def _handle_unexpected(extra: Sequence[str], unexpected: Unexpected, team: Team) -> None:
    if unexpected == "ignore":
        return
    title = "some keys of the checkpoint are in no rank's state dict and are not loaded"
    if unexpected == "raise":
        raise CheckpointingException(titled_list(title, extra, "key"))
    if team.is_first:
        warnings.warn(f"{titled_list(title, extra, 'key')}", stacklevel=8)


def _fill(reader: CheckedReader, plan: LoadPlan, planner: ShardedLoadPlanner, team: Team) -> None:
    def fill() -> None:
        with raise_as_damage():
            reader.read_tensors(planner.finish_plan(plan), planner)

    try:
        team.agree(fill)
    except CheckpointingException as error:
        raise type(error)(
            f"{error}\nTensors on any rank may have been filled in part: load another checkpoint "
            "into them before using them"
        ) from error
