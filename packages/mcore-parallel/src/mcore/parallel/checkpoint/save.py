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
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, overload

from mcore.parallel.checkpoint.async_save import SaveHandle, start_async_save
from mcore.parallel.checkpoint.errors import CheckpointingException, name_checkpoint
from mcore.parallel.checkpoint.figures import Clock, SaveStats, show_progress
from mcore.parallel.checkpoint.files.manifest import PIECE_BYTES, Piece, locate_pieces
from mcore.parallel.checkpoint.files.places import PathLike, Place, place_of
from mcore.parallel.checkpoint.files.save_place import (
    LocalSave,
    RemoteSave,
    is_incomplete_name,
    reserve,
    save_at,
)
from mcore.parallel.checkpoint.planning.staging import (
    DIGEST_BYTES,
    Candidate,
    CommonValue,
    Leaf,
    count_bytes,
    list_candidates,
    reject_unsavable,
    stage_leaf,
)
from mcore.parallel.checkpoint.planning.writers import (
    GlobalPlan,
    choose_leaves,
    describe_leaves,
    digest_compared,
    warn_of_differing,
)
from mcore.parallel.checkpoint.state_tree import flatten_state_dict
from mcore.parallel.checkpoint.team import Team, team_of

if TYPE_CHECKING:
    from mcore.parallel.groups import GroupLike

logger = logging.getLogger(__name__)

_REPLY = struct.Struct(">QII")  # token, then the largest numbers of writes and of compared shards
_RESULT = struct.Struct(">?Q")  # whether the rank has written, and the length of its packed pieces
Taken = tuple[list[tuple[int, Leaf]], bytes]  # numbered leaves to write, digests of compared shards


@overload
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: Literal[False] = False,
    check_replicas: bool = False,
    weights_only: bool = True,
    progress_bar: bool = False,
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
    progress_bar: bool = False,
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
    progress_bar: bool = False,
) -> SaveHandle | None: ...
def save_sharded_state_dict(
    sd: Mapping[str, Any],
    path: PathLike,
    *,
    process_group: GroupLike | None = None,
    async_: bool = False,
    check_replicas: bool = False,
    weights_only: bool = True,
    progress_bar: bool = False,
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
    return save_tree(
        lambda: (sd, {}),
        path,
        team_of(process_group),
        async_=async_,
        check_replicas=check_replicas,
        weights_only=weights_only,
        progress_bar=progress_bar,
    )


def save_tree(
    build: Callable[[], tuple[Mapping[str, Any], Mapping[str, str]]],
    path: PathLike,
    team: Team,
    *,
    async_: bool,
    check_replicas: bool,
    weights_only: bool,
    progress_bar: bool,
) -> SaveHandle | None:
    """Save the state dict that ``build`` makes. Its second result must be equal on all ranks."""
    clock = Clock()
    plan: GlobalPlan | None = None  # on the first rank

    def describe() -> tuple[tuple[Place, list[Candidate], bytes], list[int]]:
        tree, facts = build()
        entries, final = flatten_state_dict(tree), place_of(path)
        if is_incomplete_name(final.name):
            raise CheckpointingException(
                f"{final} has the name of an unfinished checkpoint. Choose another name"
            )
        if team.is_first:
            reserve(final)
        leaves = list_candidates(entries)
        reject_unsavable(leaf for leaf in leaves if not isinstance(leaf, CommonValue))
        description = describe_leaves(
            entries,
            team.size,
            {"paths": str(final), **facts},
            check_replicas=check_replicas,
            weights_only=weights_only,
        )
        payload = pickle.dumps(description)
        return (final, leaves, payload), [len(payload), len(leaves)]

    def decide() -> list[bytes]:
        nonlocal plan
        plan = GlobalPlan([pickle.loads(one) for one in payloads])
        if not async_:  # else in the thread: training need not wait for it
            plan.require_whole()
        warn_of_differing(plan.differing)
        header = _REPLY.pack(secrets.randbits(62), *plan.count_writes())
        return [header + flags for flags in plan.flags]

    def take() -> Taken:
        chosen = choose_leaves(leaves, flags, team)
        reject_unsavable(leaf for _, leaf in chosen)
        compared = digest_compared(leaves, flags)
        if plan is not None:
            chosen += enumerate(plan.merged, len(leaves))
        if not async_:
            return list(chosen), compared
        staged = [(at, stage_leaf(leaf, weights_only=weights_only)) for at, leaf in chosen]
        return staged, compared

    with name_checkpoint("save", path):
        (final, leaves, payload), [longest, most] = team.agree_max(describe, 2)
        payloads = team.gather(payload, longest)
        clock.end_phase("describe")
        reply = team.scatter(decide, _REPLY.size + most)
        token, most_writes, most_compared = _REPLY.unpack_from(reply)
        flags = reply[_REPLY.size : _REPLY.size + len(leaves)]
        clock.end_phase("decide")
        taken = team.agree(take) if async_ else None
        if async_:
            clock.end_phase("copy")
            leaves.clear()  # the thread must not keep the caller's tensors alive
    save = save_at(final, token)
    width = _RESULT.size + PIECE_BYTES * most_writes + DIGEST_BYTES * most_compared

    def write() -> bytes:
        from mcore.parallel.checkpoint.files.writer import RankFile

        if plan is not None and async_:
            plan.require_whole()
        chosen, digests = taken or take()
        save.begin()
        is_shown, num_bytes = progress_bar and team.is_first, count_bytes(chosen)
        with show_progress(is_shown, f"saving {final.name}", num_bytes) as report:
            packed = RankFile(save, team.rank, report).write(chosen, weights_only=weights_only)
        return _RESULT.pack(True, len(packed)) + packed + digests

    @name_checkpoint("save", final)
    def write_and_publish(team: Team) -> SaveStats:
        result, failure = _try(write)
        try:
            results = team.gather(result, width)
            clock.end_phase("write")
            written = team.agree_max(lambda: _publish(save, plan, results, failure), 2)[1]
            clock.end_phase("publish")
        except CheckpointingException:
            if team.is_first:
                save.discard()
            raise
        stats = clock.stop(*written)
        if team.is_first:
            logger.info("saved %s: %s", final, stats)
        return stats

    if async_:
        return start_async_save(final, team, write_and_publish, clock)
    write_and_publish(team)
    return None


def _try(step: Callable[[], bytes]) -> tuple[bytes, Exception | None]:
    """Return the result of a step, or the result of a rank that failed and its error."""
    try:
        return step(), None
    except Exception as error:
        return _RESULT.pack(False, 0), error


def _publish(
    save: LocalSave | RemoteSave,
    plan: GlobalPlan | None,
    results: Sequence[bytes],
    failure: Exception | None,
) -> tuple[None, list[int]]:
    """Publish on the first rank if all have written. Returns the numbers of bytes and files."""
    # Imported here: torch.distributed.checkpoint takes seconds that only a save or load needs.
    from mcore.parallel.checkpoint.files.writer import publish_checkpoint

    if failure is not None:
        raise failure
    headers = [_RESULT.unpack_from(result) for result in results]
    if plan is None or not all(has_written for has_written, _ in headers):
        return None, [0, 0]  # a rank that has failed raises its error on all
    files: dict[str, list[tuple[str, Piece]]] = {}
    digests = []
    for rank, (result, (_, length)) in enumerate(zip(results, headers, strict=True)):
        end = _RESULT.size + length
        name = save.file_of(rank).name
        if length:
            located = locate_pieces(name, result[_RESULT.size : end])
            files[name] = plan.name_pieces(rank, located)
        digests.append(result[end:])
    plan.compare_shards(digests)
    keys = plan.list_keys(chain.from_iterable(files.values()))
    num_bytes = publish_checkpoint(save, keys, files, plan.merge_paths())
    return None, [num_bytes, len(files) + 2]
