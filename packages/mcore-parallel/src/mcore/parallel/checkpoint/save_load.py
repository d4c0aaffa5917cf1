"""Saves and loads of sharded state dicts, by all ranks together."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from mcore.parallel.checkpoint.background import SaveHandle, start_in_background
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.durable_files import (
    incomplete_sibling,
    is_incomplete_name,
    make_directories,
)
from mcore.parallel.checkpoint.files.manifest import FileRecords, read_manifest, size_problem
from mcore.parallel.checkpoint.files.metadata_file import keys_text, read_metadata
from mcore.parallel.checkpoint.staging import reject_unsavable, stage_entries
from mcore.parallel.checkpoint.state_tree import Entries, flatten_state_dict
from mcore.parallel.checkpoint.team import Team, team_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from mcore.parallel.checkpoint.files.writer import DurableWriter
    from mcore.parallel.checkpoint.load_planner import ShardedLoadPlanner
    from mcore.parallel.checkpoint.save_planner import ShardedSavePlanner
    from mcore.parallel.groups import GroupLike

PathLike = str | os.PathLike[str]


@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: Literal[False] = False,
) -> None: ...
@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: Literal[True],
) -> SaveHandle: ...
@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool,
) -> SaveHandle | None: ...
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool = False,
) -> SaveHandle | None:
    """Write what all ranks hold as one checkpoint, which appears complete or not at all.

    Collective over ``process_group``: all its ranks call it with the same path. Main replicas
    write their tensors and objects; the first rank writes all other leaves, and warns if they
    differ between ranks. Files go into a hidden directory beside ``path``; when all ranks have
    them on storage, one rename makes it ``path``. A process that is killed before that leaves
    only the hidden directory, which :func:`remove_incomplete` deletes.

    The files are those of ``torch.distributed.checkpoint``, whose ``load`` can read them, and a
    ``manifest.json`` with their sizes and checksums. Random generators are left alone. Without
    torch.distributed this process writes the same files alone.

    Args:
        sd: Nested dicts and lists of ShardedTensor, ShardedObject, LocalNonpersistentObject (not
            saved), DTensor (named by its place) and plain values, equal on all ranks.
        path: The directory to make, on a file system that all ranks share. It must not exist.
        process_group: The ranks that save; None is the world.
        async_: Return as soon as what this rank writes is copied to the CPU, and write in the
            background. Later changes of the tensors do not reach the checkpoint. Background
            saves run in the order of the calls, over a gloo group of their own, which must not be
            destroyed before they are done.

    Returns:
        None, or the handle of a background save, whose ``result()`` waits for the rename.

    Raises:
        CheckpointingException: On every rank, and ``path`` is as before: it exists, cannot be
            written, ranks named different paths, the shards do not make whole tensors, a value
            cannot be pickled, or a rank failed or died.
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
    final = Path(os.path.abspath(path))
    entries = team.agree(lambda: _prepared(sd, final, team))
    incomplete = incomplete_sibling(final, _agreed_token(final, team))
    if not async_:
        _write(entries, incomplete, final, team)
        return None
    staged = team.agree(lambda: stage_entries(entries, with_common=team.is_first))
    return start_in_background(final, team, lambda own: _write(staged, incomplete, final, own))


def _prepared(sd: Mapping[str, Any], final: Path, team: Team) -> Entries:
    entries = flatten_state_dict(sd)
    reject_unsavable(entries, with_common=team.is_first)
    if is_incomplete_name(final.name):
        raise CheckpointingException(
            f"{final} has the name of an unfinished checkpoint; choose another one"
        )
    if team.is_first:
        if os.path.lexists(final):
            raise CheckpointingException(
                f"{final} already exists and is left as it is; choose another path, or delete it"
            )
        make_directories(final.parent)
    return entries


def _agreed_token(final: Path, team: Team) -> int:
    """Return a random number of the first rank; raise on all ranks when their paths differ."""
    place = int.from_bytes(hashlib.blake2b(os.fsencode(final), digest_size=7).digest(), "big")
    token = secrets.randbits(62) if team.is_first else 0
    highest, lowest, token = team.max([place, -place, token])
    if highest != -lowest:
        raise CheckpointingException(
            f"the ranks were given different paths, this one {final}; broadcast one of them first"
        )
    return token


def _write(entries: Entries, incomplete: Path, final: Path, team: Team) -> None:
    """Write the leaves of all ranks and publish them; nothing is left after a failure."""
    # Imported here: torch.distributed.checkpoint takes seconds that only a save or load needs.
    from mcore.parallel.checkpoint.files.writer import DurableWriter
    from mcore.parallel.checkpoint.save_planner import ShardedSavePlanner

    planner = ShardedSavePlanner(entries)
    writer = DurableWriter(incomplete, final, team.rank)
    try:
        _plan_and_write(planner, writer, team)
    except CheckpointingException as error:
        if team.is_first:
            shutil.rmtree(incomplete, ignore_errors=True)
        raise CheckpointingException(f"cannot save {final}: {error}") from error


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
    process_group: GroupLike | None = None,
    weights_only: bool = True,
    verify_checksums: bool = True,
) -> dict[str, Any]:
    """Read a checkpoint into the tensors of ``sd``, whatever layout it was saved in.

    Collective over ``process_group``: all its ranks call it. Each reads what it needs, replicas
    included. All checks come first, on all ranks: when one fails, no tensor on any rank has been
    touched. Floating-point tensors are cast to the target's dtype. Checkpoints that
    ``torch.distributed.checkpoint.save`` wrote are read too. Without torch.distributed this
    process reads alone.

    Args:
        sd: As in :func:`save_sharded_state_dict`; its values say what to load. The tensors of
            ShardedTensor and DTensor values are filled in place (a ShardedTensor without data
            gets a new one); everything else in it is left as it is.
        path: The checkpoint.
        strict: Raise when the checkpoint lacks a key; otherwise the local value stays. Keys that
            only the checkpoint has are ignored.
        process_group: The ranks that load; None is the world.
        weights_only: Refuse to run code that a checkpoint may hold; objects other than plain
            values and tensors need False.
        verify_checksums: Read what this rank needs twice, the first time to compare checksums:
            every changed byte of it is found, even a piece of another checkpoint. Index and
            manifest are always checked.

    Returns:
        A dict of the structure of ``sd`` with tensors and values in place of what described them;
        LocalNonpersistentObject gives its local value.

    Raises:
        CheckpointingException: On every rank: the path is not a complete checkpoint, a file is
            missing, truncated or damaged, or a key, dtype or shape does not fit. The text names
            file or key.
        ValueError: This rank is not a member of the group.

    Example:
        >>> load_sharded_state_dict({}, "/no/such/checkpoint")
        Traceback (most recent call last):
            ...
        mcore.parallel.checkpoint.errors.CheckpointingException: cannot load ...
    """
    team = team_of(process_group)
    directory = Path(os.path.abspath(path))
    try:
        planner, read = team.agree(
            lambda: _prepare_load(sd, directory, team, strict, weights_only, verify_checksums)
        )
        team.agree(read)
    except CheckpointingException as error:
        raise CheckpointingException(f"cannot load {directory}: {error}") from error
    return planner.loaded_state_dict()


def _prepare_load(
    sd: Mapping[str, Any],
    directory: Path,
    team: Team,
    strict: bool,
    weights_only: bool,
    verify_checksums: bool,
) -> tuple[ShardedLoadPlanner, Callable[[], None]]:
    """Do everything that can fail, and return the planner and what fills the tensors."""
    from mcore.parallel.checkpoint.files.reader import CheckedReader
    from mcore.parallel.checkpoint.load_planner import ShardedLoadPlanner

    if is_incomplete_name(directory.name):
        raise CheckpointingException(
            "it was left behind by a save that did not finish; take a complete checkpoint"
        )
    files = read_manifest(directory)
    metadata = read_metadata(directory, files, weights_only=weights_only)
    if team.is_first:
        _check_sizes(directory, files or {}, metadata)
    planner = ShardedLoadPlanner(strict=strict, weights_only=weights_only)
    planner.set_up_planner(cast("dict[str, Any]", sd), metadata, team.is_first)
    plan = planner.create_local_plan()
    reader = CheckedReader(directory, metadata, files)
    reader.check_plan(plan, verify_checksums=verify_checksums)
    reader.read_objects(plan, planner)
    return planner, lambda: reader.read_tensors(planner.finish_plan(plan), planner)


def _check_sizes(directory: Path, files: FileRecords, metadata: Metadata) -> None:
    for name, record in files.items():
        problem = size_problem(directory / name, record.size)
        if problem is not None:
            inside = [
                index.fqn
                for index, place in metadata.storage_data.items()
                if place.relative_path == name
            ]
            held = f"; {keys_text(inside)}" if inside else ""
            raise CheckpointingException(f"{problem}{held}; take another checkpoint")
