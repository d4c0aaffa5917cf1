"""Saves and loads of sharded state dicts, by all ranks together."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from mcore.parallel.checkpoint.background import SaveHandle, start_in_background
from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    describe_error,
)
from mcore.parallel.checkpoint.files.checksums import Scratch, checksum_in
from mcore.parallel.checkpoint.files.durable_files import is_incomplete_name
from mcore.parallel.checkpoint.files.index import Index
from mcore.parallel.checkpoint.files.manifest import (
    RawIndex,
    file_problems,
    parsed_index,
    read_raw_index,
)
from mcore.parallel.checkpoint.files.metadata_file import keys_text
from mcore.parallel.checkpoint.files.regular_files import (
    PathLike,
    Place,
    open_regular,
    place_of,
)
from mcore.parallel.checkpoint.files.remote import is_unreachable
from mcore.parallel.checkpoint.files.save_place import LocalSave, RemoteSave, reserve, save_at
from mcore.parallel.checkpoint.planning.copies import choose_writers
from mcore.parallel.checkpoint.planning.staging import reject_unsavable, stage_entries
from mcore.parallel.checkpoint.state_tree import Entries, flatten_state_dict
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.shortened import titled_list

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

    from mcore.parallel.checkpoint.files.reader import CheckedReader, Verify
    from mcore.parallel.checkpoint.files.writer import DurableWriter
    from mcore.parallel.checkpoint.planning.load_planner import ShardedLoadPlanner
    from mcore.parallel.checkpoint.planning.save_planner import ShardedSavePlanner
    from mcore.parallel.groups import GroupLike

Unexpected = Literal["raise", "warn", "ignore"]
_MEGATRON_FILE = "metadata.json"  # beside torch's index, in what Megatron-LM writes


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
    """Write what all ranks hold as one checkpoint, which appears complete or not at all.

    Collective over ``process_group``: all its ranks call it with the same path. Main replicas
    write their tensors and objects. Of a DTensor whose mesh lacks ranks, copies on several ranks
    must be equal and one is written. The first rank that has it writes any other leaf, and a
    warning names those that differ between ranks. Files go into a hidden directory beside ``path``;
    when all ranks have them on storage, one rename makes it ``path``. A process that is killed
    before that leaves only the hidden directory, which :func:`remove_incomplete` deletes. Behind a
    URL the manifest, written last, makes files a checkpoint; a later save removes what one left.

    The files are those of ``torch.distributed.checkpoint``, whose ``load`` can read them, and a
    ``manifest.json`` that says all a load here has to know, with checksums. Random generators are
    left alone. Without torch.distributed this process writes the same files alone.

    Args:
        sd: Nested dicts and lists of ShardedTensor, ShardedObject, LocalNonpersistentObject (not
            saved), DTensor (named by its place) and plain values, equal on all ranks.
        path: The directory to make, on a file system that all ranks share, or a URL of fsspec such
            as ``s3://bucket/step_1``. It must not exist. A leading ``~`` is expanded.
        process_group: The ranks that save; None is the world.
        async_: Return as soon as what this rank writes is copied to the CPU, and write in the
            background. Later changes of the tensors do not reach the checkpoint. Background
            saves run in the order of the calls, over a gloo group of their own, which must not be
            destroyed before they are done.
        check_replicas: Compare all that several ranks hold, byte by byte, before anything is
            written: every rank reads its whole state once.
        weights_only: Refuse objects and values that a load would refuse, since code that their
            file names would have to be run: NumPy values, paths, dates, enums, dataclasses, ...

    Returns:
        None, or the handle of a background save, whose ``result()`` waits for the rename.

    Raises:
        CheckpointingException: On every rank, and ``path`` is as before: it exists, cannot be
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
    entries, final = team.agree(lambda: _prepared(sd, path, team))
    save = save_at(final, _agreed_token(final, team))
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
    return start_in_background(final, team, lambda own: write(staged, own))


def _prepared(sd: Mapping[str, Any], path: PathLike, team: Team) -> tuple[Entries, Place]:
    entries, final = flatten_state_dict(sd), place_of(path)
    if is_incomplete_name(final.name):
        raise CheckpointingException(
            f"{final} has the name of an unfinished checkpoint; choose another one"
        )
    if team.is_first:
        reserve(final)
    return entries, final


def _agreed_token(final: Place, team: Team) -> int:
    """Return a random number of the first rank; raise on all ranks when their paths differ."""
    place = int.from_bytes(hashlib.blake2b(os.fsencode(final), digest_size=7).digest(), "big")
    token = secrets.randbits(62) if team.is_first else 0
    highest, lowest, token = team.max([place, -place, token])
    if highest != -lowest:
        raise CheckpointingException(
            f"the ranks were given different paths, this one {final}; broadcast one of them first"
        )
    return token


def _write(
    entries: Entries, save: LocalSave | RemoteSave, team: Team, *, weights_only: bool
) -> None:
    """Write the leaves of all ranks and publish them; nothing is left after a failure."""
    # Imported here: torch.distributed.checkpoint takes seconds that only a save or load needs.
    from mcore.parallel.checkpoint.files.writer import DurableWriter
    from mcore.parallel.checkpoint.planning.save_planner import ShardedSavePlanner

    planner = ShardedSavePlanner(entries, weights_only=weights_only)
    writer = DurableWriter(save, team.rank)
    try:
        _plan_and_write(planner, writer, team)
    except CheckpointingException as error:
        if team.is_first:
            save.discard()
        raise CheckpointingException(f"cannot save {save.final}: {error}") from error


def _plan_and_write(planner: ShardedSavePlanner, writer: DurableWriter, team: Team) -> None:
    """Plan, write and publish; each step only after all ranks have done the one before.

    ``torch.distributed.checkpoint.save`` does the same, but needs NumPy, and warns when alone.
    """

    def local_plan() -> SavePlan:
        writer.begin()
        planner.set_up_planner({}, is_coordinator=team.is_first)
        return planner.create_local_plan()

    def global_plan() -> Metadata | None:
        if not plans:  # only the first rank has them
            return None
        return planner.create_global_plan([pickle.loads(one) for one in plans])[1]

    def publish() -> None:
        if metadata is not None:
            writer.publish(metadata, [pickle.loads(one) for one in everything])

    plan = team.agree(local_plan)
    plans = team.gather_bytes(pickle.dumps(plan))
    metadata = team.agree(global_plan)
    written = team.agree(lambda: writer.write(plan, planner))
    everything = team.gather_bytes(pickle.dumps(written))
    team.agree(publish)


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
    """Read a checkpoint into the tensors of ``sd``, whatever layout it was saved in.

    Collective over ``process_group``: all its ranks call it. The first rank reads the manifest for
    all; then each reads what it needs, replicas included. Keys, shapes, dtypes, targets and file
    sizes are checked first, on all ranks: when one does not fit, no tensor on any rank has been
    touched. Floating-point tensors are cast to the target's dtype. Checkpoints that
    ``torch.distributed.checkpoint.save`` wrote are read too. Without torch.distributed this
    process reads alone. Nothing is unpickled but objects, and these without running code.

    Args:
        sd: As in :func:`save_sharded_state_dict`; its values say what to load. All its tensors
            are filled in place (a ShardedTensor without data, and a plain tensor on the meta
            device, get a new one); everything else in it is left as it is.
        path: The checkpoint, or the URL of one. A leading ``~`` is expanded.
        strict: Raise when the checkpoint lacks a key; otherwise the local value stays.
        unexpected: What to do when the checkpoint has keys that no rank asks for.
        process_group: The ranks that load; None is the world.
        weights_only: Refuse to run code that a checkpoint may hold; objects other than plain
            values and tensors need False.
        verify: ``"while_reading"`` compares the checksum of each piece as it is copied, so that
            after damage targets are partly filled, as the error says. ``"before"`` reads all that
            this rank needs once more, and fills nothing after damage. False compares none. Index
            and manifest are always checked. Checkpoints of torch.distributed.checkpoint have only
            the CRC-32 in their archives.

    Returns:
        A dict of the structure of ``sd`` with tensors and values in place of what described them;
        LocalNonpersistentObject gives its local value.

    Raises:
        DamagedCheckpointError: On every rank: the path is not a complete checkpoint, or a file is
            missing, truncated, damaged or not a regular one. The text names file or key.
        CheckpointingException: On every rank: a key, dtype or shape does not fit, a tensor cannot
            be filled in place, or ``sd`` has the empty state of a fresh optimizer and the
            checkpoint that of one. The text names the key.
        ValueError: This rank is not a member of the group, or ``verify`` or ``unexpected`` is none
            of its choices.

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
    """Return on all ranks where a checkpoint is and what it holds, after a check of its files."""
    directory: Place = Path()

    def read() -> RawIndex:
        nonlocal directory
        directory = place_of(path)
        with _as_damage():
            return _read_index(directory) if team.is_first else RawIndex(b"", b"")

    def parsed() -> Index:
        with _as_damage():
            index = parsed_index(directory, raw)
            if team.is_first:
                _check_files(directory, index)
        return index

    with _cannot_load(path):
        raw = RawIndex(*team.share(read, len(RawIndex._fields)))
        return directory, team.agree(parsed)


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
    """Load into the state dict that ``build`` makes; ``accounted`` keys are not unexpected."""
    from mcore.parallel.checkpoint.planning.load_planner import ShardedLoadPlanner

    planner = ShardedLoadPlanner(strict=strict, weights_only=weights_only)
    planner.has_listed_objects = not index.checksums and (directory / _MEGATRON_FILE).is_file()

    def planned() -> tuple[tuple[CheckedReader, LoadPlan], list[bool]]:
        reader, plan = _planned(build(), directory, index, planner, team, verify)
        with _as_damage():
            reader.check_plan(plan)
            reader.read_objects(plan, planner)
        expected = planner.wanted.union(accounted)
        return (reader, plan), [key in expected for key in index.keys]

    with _cannot_load(directory):
        (reader, plan), expected = team.agree_any(planned, len(index.keys))
        extra = [key for key, flag in zip(index.keys, expected, strict=True) if not flag]
        if extra:  # equal on all ranks, which ``unexpected`` need not be
            team.agree(lambda: _handle_unexpected(extra, unexpected, team))
        _fill(reader, plan, planner, team)
    return planner.loaded_state_dict()


@contextmanager
def _cannot_load(path: PathLike) -> Iterator[None]:
    """Name the checkpoint in an error, which has its kind on all ranks already."""
    try:
        yield
    except CheckpointingException as error:
        raise type(error)(f"cannot load {path}: {error}") from error


@contextmanager
def _as_damage() -> Iterator[None]:
    """Make an error one of the checkpoint's own, unless a storage is away."""
    try:
        yield
    except Exception as error:
        kind = CheckpointingException if is_unreachable(error) else DamagedCheckpointError
        raise kind(describe_error(error)) from error


def _require_one_of(name: str, given: object, choices: tuple[object, ...]) -> None:
    if not any(given is choice or (given == choice and choice) for choice in choices):
        raise ValueError(f"{name} must be one of {choices}, got {given!r}")


def _read_index(directory: Place) -> RawIndex:
    if is_incomplete_name(directory.name):
        raise CheckpointingException(
            "it was left behind by a save that did not finish; take a complete checkpoint"
        )
    return read_raw_index(directory)


def _planned(
    sd: Mapping[str, Any],
    directory: Place,
    index: Index,
    planner: ShardedLoadPlanner,
    team: Team,
    verify: Verify,
) -> tuple[CheckedReader, LoadPlan]:
    """Check all but the files, and return what reads them and the list of what to read."""
    from mcore.parallel.checkpoint.files.reader import CheckedReader

    wanted = planner.take(sd)
    keys = {name: index.keys[name] for name in wanted if name in index.keys}
    reader = CheckedReader(directory, index, keys, verify)
    planner.set_up_planner(cast("dict[str, Any]", sd), reader.metadata, team.is_first)
    plan = planner.create_local_plan()
    _reject_empty_optimizer((), sd, index.keys)
    return reader, plan


def _check_files(directory: Place, index: Index) -> None:
    """Check the size of every file, and the content of those without pieces."""
    for name, problem in file_problems(directory, index):
        inside = [
            key
            for key, stored in index.keys.items()
            if any(piece.file == name for piece in stored.pieces)
        ]
        held = f"; {keys_text(inside)}" if inside else ""
        raise CheckpointingException(f"{problem}{held}; take another checkpoint")
    for name, checksum in index.whole_files.items():
        with open_regular(directory / name) as stream:
            if checksum_in(stream, 0, index.files[name], Scratch()) != checksum:
                raise CheckpointingException(
                    f"{directory / name} has changed since it was saved; take another checkpoint"
                )


def _reject_empty_optimizer(
    path: tuple[Any, ...], node: Mapping[Any, Any], keys: Mapping[str, Any]
) -> None:
    """Raise where a fresh optimizer's state would get nothing of the one in the checkpoint."""
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
            f"the optimizer in the state dict has no state yet, so that nothing of the "
            f"{len(inside)} keys of it in the checkpoint would be loaded, such as {inside[0]!r}; "
            "let torch.distributed.checkpoint.state_dict.get_optimizer_state_dict make the state, "
            f"or leave {prefix.rstrip('.')!r} out if it is not wanted"
        )


def _handle_unexpected(extra: Sequence[str], unexpected: Unexpected, team: Team) -> None:
    if unexpected == "ignore":
        return
    title = "no rank asks for some keys of the checkpoint, which are not loaded"
    if unexpected == "raise":
        raise CheckpointingException(titled_list(title, extra, "key"))
    if team.is_first:
        warnings.warn(f"{titled_list(title, extra, 'key')}", stacklevel=8)


def _fill(reader: CheckedReader, plan: LoadPlan, planner: ShardedLoadPlanner, team: Team) -> None:
    def fill() -> None:
        with _as_damage():
            reader.read_tensors(planner.finish_plan(plan), planner)

    try:
        team.agree(fill)
    except CheckpointingException as error:
        raise type(error)(
            f"{error}\nBy then tensors on any rank may have been filled in part: load another "
            "checkpoint into them before they are used"
        ) from error
