"""Casts between float32 and 16-bit floats, in nested containers and in modules.

The names of tensors that stay in float32 are stored on the owning module. If torch replaces the
tensors, the new ones get marks by these names.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch

from mcore.modules.traversal import iter_modules

_ModuleT = TypeVar("_ModuleT", bound=torch.nn.Module)
_TensorT = TypeVar("_TensorT", bound=torch.Tensor)
Cast = Callable[[torch.Tensor], torch.Tensor]

# Globals of this module are faster than attributes of torch, which counts with many leaves.
_Tensor = torch.Tensor
_is_traced = torch.compiler.is_dynamo_compiling
_TRACED_DEPTH = 16  # torch.compile cannot inline twice as many levels
_FP32_DTYPES = frozenset({torch.float32})
_HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_CASTABLE = _HALF_DTYPES | {torch.float32, torch.float64}
_NAMES = "_keep_in_fp32_names"


def _list_legacy_types(name: str) -> tuple[type, ...]:
    """Return the CPU and CUDA tensor types of old torch, as far as this build has them."""
    found = (getattr(namespace, name, None) for namespace in (torch, getattr(torch, "cuda", None)))
    return tuple(kind for kind in found if kind is not None)


# Documented names, for importers. This module decides by dtype, which covers all devices.
_FLOAT_TYPES = _list_legacy_types("FloatTensor")
_HALF_TYPES = _list_legacy_types("HalfTensor")
_BF16_TYPES = _list_legacy_types("BFloat16Tensor")


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of nested containers and return the same structure.

    Containers are list, tuple, NamedTuple, torch.return_types, deque, dict and other mappings that
    can be copied, also TensorDict, dataclass instances and SimpleNamespace, and subclasses of
    these. A default factory and a maximal length are kept, and constructors of subclasses are not
    called. A container without a changed leaf is returned itself, so a callee may fill it. Others
    are rebuilt, and the caller's objects are not changed. Everything else is a leaf: tensors,
    torch.Size, strings, numbers, None, sets, modules and other objects.

    A tensor that occurs twice is converted once and is one object in the result too.

    Args:
        val: A leaf or nested containers.
        conversion: Called with each leaf. Its result replaces the leaf.

    Returns:
        The converted structure, with the same container types.

    Raises:
        ValueError: A container contains itself.

    Example:
        >>> conversion_helper((1, [2, {"a": 3}]), lambda leaf: leaf * 10)
        (10, [20, {'a': 30}])
    """
    return _Conversion(conversion, None).each((val,))[0]


def fp32_to_float16(val: Any, float16_convertor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Cast every float32 tensor in nested containers, on any device.

    Other tensors (float64, float8, integers, complex), tensors with a true ``keep_in_fp32``
    attribute and other leaves are returned as the same objects. Casts are part of the autograd
    graph. Containers as for :func:`conversion_helper`.

    Args:
        val: A leaf or nested containers.
        float16_convertor: The cast, such as ``torch.Tensor.bfloat16``.

    Returns:
        The same structure with 16-bit tensors instead of float32 tensors.

    Raises:
        ValueError: A container contains itself.

    Example:
        >>> import torch
        >>> fp32_to_float16({"x": torch.ones(1), "n": 3}, torch.Tensor.half)
        {'x': tensor([1.], dtype=torch.float16), 'n': 3}
    """
    return _Conversion(float16_convertor, _FP32_DTYPES, "keep_in_fp32").each((val,))[0]


def float16_to_fp32(val: Any) -> Any:
    """Cast every float16 and bfloat16 tensor in nested containers to float32, on any device.

    Other leaves are returned as the same objects. Casts are part of the autograd graph. Containers
    as for :func:`conversion_helper`.

    Args:
        val: A leaf or nested containers.

    Returns:
        The same structure with float32 tensors instead of 16-bit tensors.

    Raises:
        ValueError: A container contains itself.

    Example:
        >>> import torch
        >>> float16_to_fp32([torch.ones(1, dtype=torch.bfloat16)])
        [tensor([1.])]
    """
    return _Conversion(torch.Tensor.float, _HALF_DTYPES).each((val,))[0]


class _Conversion:
    """A conversion of the tensors of some dtypes (None: of all leaves) in nested containers.

    Tensors with a true attribute ``exempting`` are not converted.
    """

    def __init__(
        self,
        conversion: Callable[[Any], Any],
        dtypes: frozenset[torch.dtype] | None,
        exempting: str = "",
    ) -> None:
        self._conversion = conversion
        self._dtypes = dtypes
        self._exempting = exempting
        # Not every torch.compile can trace id(). When traced, the keys are the tensors themselves,
        # and for containers their depth.
        self._is_traced = _is_traced()
        # Keeps each source alive: a freed id could be reused during the call.
        self._converted: dict[Any, tuple[torch.Tensor, Any]] = {}
        self._inside: set[int] = set()
        # Counted, since torch.compile cannot compare the items of containers by identity.
        self._changes = 0

    def each(self, vals: Iterable[Any]) -> list[Any]:
        """Convert all items of a container in one loop: a call for each doubles the cost."""
        conversion, converted = self._conversion, self._converted
        dtypes, exempting, is_traced = self._dtypes, self._exempting, self._is_traced
        results = []
        for val in vals:
            if not isinstance(val, _Tensor):
                results.append(self._convert_other(val))
                continue
            if dtypes is not None and (
                val.dtype not in dtypes or (exempting and getattr(val, exempting, False))
            ):
                results.append(val)
                continue
            key = val if is_traced else id(val)
            known = converted.get(key)
            if known is None:
                known = converted[key] = (val, conversion(val))
            results.append(known[1])
            if dtypes is not None or known[1] is not val:
                self._changes += 1
        return results

    def _convert_other(self, val: Any) -> Any:
        kind = _KINDS.get(type(val), _UNSEEN)
        if kind is _UNSEEN:
            kind = _find_kind(val)
        if kind is None:
            if self._dtypes is not None:
                return val
            converted = self._conversion(val)
            if converted is not val:
                self._changes += 1
            return converted
        parts, rebuild = kind
        # Checked here too: after a graph break this code runs in Python.
        is_traced = self._is_traced and _is_traced()
        key = len(self._inside) if is_traced else id(val)
        if key in self._inside or (is_traced and key == _TRACED_DEPTH):
            raise ValueError(
                f"a {type(val).__name__} contains itself"
                + (f", or is inside {key} others, too many to compile" if is_traced else "")
                + ". Pass nested containers without cycles"
            )
        self._inside.add(key)
        try:
            before = self._changes
            items = self.each(parts(val))
            return val if self._changes == before else rebuild(val, items)
        finally:
            self._inside.discard(key)


Parts = Callable[[Any], "Collection[Any]"]
Rebuild = Callable[[Any, list[Any]], Any]


def _keep_itself(val: Any) -> Any:
    return val


def _list_values(val: Mapping[Any, Any]) -> list[Any]:
    return [val[key] for key in val.keys()]  # noqa: SIM118 - a TensorDict iterates over its rows


def _rebuild_dict(val: Mapping[Any, Any], items: list[Any]) -> dict[Any, Any]:
    return dict(zip(val, items, strict=True))


def _rebuild_namespace(val: SimpleNamespace, items: list[Any]) -> SimpleNamespace:
    rebuilt = copy.copy(val)
    vars(rebuilt).update(zip(vars(val), items, strict=True))
    return rebuilt


def _rebuild_list_subclass(val: list[Any], items: list[Any]) -> list[Any]:
    rebuilt = copy.copy(val)
    list.__setitem__(rebuilt, slice(None), items)
    return rebuilt


def _rebuild_tuple_subclass(val: Any, items: list[Any]) -> Any:
    kind: Any = type(val)
    if hasattr(kind, "n_sequence_fields"):
        return kind(items)  # torch.return_types
    rebuilt = tuple.__new__(kind, items)
    vars_of = getattr(val, "__dict__", None)
    if vars_of:
        rebuilt.__dict__.update(vars_of)
    return rebuilt


def _rebuild_deque(val: deque[Any], items: list[Any]) -> deque[Any]:
    rebuilt = copy.copy(val)
    rebuilt.clear()
    rebuilt.extend(items)
    return rebuilt


def _rebuild_mapping(val: Any, items: list[Any]) -> Any:
    """Rebuild a mapping from a copy: a constructor would lose its attributes."""
    rebuilt = copy.copy(val) if isinstance(val, (dict, UserDict)) else val.copy()
    if getattr(val, "__dict__", None) is val:
        rebuilt.__dict__ = rebuilt
    for key, item in zip(val.keys(), items, strict=True):
        if rebuilt[key] is not item:
            rebuilt[key] = item
    return rebuilt


def _list_fields_only(val: Any) -> list[str]:
    return [f.name for f in fields(val) if f.name in vars(val) and f.name not in val]


def _rebuild_dataclass_mapping(val: Any, items: list[Any]) -> Any:
    """Rebuild a mapping with its items as dataclass fields too, as in transformers' ModelOutput.

    Its constructor is not called: it may validate, or require fields that are None.
    """
    kind: Any = type(val)
    rebuilt = kind.__new__(kind)
    attributes = vars(rebuilt)
    attributes.update(vars(val))
    set_item = OrderedDict.__setitem__ if isinstance(val, OrderedDict) else dict.__setitem__
    for key, item in zip(val, items, strict=False):
        set_item(rebuilt, key, item)
        if key in attributes:
            attributes[key] = item
    attributes.update(zip(_list_fields_only(val), items[len(val) :], strict=True))
    return rebuilt


def _list_field_names(val: Any) -> list[str]:
    return [field.name for field in fields(val) if hasattr(val, field.name)]


def _rebuild_dataclass(val: Any, items: list[Any]) -> Any:
    # Not dataclasses.replace: it fails on init=False fields and calls __post_init__.
    rebuilt = copy.copy(val)
    for name, item in zip(_list_field_names(val), items, strict=True):
        object.__setattr__(rebuilt, name, item)
    return rebuilt


class _Kind(NamedTuple):
    """Functions that return the parts of a container, and rebuild it from other parts."""

    parts: Parts
    rebuild: Rebuild


_UNSEEN: Any = object()
_MAPPING = _Kind(_list_values, _rebuild_mapping)
_DEQUE = _Kind(_keep_itself, _rebuild_deque)
_NAMESPACE = _Kind(lambda val: vars(val).values(), _rebuild_namespace)
_KINDS: dict[type, _Kind | None] = {
    **dict.fromkeys((type(None), bool, int, float, str, bytes, torch.Size, set, frozenset)),
    list: _Kind(_keep_itself, lambda _, items: items),
    tuple: _Kind(_keep_itself, lambda _, items: tuple(items)),
    # Not the method dict.values, which torch.compile cannot trace.
    dict: _Kind(lambda val: val.values(), _rebuild_dict),
    OrderedDict: _MAPPING,
    defaultdict: _MAPPING,
    MappingProxyType: _Kind(
        _list_values, lambda val, items: MappingProxyType(_rebuild_dict(val, items))
    ),
    deque: _DEQUE,
    SimpleNamespace: _NAMESPACE,
}


def _find_kind(val: Any) -> _Kind | None:
    if isinstance(val, (torch.Size, str, bytes, torch.nn.Module, type)):
        return None
    if isinstance(val, tuple):
        return _Kind(_keep_itself, _rebuild_tuple_subclass)
    if isinstance(val, list):
        return _Kind(_keep_itself, _rebuild_list_subclass)
    if isinstance(val, deque):
        return _DEQUE
    if isinstance(val, Mapping):
        if is_dataclass(val) and isinstance(val, dict):
            return _Kind(
                lambda val: [*val.values(), *(vars(val)[name] for name in _list_fields_only(val))],
                _rebuild_dataclass_mapping,
            )
        # A mapping without a shallow copy cannot be rebuilt.
        return _MAPPING if isinstance(val, dict) or hasattr(val, "copy") else None
    if is_dataclass(val):
        return _Kind(
            lambda val: [getattr(val, name) for name in _list_field_names(val)], _rebuild_dataclass
        )
    return _NAMESPACE if isinstance(val, SimpleNamespace) else None


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
    owners = [_find_owner(module, *name.rpartition(".")) for name in names]
    for owner, name in zip(owners, names, strict=True):
        _add_names(owner, name.rpartition(".")[2])
    stamp_fp32_marks(module)
    return module


def _find_owner(module: torch.nn.Module, path: str, dot: str, name: str) -> torch.nn.Module:
    with suppress(AttributeError):
        owner = module.get_submodule(path)
        if name in owner._parameters or name in owner._buffers:
            return owner
    raise ValueError(f"{type(module).__name__} has no parameter or buffer {path + dot + name!r}")


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
        is_downcast = id(tensor) in kept and tensor.dtype in _HALF_DTYPES
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
