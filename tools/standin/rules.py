"""Which devices the tensors of one op may have: as on CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from standin.memory import is_device

# Ops that themselves move tensors between devices.
_ANY_DEVICE = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "set_", "_foreach_copy_"}
# Indices may be on the CPU: torch moves them to the indexed tensor's device, which waits.
_INDEXED = {"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index"}
# A tensor of the CPU without dimensions is a number for them. Others are found by their tag.
_NUMBERS = {"where", "masked_fill_", "masked_fill", "index_fill_", "fill_", "lerp", "lerp_"}


@dataclass(frozen=True)
class Op:
    """Facts on an op, read from its schema once.

    Attributes:
        name: Name without namespace and overload.
        full_name: Name with both.
        written: Names of the arguments that it changes.
        outs: Names of the arguments that it changes as results.
        generator: Name of the argument with a generator.
        is_random: Whether it draws random numbers.
        is_pointwise: Whether numbers of the CPU may be mixed in.
        arguments: Names of all arguments in order.
    """

    name: str
    full_name: str
    written: frozenset[str]
    outs: frozenset[str]
    generator: str | None
    is_random: bool
    is_pointwise: bool
    arguments: tuple[str, ...]
    types: tuple[str, ...]


_ops: dict[Any, Op] = {}


def describe_op(op: Any) -> Op:
    """Return the facts on an op."""
    found = _ops.get(op)
    if found is None:
        schema = op._schema
        name = schema.name.removeprefix("aten::")
        kinds = [str(a.type) for a in schema.arguments]
        generators = [
            a.name for a, kind in zip(schema.arguments, kinds, strict=False) if "Generator" in kind
        ]
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        found = _ops[op] = Op(
            name=name,
            full_name=str(op),
            written=frozenset(a.name for a in writes),
            outs=frozenset(a.name for a in schema.arguments if a.is_out),
            generator=generators[0] if generators else None,
            is_random=torch.Tag.nondeterministic_seeded in op.tags,
            is_pointwise=torch.Tag.pointwise in op.tags or name in _NUMBERS,
            arguments=tuple(a.name for a in schema.arguments),
            types=tuple(kinds),
        )
    return found


def check_devices(op: Op, named: Iterable[tuple[str, Any]]) -> torch.device | None:
    """Return the device of an op's tensors, None without any. Raises if they have several."""
    if op.name.startswith("_foreach_"):
        return _check_foreach(op, dict(named))
    found: torch.device | None = None
    strangers: list[torch.Tensor] = []
    for name, value in named:
        for tensor in (value,) if isinstance(value, torch.Tensor) else value:
            if not isinstance(tensor, torch.Tensor):
                continue
            if is_device(tensor):
                if found is not None and tensor.device != found:
                    raise _error(op, found, tensor.device)
                found = tensor.device
            elif not _may_be_on_host(op, name, tensor):
                strangers.append(tensor)
    if found is not None and strangers:
        raise _error(op, found, strangers[0].device)
    return found


def _check_foreach(op: Op, named: dict[str, Any]) -> torch.device | None:
    """Tensors of one place in the lists must share a device, tensors of two places need not."""
    lists = [value for value in named.values() if isinstance(value, (list, tuple))]
    lists = [value for value in lists if value and isinstance(value[0], torch.Tensor)]
    if op.name != "_foreach_copy_":
        for tensors in zip(*lists, strict=False):
            devices = {tensor.device for tensor in tensors}
            if len(devices) > 1:
                raise _error(op, *sorted(devices, key=str)[:2])
        single = [value for value in named.values() if isinstance(value, torch.Tensor)]
        for tensor in single:
            if tensor.device != lists[0][0].device:
                raise _error(op, lists[0][0].device, tensor.device)
    return next((t.device for tensors in lists for t in tensors if is_device(t)), None)


def _may_be_on_host(op: Op, name: str, tensor: torch.Tensor) -> bool:
    if op.name in _ANY_DEVICE or (name in op.written and op.name in _ANY_DEVICE):
        return True
    if op.name in _INDEXED and name == "indices":
        return True
    if tensor.dim() or name in op.written:
        return False
    return op.is_pointwise or (op.name in _INDEXED and name == "values")


def _error(op: Op, first: torch.device, second: torch.device) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}! (when checking arguments of {op.full_name})"
    )
