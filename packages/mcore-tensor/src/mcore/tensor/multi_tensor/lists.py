"""Checks of the arguments of multi-tensor operations, before the operation writes a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore.tensor.dtensor import is_dtensor

TensorLists = Sequence[Sequence[Tensor]]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_LAYOUTS = frozenset({torch.strided})


def checked_tensor_lists(tensor_lists: TensorLists) -> list[list[Tensor]]:
    """Return the tensor lists as lists after checking that they hold plain float tensors."""
    if isinstance(tensor_lists, Tensor):
        raise TypeError("tensor_lists must be a list of lists of tensors, got a tensor")
    lists: list[list[Tensor]] = []
    previous: object = None
    are_fixed = type(tensor_lists) in (list, tuple)  # a generator may change a list between two
    for list_index, tensors in enumerate(tensor_lists):
        if isinstance(tensors, Tensor):
            raise TypeError(
                f"tensor_lists[{list_index}] must be a list of tensors, got a tensor: "
                "tensor_lists is a list of lists"
            )
        # In place, the same list comes twice. torch.compile compares no other type by identity.
        if are_fixed and type(tensors) is list and tensors is previous:
            lists.append(lists[-1])
            continue
        checked = list(tensors)
        check_tensors(checked, f"tensor_lists[{list_index}]")
        lists.append(checked)
        previous = tensors
    return lists


def check_tensors(tensors: list[Tensor], name: str) -> None:
    """Raise unless a list holds plain float tensors."""
    # The usual case first: sets need less time than a test of each tensor or a generator.
    if (
        _PLAIN_TYPES.issuperset(map(type, tensors))
        and _DTYPES.issuperset({tensor.dtype for tensor in tensors})
        and _LAYOUTS.issuperset({tensor.layout for tensor in tensors})
        and True not in {tensor.is_nested for tensor in tensors}
    ):
        return
    for index, tensor in enumerate(tensors):
        where = f"{name}[{index}]"
        if is_dtensor(tensor):
            raise TypeError(
                f"{where} is a DTensor: pass its local shard, to_local_if_dtensor(tensor), and "
                "reduce the result over the ranks"
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
            raise TypeError(f"{where} {kind}: pass a dense tensor, or its values()")
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{where} has dtype {tensor.dtype}: only float16, bfloat16, float32 and float64 "
                "are supported"
            )


def checked_noop_flag(noop_flag: Tensor | None) -> Tensor | None:
    """Return the flag after checking that it is an integer tensor with one element."""
    if noop_flag is None:
        return None
    if not isinstance(noop_flag, Tensor):
        raise TypeError(
            "noop_flag must be an integer tensor with one element or None, "
            f"got {type(noop_flag).__name__}"
        )
    dtype = noop_flag.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(
            f"noop_flag must have an integer dtype, got {dtype}: "
            "make it with torch.zeros(1, dtype=torch.int)"
        )
    if noop_flag.numel() != 1:
        raise ValueError(
            f"noop_flag must have exactly one element, got shape {tuple(noop_flag.shape)}"
        )
    return noop_flag


def check_data(heads: list[Tensor], noop_flag: Tensor | None, scale: object = None) -> None:
    """Raise if meta tensors are mixed with others. ``heads`` has one tensor of each kind."""
    num_meta = sum(tensor.is_meta for tensor in heads)
    if 0 < num_meta < len(heads):
        raise ValueError("tensor_lists mixes meta tensors, which have no data, with others")
    if num_meta and noop_flag is not None and not noop_flag.is_meta:
        raise ValueError(
            f"noop_flag is on {noop_flag.device}, but the tensors are on the meta device and have "
            "no data to check: pass None, or a flag on the meta device"
        )
    if heads and not num_meta and isinstance(scale, Tensor) and scale.is_meta:
        raise ValueError("scale is on the meta device and has no value, but the tensors have data")


def indices_by_kind(*columns: list[Tensor]) -> list[list[int]]:
    """Return the indices of items, in groups with the same devices and dtypes."""
    if not columns[0]:
        return []
    # The usual case first, without a tuple for each tensor.
    if all(
        len({tensor.dtype for tensor in column}) == 1
        and len({tensor.device for tensor in column}) == 1
        for column in columns
    ):
        return [list(range(len(columns[0])))]
    groups: dict[tuple[tuple[torch.device, torch.dtype], ...], list[int]] = {}
    for index, item in enumerate(zip(*columns, strict=True)):
        kind = tuple((tensor.device, tensor.dtype) for tensor in item)
        groups.setdefault(kind, []).append(index)
    return list(groups.values())
