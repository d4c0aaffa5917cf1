"""What CUDA refuses of one op, and the kernels and host waits that the op has there."""

from __future__ import annotations

import functools
from typing import Any

import torch

from standin.memory import is_device

# Ops that themselves move tensors between devices.
_ANY_DEVICE = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "set_", "_foreach_copy_"}
# Indices may be on the CPU: torch moves them to the indexed tensor's device, which waits.
_INDEXED = {"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index"}
# A tensor of the CPU without dimensions is a number for them. Others are found by their tag.
_NUMBERS = {"where", "masked_fill_", "masked_fill", "index_fill_", "fill_", "lerp", "lerp_"}
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "bincount", "is_set_to",
}  # fmt: skip
# Kernels of the CPU that CUDA does not have: ops, formats, the message, and its source.
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_ABSENT: list[tuple[set[str], set[torch.dtype], str]] = [
    # https://github.com/pytorch/pytorch/issues/127176, and AmpKernels.cu for 8 bits
    ({_UNSCALE}, {torch.bfloat16} | _FLOAT8, f"{_UNSCALE}cuda"),
    # https://github.com/pytorch/pytorch/issues/44428, integers: cuBLAS has no such product
    ({"mm", "addmm", "addmv", "mv"}, _INTEGERS, "addmm_cuda"),
    # https://github.com/pytorch/pytorch/issues/11936
    ({"bmm", "baddbmm"}, _INTEGERS, "baddbmm_cuda"),
    # https://github.com/pytorch/pytorch/issues/158313 and intel/torch-xpu-ops issue 1939
    ({"add", "sub"}, _FLOAT8, "ufunc_add_CUDA"),
    ({"mul"}, _FLOAT8, "mul_cuda"),
    ({"div"}, _FLOAT8, "div_true_cuda"),
]


class Op:
    """Facts on an op, from its schema: names of its arguments, of those it changes, of results."""

    def __init__(self, op: Any) -> None:
        arguments = op._schema.arguments
        self.name = op._schema.name.removeprefix("aten::")
        self.full_name = str(op)
        self.types = {a.name: str(a.type) for a in arguments}
        self.written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        self.outs = {a.name for a in arguments if a.is_out}
        self.is_pointwise = torch.Tag.pointwise in op.tags or self.name in _NUMBERS
        is_seeded = torch.Tag.nondeterministic_seeded in op.tags
        self.is_random = is_seeded or "generator" in self.types


describe_op = functools.cache(Op)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


def find_device(op: Op, named: dict[str, Any]) -> torch.device | None:
    """Return the device of an op's tensors, None without any. Raises if they have several."""
    tensors = {name: tensors_in(value) for name, value in named.items()}
    if op.name in _ANY_DEVICE:
        rows: list[Any] = []
    elif op.name.startswith("_foreach_"):  # tensors of two places need not share a device
        lists = [t for name, t in tensors.items() if t and t[0] is not named[name]]
        single = [t for name, t in tensors.items() if t and t[0] is named[name]]
        rows = [*zip(*lists, strict=False), *([*one, lists[0][0]] for one in single)]
    else:
        rows = [[one for name, found in tensors.items() for one in found
                 if is_device(one) or not _may_be_on_host(op, name, one)]]  # fmt: skip
    for row in rows:
        devices = sorted({str(tensor.device) for tensor in row})
        if len(devices) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{devices[0]} and {devices[1]}! (when checking arguments of {op.full_name})"
            )
    return next((one.device for found in tensors.values() for one in found if is_device(one)), None)


def _may_be_on_host(op: Op, name: str, tensor: torch.Tensor) -> bool:
    if op.name in _INDEXED and name == "indices":
        return True
    is_number = tensor.dim() == 0 and name not in op.written
    return is_number and (op.is_pointwise or (op.name in _INDEXED and name == "values"))


def refuse_absent(op: Op, named: dict[str, Any]) -> None:
    """Raise if CUDA has no kernel for an op and its formats."""
    dtypes = {tensor.dtype for value in named.values() for tensor in tensors_in(value)}
    for names, formats, kernel in _ABSENT:
        for dtype in dtypes & formats if op.name in names else ():
            title = str(dtype).removeprefix("torch.")
            raise NotImplementedError(f"\"{kernel}\" not implemented for '{title}'")


def count_kernels(op: Op, named: dict[str, Any]) -> int:
    """Return 1, or for lists that CUDA's kernels cannot process together, one for each tensor."""
    if not op.name.startswith("_foreach_"):
        return 1
    lists = [tensors_in(value) for value in named.values() if isinstance(value, (list, tuple))]
    lists = [tensors for tensors in lists if tensors]
    groups = lists if op.name == "_foreach_copy_" else [[t for one in lists for t in one]]
    has_kernel = all(
        len({(t.dtype, t.device) for t in group}) == 1 and is_device(group[0]) for group in groups
    )
    same = all(len({(t.shape, t.stride()) for t in row}) == 1 for row in zip(*lists, strict=False))
    return 1 if has_kernel and same else len(lists[0])


def does_wait(op: Op, named: dict[str, Any]) -> bool:
    """Return whether the host waits: for a number of elements, or as it moves an index."""
    if op.name == "repeat_interleave":
        return named.get("output_size") is None
    if op.name not in _INDEXED:
        return op.name in _WAITS
    indices = tensors_in(named["indices"])
    masks = [tensor for tensor in indices if tensor.dtype in (torch.bool, torch.uint8)]
    if "values" in named and named["values"].numel() == 1 and len(masks) == len(indices):
        masks = []  # becomes masked_fill_
    return bool(masks) or not all(map(is_device, indices))
