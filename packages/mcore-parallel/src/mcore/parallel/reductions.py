"""Maxima and conjunctions of a few numbers over model-parallel ranks, one small collective each.

A double is sent as its bits ``b`` if ``b >= 0``, else as ``b ^ 0x7fffffffffffffff``. These int64
have the same order as the doubles, with NaN highest. If a rank cannot encode its value, it sends
the failure and all ranks raise.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from mcore.parallel.agreement import check_tensors, max_or_raise
from mcore.parallel.groups import AnyGroup, GroupLike, as_process_group, comm_device, get_pg_size
from mcore.parallel.process_groups.default import group_of_several

_T = TypeVar("_T")
Stat = float | torch.Tensor | None
NO_VALUE = -(2**63)
_NAN = 2**63 - 1
_MAGNITUDE = 2**63 - 1


def reduce_max_stat_across_model_parallel_group(
    stat: Stat, mp_group: AnyGroup | None
) -> float | None:
    """Return the largest value of a statistic over a group, such as the gradient norm.

    One all-reduce (MAX of 64 int64) over ``mp_group``. Every rank of the group calls this and gets
    the same result in full double precision. A tensor on the device of the group's collectives is
    not waited for before them.

    Args:
        stat: A number, a tensor of one element, or None on ranks without a value.
        mp_group: The group. None means ``mp`` of the default ProcessGroups.

    Returns:
        The maximum over the ranks that have a value, or None if no rank has one. NaN if any rank
        has NaN. Without torch.distributed, without a group and in a group of one rank: ``stat`` as
        a float or None, without communication.

    Raises:
        ValueError: This rank is not a member of the group.
        TypeError: The ``stat`` of a rank is not a number (on all ranks of the group).

    Example:
        >>> reduce_max_stat_across_model_parallel_group(2, None)
        2.0
    """
    group = group_of_several(mp_group, "mp")
    if group is None:
        return _read_stat(stat)
    return decode_double(_reduce(lambda: [_encode_stat(stat)], group, "a statistic")[0])


def logical_and_across_model_parallel_group(
    input: bool | torch.Tensor, mp_group: AnyGroup | None
) -> bool:
    """Return whether a condition holds on every rank of a group.

    One all-reduce (MAX of 64 int64) over ``mp_group``. Every rank of the group calls this and gets
    the same answer. A tensor on the device of the group's collectives is not waited for before
    them.

    Args:
        input: Any object with a truth value, including numpy scalars and tensors of one element.
        mp_group: The group. None means ``mp`` of the default ProcessGroups.

    Returns:
        True when ``input`` is true on every rank. Without torch.distributed, without a group and
        in a group of one rank: ``bool(input)``, without communication.

    Raises:
        ValueError: This rank is not a member of the group.
        TypeError: The ``input`` of a rank is a tensor of several elements, or of none (on all ranks
            of the group). For other objects without a truth value, all ranks raise the error of
            ``bool(input)``.

    Example:
        >>> logical_and_across_model_parallel_group(True, None)
        True
    """
    group = group_of_several(mp_group, "mp")
    if group is None:
        return not _encode_flag(input)
    return not _reduce(lambda: [_encode_flag(input)], group, "a condition")[0]


def reduce_max_memory_across_pp_group(
    memory_report: Mapping[str, int | float], pp_group: AnyGroup | None
) -> dict[str, int | float]:
    """Return the maximum of every entry of a memory report over the pipeline stages.

    One all-reduce (MAX of 64 int64, two for each entry) over ``pp_group``, and one more for entries
    beyond the first 30. Every rank of the group calls this with the same keys, in any order, and
    gets the same values.

    Args:
        memory_report: The value of each metric: ints of up to 64 bits, floats, bools. Entries that
            are int on some ranks and float on others are compared as floats.
        pp_group: The group. None means ``pp`` of the default ProcessGroups.

    Returns:
        A new dict with the caller's order of keys. Ints stay ints and exact, and bools stay bools
        (true if any is). NaN on any rank results in NaN. Without torch.distributed, without a group
        and in a group of one rank: a copy, without communication.

    Raises:
        ValueError: This rank is not a member of the group, or the keys differ between the ranks
            (on all ranks of the group).
        TypeError: A rank has a value that is not a number (on all ranks of the group).
        OverflowError: A rank has an int of more than 64 bits (on all ranks of the group).

    Example:
        >>> reduce_max_memory_across_pp_group({"peak_bytes": 7}, None)
        {'peak_bytes': 7}
    """
    group = group_of_several(pp_group, "pp")
    if group is None:
        return dict(memory_report)
    names = _sort_names(memory_report)
    reduced = _reduce(
        lambda: [
            code for name, each in _sort_pairs(memory_report) for code in _encode_memory(name, each)
        ],
        group,
        _describe_keys(names),
    )
    pairs = zip(reduced[::2], reduced[1::2], strict=True)
    largest = {
        name: _decode_memory(whole, double, memory_report[name])
        for name, (whole, double) in zip(names, pairs, strict=True)
    }
    return {name: largest[name] for name in memory_report}


def reduce_step_stats(
    stats: Mapping[str, Stat], flags: Mapping[str, bool | torch.Tensor], group: AnyGroup | None
) -> tuple[dict[str, float | None], dict[str, bool]]:
    """Reduce all statistics and conditions of one training step in a single collective.

    One all-reduce (MAX of 64 int64) over ``group``, and one more for entries beyond the first 61.
    Every rank of the group calls this with the same keys, in any order, and gets the same result.
    The device is waited for once instead of once for each entry.

    Args:
        stats: Statistics by name, as for :func:`reduce_max_stat_across_model_parallel_group`.
        flags: Conditions by name, as for :func:`logical_and_across_model_parallel_group`.
        group: The group. None means ``mp`` of the default ProcessGroups.

    Returns:
        The maximum of each statistic and the conjunction of each flag, as new dicts with the
        caller's order of keys. Without torch.distributed, without a group and in a group of one
        rank: this rank's values, without communication.

    Raises:
        ValueError: This rank is not a member of the group, or the keys differ between the ranks
            (on all ranks of the group).
        TypeError: A rank has a value that cannot be reduced (on all ranks of the group).

    Example:
        >>> reduce_step_stats({"grad_norm": 2.5, "zeros": None}, {"update_ok": True}, None)
        ({'grad_norm': 2.5, 'zeros': None}, {'update_ok': True})
    """
    member = group_of_several(group, "mp")
    if member is None:
        alone = {name: _read_stat(stat) for name, stat in stats.items()}
        return alone, {name: not _encode_flag(flag) for name, flag in flags.items()}
    stat_names, flag_names = _sort_names(stats), _sort_names(flags)
    reduced = _reduce(
        lambda: [
            *(_encode_stat(stat) for _, stat in _sort_pairs(stats)),
            *(_encode_flag(flag) for _, flag in _sort_pairs(flags)),
        ],
        member,
        f"statistics with {_describe_keys(stat_names)} and flags with {_describe_keys(flag_names)}",
    )
    by_stat = dict(zip(stat_names, reduced, strict=False))
    by_flag = dict(zip(flag_names, reduced[len(stats) :], strict=True))
    return (
        {name: decode_double(by_stat[name]) for name in stats},
        {name: not by_flag[name] for name in flags},
    )


def _read_stat(stat: Stat) -> float | None:
    if stat is None:
        return None
    if isinstance(stat, torch.Tensor):
        return float(require_one_real(stat).detach())
    if isinstance(stat, str):  # which float() would accept
        raise TypeError(f"expected a number, got the string {stat!r}")
    return float(stat)


def _encode_stat(stat: Stat) -> int | torch.Tensor:
    if isinstance(stat, torch.Tensor):
        return encode_double_tensor(stat)
    return encode_double(_read_stat(stat))


def _encode_flag(value: object) -> int | torch.Tensor:
    """Return 1 for a false value: the maximum over the ranks is 0 only if all are true."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"expected a tensor of one element, got shape {tuple(value.shape)}")
        return (value.detach().reshape(()) == 0).to(torch.int64)
    return int(not value)


def _encode_memory(name: str, value: Any) -> tuple[int, int]:
    """Return the value as an int64 or as an encoded double, and NO_VALUE for the other."""
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if isinstance(plain, float):
        return NO_VALUE, encode_double(plain)
    if not isinstance(plain, int):
        raise TypeError(f"{name} must be an int, a float or a bool, got {value!r}")
    if not -(2**63) <= plain < 2**63:
        raise OverflowError(f"{name} is {plain}, which does not fit into 64 bits")
    return int(plain), NO_VALUE


def _decode_memory(whole: int, double: int, own: object) -> int | float:
    largest = decode_double(double)
    if largest is None:
        is_flag = isinstance(own, bool) or str(getattr(own, "dtype", "")).endswith("bool")
        return bool(whole) if is_flag and whole in (0, 1) else whole
    if whole == NO_VALUE or math.isnan(largest):
        return largest
    return max(largest, float(whole))


def _reduce(
    encode: Callable[[], list[int | torch.Tensor]], group: dist.ProcessGroup, facts: str
) -> list[int]:
    """Return the maxima of the codes. A rank that cannot encode still reaches the collective."""
    codes: Sequence[int | torch.Tensor] = ()
    failed: list[Exception] = []
    try:
        codes = encode()
    except Exception as error:
        failed.append(error)
    return max_or_raise(codes, failed, group, facts)


def _sort_names(mapping: Mapping[str, object]) -> list[str]:
    """Return the keys in the order of the message, none for an object that is no mapping."""
    return sorted(mapping, key=str) if isinstance(mapping, Mapping) else []


def _sort_pairs(mapping: Mapping[str, _T]) -> list[tuple[str, _T]]:
    """Return the keys with their values. TypeError for an object that is no mapping."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"expected values by name, got {type(mapping).__name__}")
    return [(name, mapping[name]) for name in _sort_names(mapping)]


def _describe_keys(names: Sequence[str]) -> str:
    return f"keys ({len(names)}): {', '.join(repr(str(name)) for name in names)}"


def sum_over_group(vectors: Sequence[torch.Tensor], group: GroupLike | None) -> list[torch.Tensor]:
    """Sum 1-D tensors of one dtype and device over a group, packed into one all-reduce.
    For one rank, None or no vectors: the tensors as given, without a collective.
    """
    if not vectors or get_pg_size(group) == 1:
        return list(vectors)
    packed = torch.cat(list(vectors)).to(comm_device(group))
    member = cast("dist.ProcessGroup", as_process_group(group))
    check_tensors("sum", packed, member)
    dist.all_reduce(packed, group=member)
    back = packed.to(vectors[0].device)
    return list(torch.split(back, [vector.numel() for vector in vectors]))


def encode_double(value: float | None) -> int:
    """Map a double, NaN or None to an int64 with the order None < -inf < ... < inf < NaN."""
    if value is None:
        return NO_VALUE
    if math.isnan(value):
        return _NAN
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits if bits >= 0 else bits ^ _MAGNITUDE


def decode_double(code: int) -> float | None:
    """Invert :func:`encode_double`."""
    if code == NO_VALUE:
        return None
    if code == _NAN:
        return math.nan
    bits = code if code >= 0 else code ^ _MAGNITUDE
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def encode_double_tensor(value: torch.Tensor) -> torch.Tensor:
    """Encode a real tensor of one element on its device, without waiting for it."""
    double = require_one_real(value).detach().reshape(()).to(torch.float64)
    bits = double.view(torch.int64)
    ordered = torch.where(bits >= 0, bits, bits ^ _MAGNITUDE)
    return torch.where(double.isnan(), _NAN, ordered)


def require_one_real(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it has one real element, else raise TypeError."""
    if value.numel() != 1 or value.is_complex():
        raise TypeError(
            f"expected a real tensor of one element, got {value.dtype} {tuple(value.shape)}"
        )
    return value
