"""Saves of sharded state dicts, collectively over all ranks, in three phases.

- Describe: each rank sends a description of its leaves to the first rank (all-reduce, gather).
- Decide: the first rank chooses the writers, checks that the shards make whole tensors, and sends
  each rank its part of the plan, or the errors of all (scatter).
- Write and publish: each rank writes one file and sends the places of its content to the first rank
  (gather), which writes index and manifest and publishes the checkpoint (all-reduce).

An error ends a phase on all ranks alike. An asynchronous save has one more all-reduce, after the
copies to the CPU, and runs the third phase in a thread.
"""

from __future__ import annotations

import logging
import pickle
import secrets
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from mcore.parallel.checkpoint import figures
from mcore.parallel.checkpoint.errors import (
    CheckpointingException,
    describe_error,
    name_checkpoint,
)
from mcore.parallel.checkpoint.files import directory
from mcore.parallel.checkpoint.files.index import OUR_MARK
from mcore.parallel.checkpoint.files.manifest import (
    ALIGNMENT_BYTES,
    MANIFEST_FILE,
    describe_for_torch,
    encode_manifest,
)
from mcore.parallel.checkpoint.files.pieces import ChecksummedStream, checksum_of, write_tensor
from mcore.parallel.checkpoint.files.places import (
    PathLike,
    Place,
    RemotePath,
    place_of,
    size_problems,
)
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.planning import staging, writers
from mcore.parallel.checkpoint.planning.description import describe_leaves
from mcore.parallel.checkpoint.sharded import ShardedTensor
from mcore.parallel.checkpoint.state_tree import flatten_state_dict
from mcore.parallel.checkpoint.team import Team, team_of
from mcore.parallel.torch_compat import METADATA_FILE, file_part_type

if TYPE_CHECKING:
    from mcore.parallel.groups import GroupLike

logger = logging.getLogger(__name__)

_REPLY = struct.Struct(">QII")  # token, then the largest numbers of writes and of compared shards
_RESULT = struct.Struct(">?Q")  # whether the rank has written, and the length of its packed pieces
_PIECE = struct.Struct(">qqq8s")  # number, length, elements or -1, checksum
Taken = tuple[Iterable[staging.Content], bytes]  # what the rank writes, digests of compared shards
Save = directory.LocalSave | directory.RemoteSave


@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: Literal[True],
    check_replicas: bool = False,
    weights_only: bool = True,
    progress_bar: bool = False,
) -> figures.SaveHandle: ...
@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool = False,
    check_replicas: bool = False,
    weights_only: bool = True,
    progress_bar: bool = False,
) -> figures.SaveHandle | None: ...
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool = False,
    check_replicas: bool = False,
    weights_only: bool = True,
    progress_bar: bool = False,
) -> figures.SaveHandle | None:
    """Write the state dicts of all ranks as one checkpoint, which becomes visible in one step.

    Collective over ``process_group``: all its ranks call it with the same path. Main replicas of
    tensors and objects are written. If a DTensor's mesh lacks some ranks, several ranks may hold a
    replica of a shard: these must be equal, and one is written. Large plain tensors that are equal
    on several ranks are written by all of these, a part each. Any other leaf is written by the
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
        async_: Copy the data that this rank writes to the CPU, return, and write in a thread. Later
            changes of the tensors do not reach the checkpoint. Asynchronous saves run in the order
            of the calls, over a separate gloo group, which must not be destroyed before they are
            done.
        check_replicas: Before writing, compare all replicas on several ranks byte by byte. Every
            rank reads its whole state once.
        weights_only: Refuse objects and values that a load would refuse, since unpickling them
            runs code: NumPy values, paths, dates, enums, dataclasses, ...
        progress_bar: If the save takes over 5 s, show a bar of the bytes of the first rank on its
            terminal. Needs tqdm.

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
        >>> from mcore.parallel.checkpoint import (
        ...     load_sharded_state_dict,
        ...     make_sharded_tensor_for_checkpoint,
        ... )
        >>> path = tempfile.mkdtemp() + "/step_1"
        >>> weight = make_sharded_tensor_for_checkpoint(torch.arange(3.0), "weight")
        >>> save_sharded_state_dict({"weight": weight, "step": 1}, path)
        >>> target = make_sharded_tensor_for_checkpoint(torch.zeros(3), "weight")
        >>> load_sharded_state_dict({"weight": target, "step": 0}, path)
        {'weight': tensor([0., 1., 2.]), 'step': 1}
    """
    options = SaveOptions(async_, check_replicas, weights_only, progress_bar)
    return save_tree(lambda: (sd, {}), path, team_of(process_group), options)


class SaveOptions(NamedTuple):
    """The options of a save, see :func:`save_sharded_state_dict`."""

    async_: bool
    check_replicas: bool
    weights_only: bool
    progress_bar: bool


Build = Callable[[], tuple[Mapping[str, Any], Mapping[str, str]]]


def save_tree(
    build: Build, path: PathLike, team: Team, options: SaveOptions
) -> figures.SaveHandle | None:
    """Save the state dict that ``build`` makes. Its second result must be equal on all ranks."""
    clock = figures.Clock()
    with name_checkpoint("save", path):
        (final, leaves, payload), [longest, most] = team.agree_max(
            lambda: _describe(build, path, team, options), 2
        )
        payloads = team.gather(payload, longest)
        clock.end_phase("describe")
        plan, reply = team.scatter(lambda: _decide(payloads, options), _REPLY.size + most)
        token, most_writes, most_compared = _REPLY.unpack_from(reply)
        take = partial(_take, leaves, reply[_REPLY.size :], plan, team, options)
        clock.end_phase("decide")
        if options.async_:
            taken = team.agree(take)
            clock.end_phase("copy")
    width = _RESULT.size + _PIECE.size * most_writes + staging.DIGEST_BYTES * most_compared
    kind: Any = directory.RemoteSave if isinstance(final, RemotePath) else directory.LocalSave
    save: Save = kind(final, token)
    if options.async_:  # the thread must not keep the tensors of the caller alive
        work = partial(_write_and_publish, save, plan, lambda: taken, options, width, clock)
        return figures.start_async_save(final, team, work, clock)
    _write_and_publish(save, plan, take, options, width, clock, team)
    return None


def _describe(
    build: Build, path: PathLike, team: Team, options: SaveOptions
) -> tuple[tuple[Place, list[staging.Candidate], bytes], list[int]]:
    """Return the place, the leaves and their description, then its length and their number."""
    tree, facts = build()
    entries, final = flatten_state_dict(tree), place_of(path)
    if directory.is_incomplete_name(final.name):
        raise CheckpointingException(
            f"{final} has the name of an unfinished checkpoint. Choose another name"
        )
    if team.is_first:
        directory.reserve(final)
    leaves = staging.list_candidates(entries, team.size)
    staging.reject_unsavable(leaves, ShardedTensor)
    description = describe_leaves(
        entries,
        leaves,
        team.size,
        {"paths": str(final), **facts},
        check_replicas=options.check_replicas,
        weights_only=options.weights_only,
    )
    payload = pickle.dumps(description)
    return (final, leaves, payload), [len(payload), len(leaves)]


def _decide(
    payloads: Sequence[bytes], options: SaveOptions
) -> tuple[writers.GlobalPlan, list[bytes]]:
    """Return the plan on the first rank, and the part of each rank: numbers and flags."""
    plan = writers.GlobalPlan([pickle.loads(one) for one in payloads])
    if not options.async_:  # else in the thread: training need not wait for it
        plan.require_whole()
    header = _REPLY.pack(secrets.randbits(62), *plan.count_writes())
    return plan, [header + flags for flags in plan.flags]


def _take(
    leaves: Sequence[staging.Candidate],
    flags: bytes,
    plan: writers.GlobalPlan | None,
    team: Team,
    options: SaveOptions,
) -> Taken:
    """Return the leaves that this rank writes, values first.

    They are copied to the CPU for an asynchronous save, else taken when they are written.
    """
    written, compared = dict[int, staging.Candidate](), list[staging.Candidate]()
    for number, leaf in enumerate(leaves):
        is_empty = isinstance(leaf, ShardedTensor) and not prod(leaf.local_shape)
        if flags[number] & writers.PER_RANK and isinstance(leaf, staging.CommonValue):
            written[number] = ShardedObject(leaf.key, leaf.value, (team.size,), (team.rank,))
        elif flags[number] & writers.WRITTEN and not is_empty:
            written[number] = leaf
        if flags[number] & writers.COMPARED:
            compared.append(leaf)
    staging.reject_unsavable(written.values(), staging.CommonValue)
    if plan is not None:
        written.update(enumerate(plan.merged, len(leaves)))
    contents = staging.take_contents(
        written, is_copied=options.async_, weights_only=options.weights_only
    )
    return list(contents) if options.async_ else contents, staging.digest_shards(compared)


def _write_and_publish(
    save: Save,
    plan: writers.GlobalPlan | None,
    take: Callable[[], Taken],
    options: SaveOptions,
    width: int,
    clock: figures.Clock,
    team: Team,
) -> figures.SaveStats:
    """Write the file of this rank. If all have written, the first rank publishes them."""
    failure: Exception | None = None
    with name_checkpoint("save", save.final), closing(save):
        try:
            if plan is not None and options.async_:
                plan.require_whole()
            contents, digests = take()
            save.begin()
            stream = sys.stderr if options.progress_bar and team.is_first else None
            writes = plan.iterate_writes(0) if plan is not None and stream is not None else ()
            num_bytes = sum(one.record.count_bytes() for one in writes)
            title = f"saving {save.final.name}"
            with figures.show_progress(title, num_bytes, stream) as report:
                packed = write_file(save, team.rank, contents, report)
            message = _RESULT.pack(True, len(packed)) + packed + digests
        except Exception as error:
            message, failure = _RESULT.pack(False, 0), error
        try:
            results = team.gather(message, width)
            clock.end_phase("write")
            written = team.agree_max(lambda: _publish(save, plan, results, failure), 2)[1]
        except CheckpointingException:
            if team.is_first:
                save.discard()
            raise
    clock.end_phase("publish")
    stats = clock.stop(*written)
    if team.is_first:
        logger.info("saved %s: %s", save.final, stats)
    return stats


def write_file(
    save: Save, rank: int, contents: Iterable[staging.Content], report: Callable[[int], object]
) -> bytes:
    """Write and sync the file of a rank: each content as an archive.

    Returns the packed pieces. No contents make no file. ``report`` gets the bytes of each tensor.
    """
    left, packed = iter(contents), bytearray()
    if (following := next(left, None)) is None:
        return b""
    key = following.key
    try:
        with save.new_file(rank) as file:
            stream, ahead = ChecksummedStream(file), staging.start_content(following.source)
            while following is not None:
                one, finish = following, ahead
                if following := next(left, None):  # is copied while this one is written
                    key, ahead = following.key, staging.start_content(following.source)
                key, content, at, elements = one.key, finish(), stream.end, -1
                if isinstance(content, torch.Tensor):
                    elements = write_tensor(stream, content)
                    report(content.nbytes)
                else:
                    stream.write(content)
                length = stream.end - at
                if following is not None:
                    stream.write(bytes(-stream.end % ALIGNMENT_BYTES))
                packed += _PIECE.pack(one.number, length, elements, stream.take_checksum())
    except CheckpointingException:
        raise
    except Exception as error:
        raise name_failure(error, save.file_of(rank), key) from error
    return bytes(packed)


def _publish(
    save: Save,
    plan: writers.GlobalPlan | None,
    results: Sequence[bytes],
    failure: Exception | None,
) -> tuple[None, list[int]]:
    """Write index and manifest and publish the checkpoint on the first rank, if all have written.

    Returns the numbers of bytes and files.
    """
    if failure is not None:
        raise failure
    headers = [_RESULT.unpack_from(result) for result in results]
    if plan is None or not all(has_written for has_written, _ in headers):
        return None, [0, 0]  # a rank that has failed raises its error on all
    # Imported here: it takes seconds that only the first rank of a save needs.
    from torch.distributed.checkpoint.metadata import StorageMeta

    ends = [_RESULT.size + length for _, length in headers]
    digests = [result[end:] for result, end in zip(results, ends, strict=True)]
    located = [
        (save.file_of(rank).name, _PIECE.iter_unpack(results[rank][_RESULT.size : end]))
        for rank, end in enumerate(ends)
    ]
    plan.compare_shards(digests)
    keys, files = plan.name_pieces(located)
    paths = plan.merge_paths()
    sizes = {name: pieces[-1][1].at + pieces[-1][1].length for name, pieces in files.items()}
    for _, problem in size_problems(save.folder, sizes):
        raise CheckpointingException(f"{problem} (all ranks must write to one shared file system)")
    metadata, stored = describe_for_torch(keys)
    metadata.planner_data = paths
    metadata.storage_meta = StorageMeta(str(save.final), modules=[OUR_MARK])
    part = file_part_type()
    metadata.storage_data = {
        index: part(piece.file, piece.at, piece.length) for index, piece in stored.items()
    }
    path = save.folder / METADATA_FILE
    try:
        index = pickle.dumps(metadata)
        save.write(METADATA_FILE, index)
        path = save.folder / MANIFEST_FILE
        whole = {METADATA_FILE: (len(index), checksum_of(index))}
        content = encode_manifest(keys, files, whole)
        save.write(MANIFEST_FILE, content)
    except CheckpointingException:
        raise
    except Exception as error:
        raise name_failure(error, path) from error
    sizes.update({METADATA_FILE: len(index), MANIFEST_FILE: len(content)})
    save.publish(sizes)
    return None, [sum(sizes.values()), len(sizes)]


def name_failure(error: Exception, path: Place, key: str | None = None) -> CheckpointingException:
    """Turn an error into one of ours, since not every exception can be sent to the other ranks."""
    origin: BaseException | None = error
    # torch.save hides the operating system's error, such as a full disk, in the chain of causes.
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__cause__ or origin.__context__
    at = f" at key {key!r}" if key is not None else ""
    return CheckpointingException(
        f"{path} cannot be written{at} ({describe_error(origin or error)})"
    )
