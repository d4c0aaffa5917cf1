"""Autograd pairs of collectives at the borders of a tensor-parallel region.

Each function runs one collective in the forward pass and its counterpart in the backward pass.
With ``n`` ranks in the group, ``r`` this rank, and dim 0 the sequence:

==========================================  =====================  ================================
function                                    forward                backward
==========================================  =====================  ================================
copy_to_tensor_model_parallel_region        identity               all-reduce (sum)
reduce_from_tensor_model_parallel_region    all-reduce (sum)       identity
scatter_to_tensor_model_parallel_region     slice r of last dim    all-gather, last dim
gather_from_tensor_model_parallel_region    all-gather, last dim   slice r of last dim
scatter_to_sequence_parallel_region         slice r of dim 0       all-gather, dim 0
gather_from_sequence_parallel_region (*)    all-gather, dim 0      reduce-scatter or slice r, dim 0
reduce_scatter_to_sequence_parallel_region  reduce-scatter, dim 0  all-gather, dim 0
==========================================  =====================  ================================

(*) Reduce-scatter if each rank uses the gathered tensor for another part of the computation and so
has a part of the gradient. Slice r if all ranks compute the same from it
(``tensor_parallel_output_grad=False``) and so have the whole gradient.

The three sequence functions accept one size for each rank if the ranks share the sequence
unequally: the sizes of the gathered output, or of the input to split.

- Without a group (the argument, else ``tp`` of the default ``ProcessGroups``), in a group of one
  rank and without torch.distributed the input itself is returned and nothing is sent.
- Every rank of the group must call the function with tensors of the same shape and dtype, in the
  same order, and must run the same backward pass. With ``MCORE_DEBUG_COLLECTIVES=1`` in the
  environment, a small all-reduce before each collective detects differences and refused arguments,
  and all ranks raise. Without it gloo ends the process and NCCL hangs or mixes values. If one rank
  refuses its arguments, the others wait until it ends or until the timeout.
- The input is never modified. Only ``copy_to_tensor_model_parallel_region`` returns an alias of its
  input, on which autograd refuses in-place changes.
- Any strides and any dtype that the group's backend reduces are supported, and so are gradients of
  gradients.

The pairs are those of Shoeybi et al. (arXiv:1909.08053) and Korthikanti et al. (arXiv:2205.05198).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.agreement import check_on_all_ranks, check_tensors, is_checking_tensors
from mcore.parallel.groups import AnyGroup, comm_device
from mcore.parallel.process_groups.default import group_of_several
from mcore.parallel.shortened import counted
from mcore.parallel.torch_compat import all_gather_single, reduce_scatter_single

__all__ = [
    "all_to_all",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]

Collective: TypeAlias = "Callable[[Tensor, dist.ProcessGroup], Tensor]"
Sizes: TypeAlias = "tuple[int, ...] | None"  # rows of every rank; None: equal numbers

SEQUENCE_DIM = 0
LAST_DIM = -1


def copy_to_tensor_model_parallel_region(input_: Tensor, group: AnyGroup | None = None) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor. Backward sums the gradients.

    Args:
        input_: Tensor of any shape, equal on all ranks of the group.
        group: Tensor-parallel group or 1-D DeviceMesh. Default ``tp`` of the default
            ``ProcessGroups``.

    Returns:
        The same values on every rank, sharing memory with ``input_``. The gradient of ``input_`` is
        the all-reduced sum of the ranks' gradients, on every rank. Without a group, ``input_``.

    Raises:
        ValueError: This rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> copy_to_tensor_model_parallel_region(weight) is weight
        True
    """
    return _apply_across(_return_input, _all_reduce, input_, group)


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Leave a tensor-parallel region by summing the ranks' tensors. Backward is the identity.

    Args:
        input_: Tensor of any shape, this rank's summand.
        group: Tensor-parallel group or 1-D DeviceMesh. Default ``tp`` of the default
            ``ProcessGroups``.

    Returns:
        A new tensor of the same shape: the all-reduced sum, on every rank. Without a group,
        ``input_``.

    Raises:
        ValueError: This rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> reduce_from_tensor_model_parallel_region(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    return _apply_across(_all_reduce, _return_input, input_, group)


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Keep this rank's slice of the last dim. Backward all-gathers it.

    Args:
        input_: Tensor ``[..., h]``, equal on all ranks of the group.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks. Default ``tp`` of the default
            ``ProcessGroups``.

    Returns:
        A new tensor ``[..., h / n]``: slice r of the last dim on rank r. The forward pass sends
        nothing. Without a group, ``input_``.

    Raises:
        ValueError: n does not divide h, ``input_`` has no dims, or this rank is not a member of
            ``group``.

    Example:
        >>> import torch
        >>> scatter_to_tensor_model_parallel_region(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """
    return _apply_across(_take_slice, _gather, input_, group, dim=LAST_DIM)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Concatenate the ranks' tensors along the last dim. Backward keeps this rank's slice.

    Args:
        input_: Tensor ``[..., h / n]``, this rank's slice.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks. Default ``tp`` of the default
            ``ProcessGroups``.

    Returns:
        A new tensor ``[..., h]``, all-gathered in rank order, on every rank. Without a group,
        ``input_``.

    Raises:
        ValueError: ``input_`` has no dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> gather_from_tensor_model_parallel_region(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """
    return _apply_across(_gather, _take_slice, input_, group, dim=LAST_DIM)


def scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: AnyGroup | None = None,
    *,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Keep this rank's slice of dim 0, the sequence. Backward all-gathers it.

    Args:
        input_: Tensor ``[s, ...]``, equal on all ranks of the group.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks. Default ``tp`` of the default
            ``ProcessGroups``.
        input_split_sizes: The length of every rank's slice. The list must be equal on all ranks.
            Default s / n.

    Returns:
        A new tensor ``[s / n, ...]``: slice r of dim 0 on rank r. The forward pass sends nothing.
        Without a group, ``input_``.

    Raises:
        ValueError: n does not divide s, there are not n sizes or they do not sum to s, ``input_``
            has no dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> scatter_to_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    sizes = "input_split_sizes", input_split_sizes
    return _apply_across(_take_slice, _gather, input_, group, sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: AnyGroup | None = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along dim 0, the sequence.

    Args:
        input_: Tensor ``[s / n, ...]``, this rank's slice of the sequence.
        tensor_parallel_output_grad: True if each rank uses the result for another part of the
            computation: backward reduce-scatters (sums) the ranks' gradients. False if all ranks
            compute the same from it: backward keeps this rank's slice.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks. Default ``tp`` of the default
            ``ProcessGroups``.
        output_split_sizes: The length of every rank's slice, if the lengths differ. The list must
            be equal on all ranks. Each rank then sends as much as the longest slice.

    Returns:
        A new tensor ``[s, ...]``, all-gathered in rank order, on every rank. Without a group,
        ``input_``.

    Raises:
        ValueError: There are not n sizes, this rank's size is not that of ``input_``, ``input_``
            has no dims, or this rank is not a member of ``group``.
        TypeError: ``tensor_parallel_output_grad``, the second argument, is a group.

    Example:
        >>> import torch
        >>> gather_from_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    if not isinstance(tensor_parallel_output_grad, int):  # a group here would gather nothing
        raise TypeError(
            f"got a {type(tensor_parallel_output_grad).__name__} as tensor_parallel_output_grad: "
            "pass the group by keyword, gather_from_sequence_parallel_region(input_, group=...)"
        )
    sizes = "output_split_sizes", output_split_sizes
    reverse = _reduce_scatter if tensor_parallel_output_grad else _take_slice
    return _apply_across(_gather, reverse, input_, group, sizes=sizes)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: AnyGroup | None = None,
    *,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum the ranks' tensors and keep this rank's slice of dim 0. Backward all-gathers.

    Args:
        input_: Tensor ``[s, ...]``, this rank's summand.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks. Default ``tp`` of the default
            ``ProcessGroups``.
        input_split_sizes: The length of every rank's slice. The list must be equal on all ranks.
            Default s / n. If the lengths differ, each rank sends as much as for n of the longest.

    Returns:
        A new tensor ``[s / n, ...]``: slice r of the reduce-scattered sum on rank r. Without a
        group, ``input_``.

    Raises:
        ValueError: n does not divide s, there are not n sizes or they do not sum to s, ``input_``
            has no dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> reduce_scatter_to_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    sizes = "input_split_sizes", input_split_sizes
    return _apply_across(_reduce_scatter, _gather, input_, group, sizes=sizes)


def all_to_all(
    input_: Tensor,
    group: AnyGroup | None = None,
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
    received, sent = check_on_all_ranks(sizes, partial(_describe_exchange, input_), resolved)
    if received is None or is_checking_tensors():
        own = torch.tensor(sent, device=comm_device(resolved))
        theirs = torch.empty_like(own)
        dist.all_to_all_single(theirs, own, group=resolved)
        wanted, received = received, tuple(theirs.tolist())
        if wanted is not None:
            check_on_all_ranks(partial(_check_received, wanted, received), str, resolved)
    run = partial(_exchange_rows, received=received, sent=sent)
    return _apply_pair(run, partial(_exchange_rows, received=sent, sent=received), input_, resolved)


def _apply_across(
    run: Callable[..., Tensor],
    reverse: Callable[..., Tensor],
    input_: Tensor,
    group: AnyGroup | None,
    *,
    sizes: tuple[str, Sequence[int] | None] = ("", None),
    **options: Any,
) -> Tensor:
    """Apply a pair of collectives over a group of several ranks, with checked sizes if given."""
    resolved = group_of_several(group, "tp")
    if resolved is None:
        return input_
    if sizes[1] is not None:
        options["sizes"] = check_on_all_ranks(
            partial(_check_sizes, *sizes, resolved, input_), "the sizes {}".format, resolved
        )
    return _apply_pair(partial(run, **options), partial(reverse, **options), input_, resolved)


def _apply_pair(
    run: Collective, reverse: Collective, input_: Tensor, group: dist.ProcessGroup
) -> Tensor:
    output: Tensor = _Pair.apply(input_, group, run, reverse)  # type: ignore[no-untyped-call]
    return output


class _Pair(torch.autograd.Function):
    """A collective in the forward pass and its counterpart in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, group: dist.ProcessGroup, run: Collective, reverse: Collective
    ) -> Tensor:
        ctx.group, ctx.run, ctx.reverse = group, run, reverse
        return run(input_, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        # The collectives are linear: the gradient of the gradient is the collective itself.
        return _apply_pair(ctx.reverse, ctx.run, grad_output, ctx.group), None, None, None


def _return_input(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    return input_


def _all_reduce(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    check_tensors("all-reduce", input_, group)
    output = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, group=group)
    return output


def _take_slice(
    input_: Tensor, group: dist.ProcessGroup, dim: int = SEQUENCE_DIM, sizes: Sizes = None
) -> Tensor:
    if sizes is None:
        length = _divide_length(input_, group, dim)
        start = group.rank() * length
    else:
        length, start = sizes[group.rank()], sum(sizes[: group.rank()])
    # A copy, else the slice would keep the whole input alive.
    return input_.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _reduce_scatter(input_: Tensor, group: dist.ProcessGroup, sizes: Sizes = None) -> Tensor:
    if sizes is None:
        check_tensors("reduce-scatter", input_, group)
        length = longest = _divide_length(input_, group, SEQUENCE_DIM)
        sent = input_.contiguous()
    else:  # the collective needs equal parts
        length, longest = sizes[group.rank()], max(sizes)
        parts = torch.split(input_, list(sizes))
        sent = torch.cat([_pad_rows(part, longest) for part in parts])
        check_tensors("reduce-scatter", sent, group)
    output = input_.new_empty((longest, *input_.shape[1:]))
    reduce_scatter_single(output, sent, group)
    return output if length == longest else output[:length]


def _gather(
    input_: Tensor, group: dist.ProcessGroup, dim: int = SEQUENCE_DIM, sizes: Sizes = None
) -> Tensor:
    if sizes is None:
        check_tensors("all-gather", input_, group)
    _check_has_dims(input_)
    longest = input_.shape[0] if sizes is None else max(sizes)
    num_ranks = group.size()
    output = input_.new_empty((num_ranks * longest, *input_.shape[1:]))
    sent = input_.contiguous()
    if sizes is not None:
        sent = _pad_rows(sent, longest)
        check_tensors("all-gather", sent, group)
    all_gather_single(output, sent, group)
    if sizes is not None:
        parts = torch.split(output, longest) if longest else [output] * num_ranks
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    if dim % input_.dim() == 0:
        return output
    return torch.cat(output.chunk(num_ranks, dim=0), dim=dim)


def _exchange_rows(
    input_: Tensor, group: dist.ProcessGroup, *, received: tuple[int, ...], sent: tuple[int, ...]
) -> Tensor:
    output = input_.new_empty((sum(received), *input_.shape[1:]))
    dist.all_to_all_single(output, input_.contiguous(), list(received), list(sent), group=group)
    return output


def _divide_length(input_: Tensor, group: dist.ProcessGroup, dim: int) -> int:
    _check_has_dims(input_)
    num_ranks = group.size()
    length = input_.shape[dim]
    if length % num_ranks:
        raise ValueError(
            f"dim {dim % input_.dim()} of an input of shape {tuple(input_.shape)} has size "
            f"{length}, which the {num_ranks} ranks of the group cannot share equally: "
            f"pad it to a multiple of {num_ranks}"
        )
    return length // num_ranks


def _check_sizes(
    name: str, given: Sequence[int] | None, group: dist.ProcessGroup, input_: Tensor | None = None
) -> Sizes:
    """Return the rows of every rank as ints. ValueError unless there is one number for each.
    With an input, its rows must be the sum of ``input_split_sizes`` or this rank's output size.
    """
    if given is None:
        return None
    sizes = tuple(operator.index(size) for size in given)
    if len(sizes) != group.size() or min(sizes) < 0:
        raise ValueError(
            f"{name} must be {group.size()} numbers of 0 or more, one for each rank of the group, "
            f"got {list(sizes)}"
        )
    if input_ is None:
        return sizes
    _check_has_dims(input_)
    rows, own = input_.shape[0], sizes[group.rank()]
    if name == "input_split_sizes" and sum(sizes) != rows:
        raise ValueError(
            f"{name} {list(sizes)} sums to {sum(sizes)}, an input of shape {tuple(input_.shape)} "
            f"has {counted(rows, 'row')}"
        )
    if name == "output_split_sizes" and own != rows:
        raise ValueError(
            f"{name} {list(sizes)} has {counted(own, 'row')} for rank {group.rank()} of the group, "
            f"its input of shape {tuple(input_.shape)} has {rows}"
        )
    return sizes


def _pad_rows(part: Tensor, length: int) -> Tensor:
    """Return a tensor padded to a length with rows of zeros."""
    missing = length - part.shape[0]
    return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part


def _check_has_dims(input_: Tensor) -> None:
    """Raise ValueError for a tensor that has no rows."""
    if input_.dim() == 0:
        raise ValueError(
            "a tensor without dims can be neither split over nor gathered from the ranks of a "
            "group: add a dim, for example with input_.unsqueeze(0)"
        )


def _resolve_sizes(
    input_: Tensor,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> tuple[Sizes, tuple[int, ...]]:
    """Return the rows to receive, None if the ranks must exchange them, and the rows to send."""
    _check_has_dims(input_)
    sent = _check_sizes("input_split_sizes", input_split_sizes, group, input_)
    received = _check_sizes("output_split_sizes", output_split_sizes, group)
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


def _describe_exchange(input_: Tensor, sizes: tuple[Sizes, tuple[int, ...]]) -> str:
    """Return the properties of an exchange that must be equal on all ranks."""
    rows = f"rows {tuple(input_.shape[1:])} of {input_.dtype} on {input_.device.type}"
    return f"all-to-all of {rows}, output_split_sizes {'None' if sizes[0] is None else 'given'}"


def _check_received(wanted: tuple[int, ...], received: tuple[int, ...]) -> None:
    if wanted != received:
        raise ValueError(
            f"output_split_sizes is {list(wanted)}, but the ranks of the group send "
            f"{list(received)} rows: pass each rank's input_split_sizes for this rank"
        )
