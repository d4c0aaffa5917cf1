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

(*) Reduce-scatter where each rank uses the gathered tensor for another part of the computation, and
so has a part of the gradient; slice r where all ranks compute the same from it
(``tensor_parallel_output_grad=False``), and so have the whole gradient.

The three of the sequence also take sizes, one for each rank, where the ranks do not share it
equally: those of the gathered output, or of the input that is split.

- Without a group (the argument, else ``tp`` of the default ``ProcessGroups``), in a group of one
  rank and without torch.distributed the input itself is returned and nothing is sent.
- Every rank of the group must call the function with tensors of the same shape and dtype, in the
  same order, and must run the backward pass alike. With ``MCORE_DEBUG_COLLECTIVES=1`` in the
  environment small all-reduces before each collective find ranks that do not, or that refuse
  their arguments, and all of them raise. Otherwise gloo ends the process and NCCL hangs or mixes
  values; and where one rank refuses, the others wait for it until it ends, or for the timeout.
- The input is never modified. Only ``copy_to_tensor_model_parallel_region`` returns an alias of its
  input, on which autograd refuses in-place changes.
- Any strides and any dtype that the group's backend reduces work, and so do gradients of gradients.

The pairs are those of Shoeybi et al. (arXiv:1909.08053) and Korthikanti et al. (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.agreement import check_tensors, checked
from mcore.parallel.groups import GroupLike
from mcore.parallel.process_groups.default import group_of_several
from mcore.parallel.regions.split_sizes import (
    CheckSizes,
    Sizes,
    check_has_dims,
    filled_up,
    sizes_of_parts,
    sizes_of_whole,
)
from mcore.parallel.torch_compat import all_gather_single, reduce_scatter_single

SEQUENCE_DIM = 0
LAST_DIM = -1


def copy_to_tensor_model_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor; backward sums the gradients.

    Args:
        input_: Tensor of any shape, equal on all ranks of the group.
        group: Tensor-parallel group or 1-D DeviceMesh; default ``tp`` of the default
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
    return _across(Copy, input_, group)


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Leave a tensor-parallel region by summing the ranks' tensors; backward is the identity.

    Args:
        input_: Tensor of any shape, this rank's summand.
        group: Tensor-parallel group or 1-D DeviceMesh; default ``tp`` of the default
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
    return _across(Reduce, input_, group)


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Keep this rank's slice of the last dim; backward all-gathers it.

    Args:
        input_: Tensor ``[..., h]``, equal on all ranks of the group.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default ``tp`` of the default
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
    return _across(Scatter, input_, group, LAST_DIM)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Concatenate the ranks' tensors along the last dim; backward takes this rank's slice.

    Args:
        input_: Tensor ``[..., h / n]``, this rank's slice.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default ``tp`` of the default
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
    return _across(Gather, input_, group, LAST_DIM)


def scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: GroupLike | None = None,
    *,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Keep this rank's slice of dim 0, the sequence; backward all-gathers it.

    Args:
        input_: Tensor ``[s, ...]``, equal on all ranks of the group.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default ``tp`` of the default
            ``ProcessGroups``.
        input_split_sizes: The length of every rank's slice, equal on all ranks; default s / n.

    Returns:
        A new tensor ``[s / n, ...]``: slice r of dim 0 on rank r. The forward pass sends nothing.
        Without a group, ``input_``.

    Raises:
        ValueError: n does not divide s, the sizes are not n or do not sum to s, ``input_`` has no
            dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> scatter_to_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    sizes = sizes_of_whole, input_split_sizes
    return _across(Scatter, input_, group, SEQUENCE_DIM, sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: GroupLike | None = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along dim 0, the sequence.

    Args:
        input_: Tensor ``[s / n, ...]``, this rank's slice of the sequence.
        tensor_parallel_output_grad: True when each rank uses the result for another part of the
            computation, so that backward reduce-scatters the ranks' gradients (a sum). False when
            all ranks compute the same from it, so that backward takes this rank's own slice.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default ``tp`` of the default
            ``ProcessGroups``.
        output_split_sizes: The length of every rank's slice, equal on all ranks, where they differ.
            Each rank then sends as much as the longest.

    Returns:
        A new tensor ``[s, ...]``, all-gathered in rank order, on every rank. Without a group,
        ``input_``.

    Raises:
        ValueError: The sizes are not n or not those of ``input_`` on this rank, ``input_`` has no
            dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> gather_from_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    sizes = sizes_of_parts, output_split_sizes
    if tensor_parallel_output_grad:
        return _across(GatherToPartial, input_, group, sizes=sizes)
    return _across(Gather, input_, group, SEQUENCE_DIM, sizes=sizes)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: GroupLike | None = None,
    *,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sum the ranks' tensors and keep this rank's slice of dim 0; backward all-gathers.

    Args:
        input_: Tensor ``[s, ...]``, this rank's summand.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default ``tp`` of the default
            ``ProcessGroups``.
        input_split_sizes: The length of every rank's slice, equal on all ranks; default s / n.
            Where they differ each rank sends as much as for slices of the longest.

    Returns:
        A new tensor ``[s / n, ...]``: slice r of the reduce-scattered sum on rank r. Without a
        group, ``input_``.

    Raises:
        ValueError: n does not divide s, the sizes are not n or do not sum to s, ``input_`` has no
            dims, or this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> reduce_scatter_to_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    sizes = sizes_of_whole, input_split_sizes
    return _across(ReduceScatter, input_, group, sizes=sizes)


def _across(
    function: type[torch.autograd.Function],
    input_: Tensor,
    group: GroupLike | None,
    *more: Any,
    sizes: tuple[CheckSizes, Sequence[int] | None] | None = None,
) -> Tensor:
    """Apply a function over a group of several ranks, with checked sizes as its last argument."""
    resolved = group_of_several(group, "tp")
    if resolved is None:
        return input_
    check, given = sizes or (None, None)
    if check is not None and given is not None:
        agreed = checked(partial(check, given, input_, resolved), "the sizes {}".format, resolved)
        more = (*more, agreed)
    return apply_function(function, input_, resolved, *more)


def apply_function(
    function: type[torch.autograd.Function], input_: Tensor, group: dist.ProcessGroup, *more: Any
) -> Tensor:
    """Apply a differentiable collective to a tensor, with its further arguments."""
    output: Tensor = function.apply(input_, group, *more)  # type: ignore[no-untyped-call]
    return output


class Copy(torch.autograd.Function):
    """Forward identity; backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return input_

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return apply_function(Reduce, grad_output, ctx.group), None


class Reduce(torch.autograd.Function):
    """Forward all-reduce; backward identity."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(input_, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return apply_function(Copy, grad_output, ctx.group), None


class Scatter(torch.autograd.Function):
    """Forward this rank's slice of a dim; backward all-gather."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes = None
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _own_slice(input_, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        grad = apply_function(Gather, grad_output, ctx.group, ctx.dim, ctx.sizes)
        return grad, None, None, None


class Gather(torch.autograd.Function):
    """Forward all-gather along a dim; backward this rank's slice."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes = None
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _all_gather(input_, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        grad = apply_function(Scatter, grad_output, ctx.group, ctx.dim, ctx.sizes)
        return grad, None, None, None


class GatherToPartial(torch.autograd.Function):
    """Forward all-gather of the sequence; backward reduce-scatter of partial gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _all_gather(input_, group, SEQUENCE_DIM, sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return apply_function(ReduceScatter, grad_output, ctx.group, ctx.sizes), None, None


class ReduceScatter(torch.autograd.Function):
    """Forward reduce-scatter of the sequence; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: dist.ProcessGroup, sizes: Sizes = None) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _reduce_scatter(input_, group, sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return apply_function(GatherToPartial, grad_output, ctx.group, ctx.sizes), None, None


def _all_reduce(input_: Tensor, group: dist.ProcessGroup) -> Tensor:
    check_tensors("all-reduce", input_, group)
    output = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, group=group)
    return output


def _own_slice(input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    if sizes is None:
        length = _length_per_rank(input_, group, dim)
        start = group.rank() * length
    else:
        length, start = sizes[group.rank()], sum(sizes[: group.rank()])
    return input_.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _all_gather(input_: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    if sizes is None:
        check_tensors("all-gather", input_, group)
    check_has_dims(input_)
    longest = input_.shape[0] if sizes is None else max(sizes)
    num_ranks = group.size()
    output = input_.new_empty((num_ranks * longest, *input_.shape[1:]))
    sent = input_.contiguous()
    if sizes is not None:
        sent = filled_up(sent, longest)
        check_tensors("all-gather", sent, group)
    all_gather_single(output, sent, group)
    if sizes is not None:
        parts = torch.split(output, longest) if longest else [output] * num_ranks
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    if dim % input_.dim() == 0:
        return output
    return torch.cat(output.chunk(num_ranks, dim=0), dim=dim)


def _reduce_scatter(input_: Tensor, group: dist.ProcessGroup, sizes: Sizes) -> Tensor:
    if sizes is None:
        check_tensors("reduce-scatter", input_, group)
        length = longest = _length_per_rank(input_, group, SEQUENCE_DIM)
        sent = input_.contiguous()
    else:
        length, longest = sizes[group.rank()], max(sizes)
        sent = torch.cat([filled_up(part, longest) for part in torch.split(input_, list(sizes))])
        check_tensors("reduce-scatter", sent, group)
    output = input_.new_empty((longest, *input_.shape[1:]))
    reduce_scatter_single(output, sent, group)
    return output if length == longest else output[:length]


def _length_per_rank(input_: Tensor, group: dist.ProcessGroup, dim: int) -> int:
    check_has_dims(input_)
    num_ranks = group.size()
    length = input_.shape[dim]
    if length % num_ranks:
        raise ValueError(
            f"dim {dim % input_.dim()} of an input of shape {tuple(input_.shape)} has size "
            f"{length}, which the {num_ranks} ranks of the group cannot share equally: "
            f"pad it to a multiple of {num_ranks}"
        )
    return length // num_ranks
