"""The exchange of rows among the ranks of an expert-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.agreement import check_on_all_ranks, is_checking_tensors
from mcore.parallel.groups import GroupLike, comm_device
from mcore.parallel.process_groups.default import group_of_several
from mcore.parallel.regions.borders import (
    Sizes,
    apply_function,
    check_has_dims,
    check_input_sizes,
    check_sizes,
)


def all_to_all(
    input_: Tensor,
    group: GroupLike | None = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send rows of dim 0 to every rank and receive theirs. Backward returns the gradients.

    For tokens sorted by the rank of their expert: one all-to-all forward and one backward. Every
    rank of the group must call it with the same optional arguments given or omitted, and must run
    the same backward pass. With ``MCORE_DEBUG_COLLECTIVES=1`` differing arguments, and numbers of
    rows that do not fit together, are an error on all ranks. Gradients of gradients are supported.

    Args:
        input_: Tensor ``[s, ...]``, the rows for rank 0 first. Other dims and dtype are equal on
            all ranks.
        group: Expert-parallel group (or 1-D DeviceMesh) of n ranks. Default ``ep`` of the default
            ``ProcessGroups``.
        output_split_sizes: The number of rows to receive from every rank, as in that rank's
            ``input_split_sizes`` for this rank. If only ``input_split_sizes`` is given, the ranks
            first exchange the numbers, which costs a small all-to-all and a host sync.
        input_split_sizes: The number of rows to send to every rank. Default s / n.

    Returns:
        A new tensor, the rows of rank 0 first. Without a group, in a group of one rank and without
        torch.distributed: ``input_``.

    Raises:
        TypeError: ``input_`` is no tensor, as with Megatron-LM's order of arguments.
        ValueError: n does not divide s, there are not n sizes or they do not sum to s, ``input_``
            has no dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> tokens = torch.zeros(5, 8)
        >>> all_to_all(tokens, input_split_sizes=[5]) is tokens
        True
    """
    if not isinstance(input_, Tensor):
        raise TypeError(
            f"input_ must be a tensor, got {type(input_).__name__}: the order is "
            "all_to_all(input_, group)"
        )
    resolved = group_of_several(group, "ep")
    if resolved is None:
        return input_
    sizes = partial(_resolve_sizes, input_, input_split_sizes, output_split_sizes, resolved)
    received, sent = check_on_all_ranks(sizes, partial(_describe, input_), resolved)
    if received is None or is_checking_tensors():
        own = torch.tensor(sent, device=comm_device(resolved))
        theirs = torch.empty_like(own)
        dist.all_to_all_single(theirs, own, group=resolved)
        wanted, received = received, tuple(theirs.tolist())
        if wanted is not None:
            check_on_all_ranks(partial(_check_received, wanted, received), str, resolved)
    return apply_function(AllToAll, input_, resolved, received, sent)


def _resolve_sizes(
    input_: Tensor,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> tuple[Sizes, tuple[int, ...]]:
    """Return the rows to receive, None if the ranks must exchange them, and the rows to send."""
    check_has_dims(input_)
    sent = check_input_sizes(input_split_sizes, input_, group)
    received = check_sizes("output_split_sizes", output_split_sizes, group)
    if sent is not None:
        return received, sent
    length, num_ranks = input_.shape[0], group.size()
    if length % num_ranks:
        raise ValueError(
            f"an input of shape {tuple(input_.shape)} cannot be sent in equal parts to the "
            f"{num_ranks} ranks of the group: pass input_split_sizes"
        )
    equal = (length // num_ranks,) * num_ranks
    return equal if received is None else received, equal


def _describe(input_: Tensor, sizes: tuple[Sizes, tuple[int, ...]]) -> str:
    """Return the properties of an exchange that must be equal on all ranks."""
    rows = f"rows {tuple(input_.shape[1:])} of {input_.dtype} on {input_.device.type}"
    return f"all-to-all of {rows}, output_split_sizes {'None' if sizes[0] is None else 'given'}"


def _check_received(wanted: tuple[int, ...], received: tuple[int, ...]) -> None:
    if wanted != received:
        raise ValueError(
            f"output_split_sizes is {list(wanted)}, but the ranks of the group send "
            f"{list(received)} rows: pass each rank's input_split_sizes for this rank"
        )


class AllToAll(torch.autograd.Function):
    """Forward an exchange of rows, backward the reverse exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: dist.ProcessGroup,
        received: tuple[int, ...],
        sent: tuple[int, ...],
    ) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        output = input_.new_empty((sum(received), *input_.shape[1:]))
        dist.all_to_all_single(output, input_.contiguous(), list(received), list(sent), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        grad = apply_function(AllToAll, grad_output, ctx.group, ctx.sent, ctx.received)
        return grad, None, None, None
