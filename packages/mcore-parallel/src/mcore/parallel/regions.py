"""Autograd pairs of collectives at the borders of a tensor-parallel region.

Each function runs one collective in the forward pass and its counterpart in the backward pass, so
that a layer sharded over a tensor-parallel group gives the outputs and gradients of the unsharded
layer. With `n` ranks in the group, `r` this rank, and dim 0 the sequence:

| function                                     | forward               | backward              |
|----------------------------------------------|-----------------------|-----------------------|
| `copy_to_tensor_model_parallel_region`       | identity              | all-reduce (sum)      |
| `reduce_from_tensor_model_parallel_region`   | all-reduce (sum)      | identity              |
| `scatter_to_tensor_model_parallel_region`    | slice r of last dim   | all-gather, last dim  |
| `gather_from_tensor_model_parallel_region`   | all-gather, last dim  | slice r of last dim   |
| `scatter_to_sequence_parallel_region`        | slice r of dim 0      | all-gather, dim 0     |
| `gather_from_sequence_parallel_region` (*)   | all-gather, dim 0     | reduce-scatter, dim 0 |
|                                              |                       | or slice r of dim 0   |
| `reduce_scatter_to_sequence_parallel_region` | reduce-scatter, dim 0 | all-gather, dim 0     |

(*) The reduce-scatter sums what the ranks hold, which is right when the consumer of the gathered
tensor is itself tensor-parallel: each rank then has a part of the gradient. When all ranks run the
same computation on the gathered tensor (`tensor_parallel_output_grad=False`), each already holds
the whole gradient and takes its own slice.

What holds for all of them:

- The group is the argument, else `tp` of the default `ProcessGroups`, else none. Without a group,
  with a group of one rank, and where torch.distributed is not initialised, the input itself is
  returned and nothing is sent.
- Every rank of the group must call the function with tensors of the same shape and dtype, in the
  same order, and must run the backward pass alike. Unequal shapes are not detected.
- The input is never modified. Results of a collective and slices own their memory; only
  `copy_to_tensor_model_parallel_region` returns an alias of its input, on which autograd refuses
  in-place changes.
- Inputs and gradients may have any strides and any dtype that the group's backend reduces;
  gradients of gradients work, since every backward pass is one of these functions again.

The pairs are those of Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism" (arXiv:1909.08053), and Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (arXiv:2205.05198).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mcore.parallel.default_groups import get_default_process_groups
from mcore.parallel.groups import as_process_group
from mcore.parallel.region_functions import (
    LAST_DIM,
    SEQUENCE_DIM,
    Copy,
    Gather,
    GatherToPartial,
    Reduce,
    ReduceScatter,
    Scatter,
    apply_function,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mcore.parallel.groups import GroupLike

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Enter a tensor-parallel region with a replicated tensor; backward sums the gradients.

    Args:
        input_: Tensor of any shape, equal on all ranks of the group.
        group: Tensor-parallel group or 1-D DeviceMesh; default `tp` of the default `ProcessGroups`.

    Returns:
        The same values on every rank, sharing memory with `input_`. The gradient of `input_` is
        the all-reduced sum of the ranks' gradients, on every rank. Without a group, `input_`.

    Raises:
        ValueError: This rank is not a member of `group`.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> copy_to_tensor_model_parallel_region(weight) is weight
        True
    """
    resolved = _resolve_group(group)
    return input_ if resolved is None else apply_function(Copy, input_, resolved)


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Leave a tensor-parallel region by summing the ranks' tensors; backward is the identity.

    Args:
        input_: Tensor of any shape, this rank's summand.
        group: Tensor-parallel group or 1-D DeviceMesh; default `tp` of the default `ProcessGroups`.

    Returns:
        A new tensor of the same shape: the all-reduced sum, on every rank. Without a group,
        `input_`.

    Raises:
        ValueError: This rank is not a member of `group`.

    Example:
        >>> import torch
        >>> reduce_from_tensor_model_parallel_region(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    resolved = _resolve_group(group)
    return input_ if resolved is None else apply_function(Reduce, input_, resolved)


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Keep this rank's slice of the last dim; backward all-gathers it.

    Args:
        input_: Tensor `[..., h]`, equal on all ranks of the group.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default `tp` of the default
            `ProcessGroups`.

    Returns:
        A new tensor `[..., h / n]`: slice r of the last dim on rank r. The forward pass sends
        nothing. Without a group, `input_`.

    Raises:
        ValueError: n does not divide h, `input_` has no dims, or this rank is not a member of
            `group`.

    Example:
        >>> import torch
        >>> scatter_to_tensor_model_parallel_region(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """
    resolved = _resolve_group(group)
    return input_ if resolved is None else apply_function(Scatter, input_, resolved, LAST_DIM)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Concatenate the ranks' tensors along the last dim; backward takes this rank's slice.

    Args:
        input_: Tensor `[..., h / n]`, this rank's slice.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default `tp` of the default
            `ProcessGroups`.

    Returns:
        A new tensor `[..., h]`, all-gathered in rank order, on every rank. Without a group,
        `input_`.

    Raises:
        ValueError: `input_` has no dims, or this rank is not a member of `group`.

    Example:
        >>> import torch
        >>> gather_from_tensor_model_parallel_region(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """
    resolved = _resolve_group(group)
    return input_ if resolved is None else apply_function(Gather, input_, resolved, LAST_DIM)


def scatter_to_sequence_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Keep this rank's slice of dim 0, the sequence; backward all-gathers it.

    Args:
        input_: Tensor `[s, ...]`, equal on all ranks of the group.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default `tp` of the default
            `ProcessGroups`.

    Returns:
        A new tensor `[s / n, ...]`: slice r of dim 0 on rank r. The forward pass sends nothing.
        Without a group, `input_`.

    Raises:
        ValueError: n does not divide s, `input_` has no dims, or this rank is not a member of
            `group`.

    Example:
        >>> import torch
        >>> scatter_to_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    resolved = _resolve_group(group)
    return input_ if resolved is None else apply_function(Scatter, input_, resolved, SEQUENCE_DIM)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: GroupLike | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along dim 0, the sequence.

    Args:
        input_: Tensor `[s / n, ...]`, this rank's slice of the sequence.
        tensor_parallel_output_grad: True when each rank uses the result for another part of the
            computation, so that backward reduce-scatters the ranks' gradients (a sum). False when
            all ranks compute the same from it, so that backward takes this rank's own slice.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default `tp` of the default
            `ProcessGroups`.

    Returns:
        A new tensor `[s, ...]`, all-gathered in rank order, on every rank. Without a group,
        `input_`.

    Raises:
        ValueError: `input_` has no dims, or this rank is not a member of `group`.

    Example:
        >>> import torch
        >>> gather_from_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    resolved = _resolve_group(group)
    if resolved is None:
        return input_
    if tensor_parallel_output_grad:
        return apply_function(GatherToPartial, input_, resolved)
    return apply_function(Gather, input_, resolved, SEQUENCE_DIM)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: GroupLike | None = None
) -> Tensor:
    """Sum the ranks' tensors and keep this rank's slice of dim 0; backward all-gathers.

    Args:
        input_: Tensor `[s, ...]`, this rank's summand.
        group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks; default `tp` of the default
            `ProcessGroups`.

    Returns:
        A new tensor `[s / n, ...]`: slice r of the reduce-scattered sum on rank r. Without a
        group, `input_`.

    Raises:
        ValueError: n does not divide s, `input_` has no dims, or this rank is not a member of
            `group`.

    Example:
        >>> import torch
        >>> reduce_scatter_to_sequence_parallel_region(torch.zeros(8, 2)).shape
        torch.Size([8, 2])
    """
    resolved = _resolve_group(group)
    return input_ if resolved is None else apply_function(ReduceScatter, input_, resolved)


def _resolve_group(group: GroupLike | None) -> ProcessGroup | None:
    """Return the group to communicate over, or None when there is nobody else to talk to."""
    if group is None:
        defaults = get_default_process_groups()
        group = None if defaults is None else defaults.tp
    resolved = as_process_group(group)
    return None if resolved is None or resolved.size() == 1 else resolved
