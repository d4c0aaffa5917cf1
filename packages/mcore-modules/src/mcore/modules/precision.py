"""Casts between float32 and 16-bit floats of every tensor in nested data structures."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

# Names of this module are found faster than attributes of torch, once for each of many leaves.
_Tensor = torch.Tensor
_FP32_DTYPES = frozenset({torch.float32})
_HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})


def _legacy_types(name: str) -> tuple[type, ...]:
    """Return the CPU and CUDA tensor types of old torch, as far as this build has them."""
    found = (getattr(namespace, name, None) for namespace in (torch, getattr(torch, "cuda", None)))
    return tuple(kind for kind in found if kind is not None)


# For importers of the documented names; decisions here are by dtype, which covers all devices.
_FLOAT_TYPES = _legacy_types("FloatTensor")
_HALF_TYPES = _legacy_types("HalfTensor")
_BF16_TYPES = _legacy_types("BFloat16Tensor")


def conversion_helper(val: Any, conversion: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of nested containers and return the same structure.

    Containers are list, tuple, NamedTuple, torch.return_types, deque, dict and other mappings (a
    default factory and a maximal length are kept), dataclass instances and SimpleNamespace, and
    subclasses of these. They are rebuilt, so the callee may change the result and the caller's
    objects stay as they are. Everything else is a leaf: tensors, torch.Size, strings, numbers,
    None, sets, modules and other objects.

    A tensor that occurs twice is converted once and is one object in the result too.

    Args:
        val: A leaf or nested containers.
        conversion: Called with each leaf; its result takes the leaf's place.

    Returns:
        The converted structure; containers have the types they had.

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
        The same structure with 16-bit tensors in place of float32 tensors.

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
        The same structure with float32 tensors in place of 16-bit tensors.

    Raises:
        ValueError: A container contains itself.

    Example:
        >>> import torch
        >>> float16_to_fp32([torch.ones(1, dtype=torch.bfloat16)])
        [tensor([1.])]
    """
    return _Conversion(torch.Tensor.float, _HALF_DTYPES).each((val,))[0]


class _Conversion:
    """One conversion of nested containers, of tensors of some dtypes (None: of all leaves).

    Tensors on which the attribute ``exempting`` is true are left as well.
    """

    __slots__ = ("_conversion", "_converted", "_dtypes", "_exempting", "_inside")

    def __init__(
        self,
        conversion: Callable[[Any], Any],
        dtypes: frozenset[torch.dtype] | None,
        exempting: str = "",
    ) -> None:
        self._conversion = conversion
        self._dtypes = dtypes
        self._exempting = exempting
        # Keeps each source alive, so that its id cannot be used again while the call runs.
        self._converted: dict[int, tuple[torch.Tensor, Any]] = {}
        self._inside: set[int] = set()

    def each(self, vals: Iterable[Any]) -> list[Any]:
        """Convert values in one loop for all items of a container, since calls double the cost."""
        conversion, converted = self._conversion, self._converted
        dtypes, exempting = self._dtypes, self._exempting
        results = []
        for val in vals:
            if not isinstance(val, _Tensor):
                results.append(self._other(val))
                continue
            if dtypes is not None and (
                val.dtype not in dtypes or (exempting and getattr(val, exempting, False))
            ):
                results.append(val)
                continue
            key = id(val)
            known = converted.get(key)
            if known is None:
                known = converted[key] = (val, conversion(val))
            results.append(known[1])
        return results

    def _other(self, val: Any) -> Any:
        rebuild = _REBUILDERS.get(type(val), _UNSEEN)
        if rebuild is _UNSEEN:
            rebuild = _find_rebuilder(val)
        if rebuild is None:
            return self._conversion(val) if self._dtypes is None else val
        key = id(val)
        if key in self._inside:
            raise ValueError(
                f"a {type(val).__name__} contains itself; pass nested containers without cycles"
            )
        self._inside.add(key)
        try:
            return rebuild(val, self.each)
        finally:
            self._inside.discard(key)


Each = Callable[[Iterable[Any]], list[Any]]
Rebuilder = Callable[[Any, Each], Any]


def _rebuild_list(val: list[Any], each: Each) -> list[Any]:
    return each(val)


def _rebuild_tuple(val: tuple[Any, ...], each: Each) -> tuple[Any, ...]:
    return tuple(each(val))


def _rebuild_dict(val: Mapping[Any, Any], each: Each) -> dict[Any, Any]:
    return dict(zip(val, each(val.values()), strict=True))


def _rebuild_deque(val: deque[Any], each: Each) -> deque[Any]:
    return type(val)(each(val), val.maxlen)


def _rebuild_named_tuple(val: Any, each: Each) -> Any:
    return type(val)(*each(val))


def _rebuild_sequence_subclass(val: Any, each: Each) -> Any:
    # Also torch.return_types, whose constructor takes one sequence.
    return type(val)(each(val))


def _rebuild_mapping_subclass(val: Mapping[Any, Any], each: Each) -> Any:
    return type(val)(_rebuild_dict(val, each))  # type: ignore[call-arg]


def _rebuild_copied_mapping(val: Any, each: Each) -> Any:
    """Rebuild a mapping whose shallow copy keeps what a constructor would lose."""
    rebuilt = copy.copy(val)
    for key, item in _rebuild_dict(val, each).items():
        rebuilt[key] = item
    return rebuilt


def _rebuild_dataclass_mapping(val: Any, each: Each) -> Any:
    """Rebuild a mapping whose items are also its dataclass fields, as in transformers' ModelOutput.

    Its constructor is not called, since it may validate or require fields that are None.
    """
    kind: Any = type(val)
    rebuilt = kind.__new__(kind)
    attributes = vars(rebuilt)
    attributes.update(vars(val))
    set_item = OrderedDict.__setitem__ if isinstance(val, OrderedDict) else dict.__setitem__
    for key, item in _rebuild_dict(val, each).items():
        set_item(rebuilt, key, item)
        if key in attributes:
            attributes[key] = item
    only_fields = [f.name for f in fields(val) if f.name in attributes and f.name not in val]
    attributes.update(zip(only_fields, each([attributes[n] for n in only_fields]), strict=True))
    return rebuilt


def _rebuild_dataclass(val: Any, each: Each) -> Any:
    # Not dataclasses.replace: it fails on init=False fields and runs __post_init__ again.
    rebuilt = copy.copy(val)
    names = [field.name for field in fields(val) if hasattr(val, field.name)]
    for name, item in zip(names, each([getattr(val, name) for name in names]), strict=True):
        object.__setattr__(rebuilt, name, item)
    return rebuilt


def _rebuild_namespace(val: SimpleNamespace, each: Each) -> SimpleNamespace:
    return type(val)(**_rebuild_dict(vars(val), each))


_UNSEEN: Any = object()
_REBUILDERS: dict[type, Rebuilder | None] = {
    **dict.fromkeys((type(None), bool, int, float, str, bytes, torch.Size, set, frozenset)),
    list: _rebuild_list,
    tuple: _rebuild_tuple,
    dict: _rebuild_dict,
    OrderedDict: _rebuild_mapping_subclass,
    defaultdict: _rebuild_copied_mapping,
    MappingProxyType: _rebuild_mapping_subclass,
    deque: _rebuild_deque,
    SimpleNamespace: _rebuild_namespace,
}


def _find_rebuilder(val: Any) -> Rebuilder | None:
    if isinstance(val, (torch.Size, str, bytes, torch.nn.Module, type)):
        return None
    if isinstance(val, (list, tuple)):
        is_named_tuple = isinstance(val, tuple) and hasattr(val, "_fields")
        return _rebuild_named_tuple if is_named_tuple else _rebuild_sequence_subclass
    if isinstance(val, deque):
        return _rebuild_deque
    if is_dataclass(val):
        return _rebuild_dataclass_mapping if isinstance(val, dict) else _rebuild_dataclass
    if isinstance(val, (defaultdict, UserDict)):
        return _rebuild_copied_mapping
    if isinstance(val, Mapping):
        return _rebuild_mapping_subclass
    return _rebuild_namespace if isinstance(val, SimpleNamespace) else None
