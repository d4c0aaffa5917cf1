"""The check that ranks with copies of the parameters hold the same bits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
import xxhash
from torch import nn

from mcore.parallel.agreement import max_or_raise
from mcore.parallel.groups import GroupLike, group_ranks
from mcore.parallel.process_groups.default import (
    get_default_process_groups,
    group_of_several,
)
from mcore.parallel.replicas.comparison import (
    HashTable,
    agree_on_all_ranks,
    describe_param,
    differing_from_first,
    hash_table,
    raise_difference,
    structure_digest,
)
from mcore.parallel.replicas.hashing import NamedParam, hash_params, named_params
from mcore.parallel.replicas.shard_slots import ShardSlotFinder, ShardSlots
from mcore.parallel.torch_compat import is_distributed

logger = logging.getLogger(__name__)

_MAX_LINES = 20


class _Settings(NamedTuple):
    """The arguments that all ranks must have in common."""

    cross_check: bool
    bit_exact: bool


class _Copies(NamedTuple):
    """What this rank holds of the parameters that one group replicates, with their digests."""

    descriptions: list[str]
    compared: list[NamedParam]
    table: HashTable


def check_param_hashes_across_dp_replicas(
    model: nn.Module | Sequence[nn.Module],
    cross_check: bool = False,
    *,
    dp_group: GroupLike | None = None,
    expert_dp_group: GroupLike | None = None,
    num_threads: int | None = None,
    bit_exact: bool = True,
) -> bool:
    """Return whether the data-parallel copies of all parameters are equal, by their XXH3-128.

    Every rank of a group calls this. Parameters whose attribute ``allreduce`` is False (experts)
    are compared over ``expert_dp_group``, all others over ``dp_group``; the group of the experts
    comes first. Over each group: one all-reduce (MAX of 64 int64) to see that the ranks have the
    same parameters, then with ``cross_check`` one all-reduce (MAX, 32 bytes for each parameter),
    else one broadcast from the group's first rank (16 bytes for each). Nothing grows with the size
    of the group, and no message is pickled.

    A DTensor is compared shard by shard between the ranks that differ only along mesh dimensions
    that replicate; one that the whole group shards has no copies and is skipped. A quantised or
    fp8 wrapper is compared by the tensors inside it. Parameters on an accelerator are copied to the
    host through at most 512 MiB of page-locked memory, after waiting for the accelerator.

    Different copies pass for equal once in 2^128 cases. That is no protection against somebody who
    changes them on purpose; :func:`param_hashes` gives Megatron-LM's SHA-1, many times slower.

    Each parameter that differs from the copy on the first rank of the group is logged at ERROR on
    the rank that holds it, at most 20 of them.

    Args:
        model: The model chunks of this rank, or one module.
        cross_check: Compare all ranks with each other instead of each with the first of its group.
        dp_group: The group of dense parameters; None means ``dp`` of the default ProcessGroups.
            Pass ``dp_cp`` to include the context-parallel ranks, which hold copies too.
        expert_dp_group: The group of expert parameters; None means ``expt_dp`` of the default.
        num_threads: Threads to hash with, at least 1; None means one for each CPU, at most 8.
        bit_exact: Compare raw bytes: -0.0 differs from 0.0, NaN equals a NaN of the same bits, and
            another dtype is an error. False compares the values as float32, as Megatron-LM does.

    Returns:
        With ``cross_check`` True when all copies are equal: the same answer on all ranks of
        ``dp_group``, also when only the experts of some of them differ. Else True when this rank's
        parameters equal those of the first rank of its groups, which itself always gets True. True
        without parameters, without torch.distributed, and where there is no group or only one rank
        in it.

    Raises:
        ValueError: This rank is not a member of a group. On all ranks of the group: the number,
            names, shapes or dtypes of the parameters, or the arguments, differ between the ranks;
            a parameter has no bytes to read (meta device, uninitialised, sparse, an unknown tensor
            subclass), or ``num_threads`` is below 1, on any rank.
        TypeError: ``model`` is neither a module nor a sequence of modules (on all ranks of the
            group), or something other than a process group was given as one.

    Example:
        >>> import torch
        >>> check_param_hashes_across_dp_replicas([torch.nn.Linear(2, 2)], cross_check=True)
        True
    """
    given = {"expt_dp": expert_dp_group, "dp": dp_group}
    settings = _Settings(bool(cross_check), bool(bit_exact))
    groups, error = _resolve(given)
    prepared: dict[str, _Copies] = {}
    try:
        params = _params_by_field(model)
        _warn_of_unchecked(params, given)
        prepared = _prepare(params, groups, settings, num_threads)
    except Exception as own_error:
        error = error or own_error
    verdict = True
    for field, group in groups.items():
        copies = prepared.get(field, _Copies([], [], hash_table([], [], 0, is_full=True)))
        verdict, error = _compare(group, copies, cross_check, verdict, error)
    if error is not None:
        raise error
    return verdict


def _resolve(
    given: Mapping[str, GroupLike | None],
) -> tuple[dict[str, dist.ProcessGroup], Exception | None]:
    """Return the groups of several ranks; one that cannot be used is an error beside the others."""
    groups: dict[str, dist.ProcessGroup] = {}
    error: Exception | None = None
    for field, group in given.items():
        try:
            member = group_of_several(group, field)
        except (TypeError, ValueError) as own_error:
            error = own_error
        else:
            if member is not None:
                groups[field] = member
    return groups, error


def _params_by_field(model: nn.Module | Sequence[nn.Module]) -> dict[str, list[NamedParam]]:
    """Split the parameters of a model by the field of ProcessGroups that replicates them."""
    params: dict[str, list[NamedParam]] = {"expt_dp": [], "dp": []}
    for named in named_params(model):
        is_expert = getattr(named.param, "allreduce", True) is False
        params["expt_dp" if is_expert else "dp"].append(named)
    return params


def _warn_of_unchecked(
    params: Mapping[str, Sequence[NamedParam]], given: Mapping[str, GroupLike | None]
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


def _prepare(
    params: Mapping[str, Sequence[NamedParam]],
    groups: Mapping[str, dist.ProcessGroup],
    settings: _Settings,
    num_threads: int | None,
) -> dict[str, _Copies]:
    """Describe and hash what is compared, all at once, which keeps the threads busy."""
    placed = {field: _with_slots(params[field], group) for field, group in groups.items()}
    compared = [named for pairs in placed.values() for named, slots in pairs if slots.has_replicas]
    digests = hash_params(
        compared, xxhash.xxh3_128, num_threads=num_threads, bit_exact=settings.bit_exact
    )
    by_place = {
        (named.chunk, named.name): digest for named, digest in zip(compared, digests, strict=True)
    }
    return {field: _copies(pairs, by_place, settings) for field, pairs in placed.items()}


def _with_slots(
    params: Sequence[NamedParam], group: dist.ProcessGroup
) -> list[tuple[NamedParam, ShardSlots]]:
    finder = ShardSlotFinder(group_ranks(group))
    return [(named, finder.slots(named.param)) for named in params]


def _copies(
    pairs: Sequence[tuple[NamedParam, ShardSlots]],
    digests: Mapping[tuple[int, str], bytes],
    settings: _Settings,
) -> _Copies:
    """Give every shard of every parameter its row in the table of one group."""
    arguments = ", ".join(f"{name}={value}" for name, value in settings._asdict().items())
    descriptions = [f"the arguments {arguments}"]
    compared: list[NamedParam] = []
    rows: list[int] = []
    num_rows = 0
    for named, slots in pairs:
        descriptions.append(describe_param(named, slots.layout, with_dtype=settings.bit_exact))
        if not slots.has_replicas:
            continue
        if slots.own is not None:
            compared.append(named)
            rows.append(num_rows + slots.own)
        num_rows += slots.num_shards
    num_skipped = sum(not slots.has_replicas for _, slots in pairs)
    if num_skipped:
        logger.debug("%d sharded parameters have no copies and are not compared", num_skipped)
    own_digests = [digests[named.chunk, named.name] for named in compared]
    is_full = not any(slots.layout for _, slots in pairs)
    return _Copies(descriptions, compared, hash_table(rows, own_digests, num_rows, is_full=is_full))


def _compare(
    group: dist.ProcessGroup,
    copies: _Copies,
    cross_check: bool,
    earlier: bool,
    error: Exception | None,
) -> tuple[bool, Exception | None]:
    """Compare over one group; return the verdict so far, or the error that all ranks have.
    It is not raised, since the ranks of the next group wait for this one too.
    """
    try:
        digest = structure_digest(copies.descriptions)
        inverse = [255 - byte for byte in digest]
        any_differed, *highest = max_or_raise([int(not earlier), *digest, *inverse], error, group)
        if highest != [*digest, *inverse]:
            raise_difference(copies.descriptions, group)
        agrees = _agrees(copies, group, cross_check)
    except Exception as new_error:
        return False, new_error
    return agrees and not (any_differed if cross_check else not earlier), None


def _agrees(copies: _Copies, group: dist.ProcessGroup, cross_check: bool) -> bool:
    """Compare the digests and log the parameters that differ from the first rank's."""
    if copies.table.num_rows == 0:
        return True
    if cross_check and agree_on_all_ranks(copies.table, group):
        return True
    differing = differing_from_first(copies.table, group)
    rank = dist.get_rank()
    for index in differing[:_MAX_LINES]:
        named = copies.compared[index]
        logger.error(
            "[Rank %d] Hash not matching for %s in model chunk %d", rank, named.name, named.chunk
        )
    if len(differing) > _MAX_LINES:
        logger.error(
            "[Rank %d] Hash not matching for %d more parameters", rank, len(differing) - _MAX_LINES
        )
    return not (cross_check or differing)
