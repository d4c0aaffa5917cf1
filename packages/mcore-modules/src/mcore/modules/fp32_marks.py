"""Tensors that stay in float32 when their module is cast to another floating dtype.

Their names are stored on the owning module. If torch replaces the tensors, the new ones get marks
by these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from mcore.modules.traversal import iter_modules

_ModuleT = TypeVar("_ModuleT", bound=torch.nn.Module)
_TensorT = TypeVar("_TensorT", bound=torch.Tensor)
Cast = Callable[[torch.Tensor], torch.Tensor]

_NAMES = "_keep_in_fp32_names"
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_HALF = frozenset({torch.float16, torch.bfloat16})


def mark_keep_in_fp32(tensor: _TensorT) -> _TensorT:
    """Mark a tensor to stay in float32 when its module or container is cast to 16 bits.

    The mark is an attribute of this tensor object. For a parameter or buffer it becomes permanent
    when a Float16Module wraps its module. Use :func:`keep_in_fp32` to make it permanent at once.

    Args:
        tensor: A parameter, buffer or input. Its dtype is not changed.

    Returns:
        The same tensor, with ``keep_in_fp32`` true.

    Example:
        >>> import torch
        >>> mark_keep_in_fp32(torch.ones(1)).keep_in_fp32
        True
    """
    tensor.keep_in_fp32 = True  # type: ignore[attr-defined]
    return tensor


def keep_in_fp32(module: _ModuleT, *names: str) -> _ModuleT:
    """Mark parameters and buffers of a module to stay in float32 permanently.

    The names are stored on the modules that own the tensors. They survive moves, copies, pickling
    and loading, all of which may replace the tensors.

    Args:
        module: The module.
        names: Names of parameters or buffers. Names with dots are in submodules.

    Returns:
        ``module``.

    Raises:
        ValueError: There is no such parameter or buffer. No name is stored then.

    Example:
        >>> import torch
        >>> from mcore.modules import convert_module_to_dtype_except_fp32_marked
        >>> linear = keep_in_fp32(torch.nn.Linear(2, 1), "bias")
        >>> convert_module_to_dtype_except_fp32_marked(linear, torch.bfloat16).bias.dtype
        torch.float32
    """
    found = [(name, *_find_owner(module, name)) for name in names]
    for name, owner, _ in found:
        if owner is None:
            raise ValueError(f"{type(module).__name__} has no parameter or buffer {name!r}")
    for _, owner, last_name in found:
        if owner is not None:
            _add_names(owner, last_name)
    stamp_fp32_marks(module)
    return module


def _find_owner(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module | None, str]:
    path, _, last_name = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None, last_name
    has = last_name in owner._parameters or last_name in owner._buffers
    return (owner if has else None), last_name


def convert_module_to_dtype_except_fp32_marked(module: _ModuleT, dtype: torch.dtype) -> _ModuleT:
    """Cast a module's parameters and buffers in place, except those marked to stay in float32.

    Parameters keep their identity and ties. Only float16, bfloat16, float32 and float64 are cast,
    not float8 storage, integers and complex tensors. Gradients are cast with their parameters.

    Args:
        module: The module.
        dtype: A floating dtype.

    Returns:
        ``module``.

    Raises:
        ValueError: ``dtype`` is not a floating dtype.

    Example:
        >>> import torch
        >>> convert_module_to_dtype_except_fp32_marked(torch.nn.Linear(2, 1), torch.half).bias.dtype
        torch.float16
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}. Pass a floating torch.dtype")
    record_fp32_marks(module)
    kept = _collect_kept_ids(module)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype in _CASTABLE and id(tensor) not in kept
        return tensor.to(dtype) if is_cast else tensor

    module._apply(cast)  # type: ignore[no-untyped-call]
    stamp_fp32_marks(module)
    return module


def restore_precision(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast replaced tensors: marked tensors to float32, other floating tensors to ``dtype``."""
    stamp_fp32_marks(module)
    kept = _collect_kept_ids(module)

    # Marked tensors first: the conversion below leaves them as they are.
    def restore(tensor: torch.Tensor) -> torch.Tensor:
        is_downcast = id(tensor) in kept and tensor.dtype in _HALF
        return tensor.float() if is_downcast else tensor

    module._apply(restore)  # type: ignore[no-untyped-call]
    convert_module_to_dtype_except_fp32_marked(module, dtype)


def keeping_dtype_of_marked(module: torch.nn.Module, fn: Cast) -> Cast:
    """Wrap a function for ``_apply``: marked and float8 tensors change the device only."""
    kept = _collect_kept_ids(module)

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        applied = fn(tensor)
        # A float8 tensor with its scales elsewhere has no meaning in another dtype.
        is_small_float = tensor.is_floating_point() and tensor.dtype not in _CASTABLE
        if applied.dtype != tensor.dtype and (id(tensor) in kept or is_small_float):
            return tensor.to(applied.device)
        return applied

    return apply


def record_fp32_marks(module: torch.nn.Module) -> None:
    """Store the names of marked tensors on their modules, also below ``module``."""
    for owner in iter_modules(module):
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if getattr(tensor, "keep_in_fp32", False):
                    _add_names(owner, name)


def stamp_fp32_marks(module: torch.nn.Module) -> None:
    """Mark tensors by the stored names, after they may have been replaced."""
    for tensor in _iterate_kept_tensors(module):
        mark_keep_in_fp32(tensor)


def _add_names(owner: torch.nn.Module, name: str) -> None:
    owner.__dict__[_NAMES] = owner.__dict__.get(_NAMES, frozenset()) | {name}


def _iterate_kept_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for owner in iter_modules(module):
        for name in owner.__dict__.get(_NAMES, ()):
            tensor = owner._parameters.get(name, owner._buffers.get(name))
            if tensor is not None:
                yield tensor


def _collect_kept_ids(module: torch.nn.Module) -> set[int]:
    kept: set[int] = set()
    for tensor in _iterate_kept_tensors(module):
        kept.add(id(tensor))
        # `_apply` passes gradients too. Reading .grad of a tensor that is no leaf would warn.
        if tensor.is_leaf and tensor.grad is not None:
            kept.add(id(tensor.grad))
    return kept
