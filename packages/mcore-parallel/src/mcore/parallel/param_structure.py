"""Whether the ranks of a group hold the same list of parameters, and where the lists part."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore.parallel.agreement import first_difference
from mcore.parallel.groups import comm_device
from mcore.tensor.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcore.parallel.param_hashing import NamedParam

__all__ = ["describe_param", "raise_difference", "structure_digest"]


def describe_param(named: NamedParam, layout: str, *, with_dtype: bool) -> str:
    """Return what has to be equal on two ranks for the bytes of a parameter to be comparable.

    Args:
        named: The parameter.
        layout: How its shards lie in the group, empty for a tensor that is no DTensor.
        with_dtype: Whether copies of another dtype count as different.
    """
    param = named.param
    words = [f"{named.name!r} of model chunk {named.chunk}", f"shape {tuple(param.shape)}"]
    words += [str(param.dtype)] * with_dtype
    words += [layout] * bool(layout)
    for path, tensor in named.parts:
        if path:
            words.append(path.rstrip("."))
            words += [f"shape {tuple(tensor.shape)}"] * (not is_dtensor(param))  # uneven shards
            words += [str(tensor.dtype)] * with_dtype
    return ", ".join(words)


def structure_digest(descriptions: Sequence[str]) -> bytes:
    """Return a 20-byte digest of a list of texts.

    Example:
        >>> structure_digest(["a", "b"]) == structure_digest(["ab"])
        False
    """
    return _digest(repr(list(descriptions)))


def raise_difference(descriptions: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise on every rank of a group whose lists differ, and say where the first difference is.

    Two all-reduces over ``group``: MAX of two int64, and MAX of 40 uint8 for each entry that all
    ranks have. Every rank of it calls this.

    Args:
        descriptions: The call's settings, then one text for each parameter.

    Raises:
        ValueError: Always.
    """
    counts = torch.tensor([len(descriptions), -len(descriptions)]).to(comm_device(group))
    dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
    most, minus_fewest = counts.tolist()
    position = first_difference(list(map(_digest, descriptions[:-minus_fewest])), group)
    here = descriptions[position] if position < len(descriptions) else "nothing"
    raise ValueError(
        f"the ranks of the group do not have the same parameters: rank {dist.get_rank()} has "
        f"{len(descriptions) - 1}, the group between {-minus_fewest - 1} and {most - 1}; "
        f"the first difference is number {position}, here {here}. Check replicas of one model "
        "with the same arguments, over a group whose ranks hold copies"
    )


def _digest(text: str) -> bytes:
    return hashlib.sha1(text.encode(), usedforsecurity=False).digest()
