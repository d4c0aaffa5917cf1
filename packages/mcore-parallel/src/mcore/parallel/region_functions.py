"""The collectives of tensor-parallel regions as autograd functions.

The forward pass of each is one collective, its backward pass another of these functions. Calling
that one through `apply` keeps it differentiable, so gradients of gradients work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.torch_compat import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "LAST_DIM",
    "SEQUENCE_DIM",
    "Copy",
    "Gather",
    "GatherToPartial",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "apply_function",
]

SEQUENCE_DIM = 0
LAST_DIM = -1


def apply_function(
    function: type[torch.autograd.Function], input_: Tensor, group: ProcessGroup, *dim: int
) -> Tensor:
    """Apply one of these functions to a tensor; `dim` only for `Scatter` and `Gather`."""
    output: Tensor = function.apply(input_, group, *dim)  # type: ignore[no-untyped-call]
    return output


class Copy(torch.autograd.Function):
    """Forward identity; backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input_

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return apply_function(Reduce, grad_output, ctx.group), None


class Reduce(torch.autograd.Function):
    """Forward all-reduce; backward identity."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(input_, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return apply_function(Copy, grad_output, ctx.group), None


class Scatter(torch.autograd.Function):
    """Forward this rank's slice of a dim; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_slice(input_, group, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return apply_function(Gather, grad_output, ctx.group, ctx.dim), None, None


class Gather(torch.autograd.Function):
    """Forward all-gather along a dim; backward this rank's slice."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(input_, group, dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return apply_function(Scatter, grad_output, ctx.group, ctx.dim), None, None


class GatherToPartial(torch.autograd.Function):
    """Forward all-gather of the sequence; backward reduce-scatter of partial gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(input_, group, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return apply_function(ReduceScatter, grad_output, ctx.group), None


class ReduceScatter(torch.autograd.Function):
    """Forward reduce-scatter of the sequence; backward all-gather."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(input_, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return apply_function(GatherToPartial, grad_output, ctx.group), None


def _all_reduce(input_: Tensor, group: ProcessGroup) -> Tensor:
    output = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, group=group)
    return output


def _own_slice(input_: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    length = _length_per_rank(input_, group, dim)
    own = input_.narrow(dim, group.rank() * length, length)
    return own.clone(memory_format=torch.contiguous_format)


def _all_gather(input_: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    _check_has_dims(input_)
    num_ranks = group.size()
    output = input_.new_empty((num_ranks * input_.shape[0], *input_.shape[1:]))
    all_gather_single(output, input_.contiguous(), group)
    if dim % input_.dim() == 0:
        return output
    return torch.cat(output.chunk(num_ranks, dim=0), dim=dim)


def _reduce_scatter(input_: Tensor, group: ProcessGroup) -> Tensor:
    length = _length_per_rank(input_, group, SEQUENCE_DIM)
    output = input_.new_empty((length, *input_.shape[1:]))
    reduce_scatter_single(output, input_.contiguous(), group)
    return output


def _check_has_dims(input_: Tensor) -> None:
    if input_.dim() == 0:
        raise ValueError(
            "a tensor without dims can be neither split over nor gathered from the ranks of a "
            "group: give it a dim, e.g. input_.unsqueeze(0)"
        )


def _length_per_rank(input_: Tensor, group: ProcessGroup, dim: int) -> int:
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
