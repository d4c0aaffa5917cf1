"""The check that ranks with replicas of the parameters hold the same bits."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mcore.parallel.agreement import first_difference, max_or_raise
from mcore.parallel.groups import AnyGroup, comm_device, group_ranks
from mcore.parallel.param_hashing import NamedParam, hash_params, named_params
from mcore.parallel.process_groups.default import get_default_process_groups, group_of_several
from mcore.parallel.torch_compat import is_distributed
from mcore.tensor.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["check_param_hashes_across_dp_replicas", "param_hashes"]

logger = logging.getLogger(__name__)

_MAX_LINES = 20
_DIGEST_BYTES = 16  # of XXH3-128


@dataclasses.dataclass
class _Replicated:
    """This rank's parameters that one group replicates, and their digests as rows of a table that
    is common to all ranks of the group.
    """

    descriptions: list[str] = dataclasses.field(default_factory=list)
    compared: list[NamedParam] = dataclasses.field(default_factory=list)
    rows: torch.Tensor = dataclasses.field(init=False)  # of each digest, int64 [n]
    digests: torch.Tensor = dataclasses.field(init=False)  # uint8 [n, 16]
    num_rows: int = 0  # of the whole table, the same on all ranks
    is_full: bool = True  # whether every rank holds a digest for every row, the same on all ranks


class _ShardSlots(NamedTuple):
    """The different shards of a tensor in a group, as slots that are compared one by one."""

    num_shards: int = 1
    own: int | None = 0  # the slot of this rank's shard; None if it holds none
    has_replicas: bool = True
    layout: str = ""  # equal on ranks with equal slots; empty if all ranks hold the whole tensor


_WHOLE = _ShardSlots()


def check_param_hashes_across_dp_replicas(
    model: nn.Module | Sequence[nn.Module],
    cross_check: bool = False,
    *,
    dp_group: AnyGroup | None = None,
    expert_dp_group: AnyGroup | None = None,
    num_threads: int | None = None,
    bit_exact: bool = True,
) -> bool:
    """Return whether the data-parallel replicas of all parameters are equal, by their XXH3-128.

    Every rank of a group calls this. Parameters whose attribute ``allreduce`` is False (experts)
    are compared over ``expert_dp_group``, then all others over ``dp_group``. Over each group, one
    all-reduce (MAX of 64 int64) checks that the ranks have the same parameters. With
    ``cross_check`` one all-reduce (MAX, 32 bytes for each parameter) follows, else one broadcast
    from the group's first rank (16 bytes for each). A difference found by ``cross_check`` costs the
    broadcast too. For DTensors the broadcast is replaced by two all-reduces (MAX, 24 bytes for each
    shard). Nothing grows with the size of the group, and no message is pickled.

    A DTensor is compared shard by shard, between the ranks that differ only along mesh dimensions
    that replicate. A DTensor sharded over the whole group has no replicas and is skipped. A
    quantised or fp8 wrapper is compared by the tensors inside it. Parameters on an accelerator are
    copied to the host through at most 512 MiB of page-locked memory, after waiting for the
    accelerator.

    Two different replicas have the same hash with probability 2^-128. This does not protect against
    deliberate changes. :func:`param_hashes` returns the SHA-1 of Megatron-LM, many times slower.

    Parameters that differ from the replica on the first rank of the group are logged at ERROR on
    the rank that holds them, at most 20 of them.

    Args:
        model: The model chunks of this rank, or one module.
        cross_check: Compare all ranks with each other instead of each with the first of its group.
        dp_group: The group of dense parameters. None means ``dp`` of the default ProcessGroups.
            Pass ``dp_cp`` to include the context-parallel ranks, which hold replicas too.
        expert_dp_group: The group of expert parameters. None means ``expt_dp`` of the default.
        num_threads: Number of hashing threads, at least 1. None means one for each CPU, at most 8.
        bit_exact: Compare raw bytes: -0.0 differs from 0.0, NaN equals a NaN of the same bits, and
            another dtype is an error. False compares the values as float32, as Megatron-LM does.

    Returns:
        With ``cross_check`` True if all replicas are equal. This answer is the same on all ranks of
        ``dp_group``, also if only the experts of some ranks differ. Else True if this rank's
        parameters equal those of the first rank of its groups, so always True on that rank. True
        without parameters, without torch.distributed, and without a group of several ranks.

    Raises:
        ValueError: This rank is not a member of a group. On all ranks of the group: the number,
            names, shapes or dtypes of the parameters, or the arguments, differ between the ranks.
            On any rank a parameter has no bytes to read (meta device, uninitialised, sparse, an
            unknown tensor subclass), or ``num_threads`` is below 1.
        TypeError: ``model`` is neither a module nor a sequence of modules (on all ranks of the
            group), or a group is not a process group.

    Example:
        >>> import torch
        >>> check_param_hashes_across_dp_replicas([torch.nn.Linear(2, 2)], cross_check=True)
        True
    """
    given = {"expt_dp": expert_dp_group, "dp": dp_group}
    groups, failed = _resolve_groups(given)
    prepared: dict[str, _Replicated] = {}
    try:
        params: dict[str, list[NamedParam]] = {field: [] for field in given}
        for named in named_params(model):
            is_expert = getattr(named.param, "allreduce", True) is False
            params["expt_dp" if is_expert else "dp"].append(named)
        _warn_of_unchecked(params, given)
        prepared = _hash_replicated(params, groups, num_threads, bit_exact)
        arguments = f"the arguments cross_check={bool(cross_check)}, bit_exact={bool(bit_exact)}"
        for replicated in prepared.values():
            replicated.descriptions.insert(0, arguments)
    except Exception as error:
        failed = failed or [error]
    verdict = True
    for field, group in groups.items():
        verdict = _compare(group, prepared.get(field), cross_check, verdict, failed)
    if failed:
        raise failed.pop()
    return verdict


def param_hashes(
    model: nn.Module | Sequence[nn.Module],
    *,
    num_threads: int | None = None,
    bit_exact: bool = True,
) -> dict[str, str]:
    """Return the SHA-1 of every parameter's bytes, to compare two runs offline.

    No communication: every rank gets the hashes of its parameters. Of a DTensor the local shard is
    hashed, of a quantised wrapper the tensors inside it, one after the other. Shape and dtype are
    not part of the hash.

    Args:
        model: A module, or the model chunks of this rank.
        num_threads: Number of hashing threads, at least 1. None means one for each CPU, at most 8.
        bit_exact: Hash the raw bytes. False hashes the values as float32 (of complex numbers the
            real part), as Megatron-LM does. Then bfloat16 and float32 tensors of the same values
            have equal hashes, but so do different values that are equal as float32.

    Returns:
        Lower-case hexadecimal SHA-1 by parameter name. With several chunks the names start with
        ``chunk0.``, ``chunk1.`` and so on. A parameter that a chunk has under two names is listed
        once.

    Raises:
        TypeError: ``model`` is neither a module nor a sequence of modules.
        ValueError: A parameter has no bytes to read (meta device, uninitialised, sparse, an
            unknown tensor subclass), or ``num_threads`` is below 1.

    Example:
        >>> layer = nn.Linear(4, 1, bias=False)
        >>> _ = nn.init.ones_(layer.weight)
        >>> param_hashes(layer)
        {'weight': 'df87141c4e5d8879ae12632dd0e1eee69aa1d093'}
    """
    found = named_params(model)
    is_alone = isinstance(model, nn.Module) or len(model) == 1
    new_hasher = partial(hashlib.sha1, usedforsecurity=False)
    digests = hash_params(found, new_hasher, num_threads=num_threads, bit_exact=bit_exact)
    return {
        named.name if is_alone else f"chunk{named.chunk}.{named.name}": digest.hex()
        for named, digest in zip(found, digests, strict=True)
    }


def _resolve_groups(
    given: Mapping[str, AnyGroup | None],
) -> tuple[dict[str, dist.ProcessGroup], list[Exception]]:
    """Return the usable groups of several ranks, and the error of a group that is not usable."""
    groups: dict[str, dist.ProcessGroup] = {}
    failed: list[Exception] = []
    for field, group in given.items():
        try:
            member = group_of_several(group, field)
        except (TypeError, ValueError) as error:
            failed = [error]
        else:
            if member is not None:
                groups[field] = member
    return groups, failed


def _warn_of_unchecked(
    params: Mapping[str, Sequence[NamedParam]], given: Mapping[str, AnyGroup | None]
) -> None:
    """Warn when parameters go unchecked because no group was given for them."""
    if not is_distributed() or get_default_process_groups() is not None:
        return
    arguments = {"expt_dp": "expert_dp_group", "dp": "dp_group"}
    for field, group in given.items():
        if group is None and params[field]:
            logger.warning(
                "%d parameters are not compared: pass %s, or set the default ProcessGroups",
                len(params[field]),
                arguments[field],
            )


def _hash_replicated(
    params: Mapping[str, Sequence[NamedParam]],
    groups: Mapping[str, dist.ProcessGroup],
    num_threads: int | None,
    bit_exact: bool,
) -> dict[str, _Replicated]:
    """Describe and hash the parameters of all groups, all at once to keep the threads busy."""
    prepared = {
        field: _tabulate(params[field], group, bit_exact) for field, group in groups.items()
    }
    compared = [named for replicated in prepared.values() for named in replicated.compared]
    digests = iter(
        hash_params(compared, xxhash.xxh3_128, num_threads=num_threads, bit_exact=bit_exact)
    )
    for replicated in prepared.values():
        own = b"".join(islice(digests, len(replicated.compared)))
        one_more = bytearray(own + bytes(_DIGEST_BYTES))  # torch reads no empty buffer
        packed = torch.frombuffer(one_more, dtype=torch.uint8).view(-1, _DIGEST_BYTES)
        replicated.digests = packed[:-1]
    return prepared


def _tabulate(
    params: Sequence[NamedParam], group: dist.ProcessGroup, bit_exact: bool
) -> _Replicated:
    """Assign every shard of every parameter a row in the table of one group."""
    finder = _ShardSlotFinder(group_ranks(group))
    found = _Replicated()
    rows = []
    num_skipped = 0
    for named in params:
        slots = finder.find(named.param)
        found.descriptions.append(_describe_param(named, slots.layout, with_dtype=bit_exact))
        found.is_full &= not slots.layout
        if not slots.has_replicas:
            num_skipped += 1
            continue
        if slots.own is not None:
            found.compared.append(named)
            rows.append(found.num_rows + slots.own)
        found.num_rows += slots.num_shards
    if num_skipped:
        logger.debug("%d sharded parameters have no replicas and are not compared", num_skipped)
    found.rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return found


def _describe_param(named: NamedParam, layout: str, *, with_dtype: bool) -> str:
    """Return the properties that must be equal on two ranks to compare a parameter's bytes."""
    param = named.param
    words = [f"{named.name!r} of model chunk {named.chunk}", f"shape {tuple(param.shape)}"]
    if with_dtype:
        words.append(str(param.dtype))
    if layout:
        words.append(layout)
    for path, tensor in named.parts:
        if not path:
            continue
        words.append(path.rstrip("."))
        if not is_dtensor(param):  # the shards of a DTensor may be uneven
            words.append(f"shape {tuple(tensor.shape)}")
        if with_dtype:
            words.append(str(tensor.dtype))
    return ", ".join(words)


def _compare(
    group: dist.ProcessGroup,
    replicated: _Replicated | None,
    cross_check: bool,
    earlier: bool,
    failed: list[Exception],
) -> bool:
    """Compare over one group and return the verdict so far. ``failed`` gets the error of all ranks.
    The error is not raised yet, since the ranks of the next group wait for this rank too.
    """
    try:
        # Equal bytes on all ranks have equal maxima of themselves and of their inverses.
        digest = _digest(repr(replicated and replicated.descriptions))
        inverse = [255 - byte for byte in digest]
        any_differed, *highest = max_or_raise([int(not earlier), *digest, *inverse], failed, group)
        replicated = cast("_Replicated", replicated)  # a rank without it has an error
        if highest != [*digest, *inverse]:
            _raise_difference(replicated.descriptions, group)
        is_equal = _compare_digests(replicated, group, cross_check)
    except Exception as error:
        failed[:] = [error]
        return False
    return is_equal and not (any_differed if cross_check else not earlier)


def _raise_difference(descriptions: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank of a group, with the first difference of the ranks' lists.
    Two all-reduces: MAX of two int64, and MAX of 40 uint8 for each entry that all ranks have.
    """
    counts = torch.tensor([len(descriptions), -len(descriptions)], device=comm_device(group))
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    most, minus_fewest = counts.tolist()
    position = first_difference(list(map(_digest, descriptions[:-minus_fewest])), group)
    here = descriptions[position] if position < len(descriptions) else "nothing"
    raise ValueError(
        f"the ranks of the group do not have the same parameters: rank {dist.get_rank()} has "
        f"{len(descriptions) - 1}, the group between {-minus_fewest - 1} and {most - 1}. "
        f"The first difference is number {position}, here {here}. Check replicas of one model "
        "with the same arguments, over a group of ranks that hold replicas"
    )


def _digest(text: str) -> bytes:
    return hashlib.sha1(text.encode(), usedforsecurity=False).digest()


def _compare_digests(replicated: _Replicated, group: dist.ProcessGroup, cross_check: bool) -> bool:
    """Compare the digests and log the parameters that differ from the first rank's."""
    if replicated.num_rows == 0:
        return True
    if cross_check:
        # Where a rank holds no digest it sends zeros, the smallest value, for both x and 255 - x:
        # the maxima are of the ranks that hold one, and are inverse only if all of these agree.
        both = torch.zeros(2, replicated.num_rows, _DIGEST_BYTES, dtype=torch.uint8, device="cpu")
        both[0, replicated.rows] = replicated.digests
        both[1, replicated.rows] = 255 - replicated.digests
        highest, inverse_of_lowest = _reduce_max(both, group)
        if bool((highest == 255 - inverse_of_lowest).all()):
            return True
    differing = _find_differing_from_first(replicated, group)
    rank = dist.get_rank()
    for index in differing[:_MAX_LINES]:
        named = replicated.compared[index]
        logger.error(
            "[Rank %d] Hash not matching for %s in model chunk %d", rank, named.name, named.chunk
        )
    if len(differing) > _MAX_LINES:
        logger.error(
            "[Rank %d] Hash not matching for %d more parameters", rank, len(differing) - _MAX_LINES
        )
    return not (cross_check or differing)


def _find_differing_from_first(table: _Replicated, group: dist.ProcessGroup) -> list[int]:
    """Return the indices of this rank's digests that differ from the first rank with their row.
    A full table costs one broadcast of 16 bytes a row, any other table two all-reduces (MAX).
    """
    if table.is_full:
        reference = table.digests.to(comm_device(group))
        if group.rank() != 0:
            reference = torch.empty_like(reference)
        dist.broadcast(reference, group=group, group_src=0)
        expected = reference.cpu()
    else:
        # The lowest rank that holds a row has the largest precedence, and sends its digest alone.
        precedence = group.size() - group.rank()
        holders = torch.zeros(table.num_rows, dtype=torch.int64, device="cpu")
        holders[table.rows] = precedence
        is_first = _reduce_max(holders, group)[table.rows] == precedence
        reference = torch.zeros(table.num_rows, _DIGEST_BYTES, dtype=torch.uint8, device="cpu")
        reference[table.rows[is_first]] = table.digests[is_first]
        expected = _reduce_max(reference, group)[table.rows]
    return (expected != table.digests).any(dim=1).nonzero().flatten().tolist()


def _reduce_max(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    on_device = message.to(comm_device(group))
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=group)
    return on_device.cpu()


class _ShardSlotFinder:
    """Finds the ranks of a group that hold replicas of the same shard of a DTensor."""

    # Ranks outside this rank's mesh are assumed to be in other meshes of the same layout: a tensor
    # sharded over tensor-parallel meshes has its replicas across these meshes.

    def __init__(self, group_ranks: Collection[int]) -> None:
        self._group_ranks = frozenset(group_ranks)
        self._found: dict[tuple[DeviceMesh, tuple[Placement, ...]], _ShardSlots] = {}

    def find(self, tensor: torch.Tensor) -> _ShardSlots:
        """Return the slots of a tensor's shards, the same on all ranks except for ``own``."""
        if not is_dtensor(tensor):
            return _WHOLE
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        if (mesh, placements) in self._found:
            return self._found[mesh, placements]
        places = product(*map(range, mesh.shape))
        in_group = {
            _cut_coordinates(place, placements)
            for rank, place in zip(mesh.mesh.flatten().tolist(), places, strict=True)
            if rank in self._group_ranks
        }
        shards = sorted(in_group)
        coordinate = mesh.get_coordinate()
        own = None if coordinate is None else shards.index(_cut_coordinates(coordinate, placements))
        digest = hashlib.sha1(repr(shards).encode(), usedforsecurity=False).hexdigest()
        found = _ShardSlots(
            num_shards=len(shards),
            own=own,
            has_replicas=len(shards) < len(self._group_ranks),
            layout=f"mesh {tuple(mesh.shape)} {placements}, shards {digest}",
        )
        self._found[mesh, placements] = found
        return found


def _cut_coordinates(coordinate: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Keep the coordinates along the mesh dimensions that do not replicate."""
    return tuple(
        place
        for place, placement in zip(coordinate, placements, strict=True)
        if not placement.is_replicate()
    )
