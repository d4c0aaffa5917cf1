"""Attributes of parameters that describe their split over the tensor-parallel ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch

from mcore.parallel.groups import AnyGroup, get_pg_rank
from mcore.parallel.process_groups.default import group_or_default

logger = logging.getLogger(__name__)

_SET_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")
_OTHER_ATTRIBUTES = ("_tensor_parallel_mode", "_mcore_tp", "_tp_partition_dim", "_tp_duplicated")
_DIM_OF_MODE: dict[str, int | None] = {"column": 0, "row": 1, "duplicated": None}
_ABSENT = object()


def _read(param: object, name: str, default: Any = _ABSENT) -> Any:
    """Read an attribute of the parameter, else of its ``_orig_param``."""
    value = getattr(param, name, _ABSENT)
    if value is _ABSENT:
        value = getattr(getattr(param, "_orig_param", None), name, default)
    return value


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dimension along which a parameter is split over the tensor-parallel ranks.

    Reads the parameter's attributes only: no communication, and the same answer without
    torch.distributed. Attributes that a DTensor lacks are read from its ``_orig_param``.

    Args:
        param: Any object. The first of these marks that is set decides: ``_tensor_parallel_mode``
            (``"column"``, ``"row"`` or ``"duplicated"``), ``_tp_duplicated``, ``_mcore_tp`` with
            ``_tp_partition_dim``, ``tensor_model_parallel`` with ``partition_dim``. The last two
            need a dimension of 0 or more.

    Returns:
        0 for a column-parallel parameter (its rows are split), 1 for a row-parallel one, another
        dimension as set, or None when every rank holds the whole parameter.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.empty(4, 2))
        >>> get_mcore_tensor_parallel_partition_dim(weight) is None
        True
        >>> set_tensor_model_parallel_attributes(weight, True, 1)
        >>> get_mcore_tensor_parallel_partition_dim(weight)
        1
    """
    dim = None
    if _read(param, "_mcore_tp", False):
        dim = _read(param, "_tp_partition_dim", _read(param, "partition_dim", None))
    elif _read(param, "tensor_model_parallel", False):
        dim = _read(param, "partition_dim", None)
    dim = None if dim is None or dim < 0 else int(dim)
    mode = _read(param, "_tensor_parallel_mode", None)
    if not (isinstance(mode, str) and mode in _DIM_OF_MODE):
        if not _read(param, "_tp_duplicated", False):
            return dim
        mode = "duplicated"
    if mode == "duplicated" and dim is not None:
        logger.debug(
            "parameter marked both duplicated and split along dimension %d: treated as duplicated",
            dim,
        )
    return _DIM_OF_MODE[mode]


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return whether a parameter is split over the tensor-parallel ranks.

    Args:
        param: As for :func:`get_mcore_tensor_parallel_partition_dim`. No communication.

    Returns:
        True when it has a partition dimension.

    Example:
        >>> import torch
        >>> is_mcore_tensor_model_parallel(torch.nn.Parameter(torch.empty(2)))
        False
    """
    return get_mcore_tensor_parallel_partition_dim(param) is not None


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Return whether every tensor-parallel rank holds the whole parameter.

    Also True for a plain parameter that carries no tensor-parallel attribute at all.

    Args:
        param: As for :func:`get_mcore_tensor_parallel_partition_dim`. No communication.

    Returns:
        True when it has no partition dimension.

    Example:
        >>> import torch
        >>> is_mcore_tensor_parallel_duplicated(torch.nn.Parameter(torch.empty(2)))
        True
    """
    return get_mcore_tensor_parallel_partition_dim(param) is None


def param_is_not_tensor_parallel_duplicate(
    param: torch.Tensor, tp_group: AnyGroup | None = None, expert_tp_group: AnyGroup | None = None
) -> bool:
    """Return whether this rank counts a parameter in sums over tensor-parallel ranks.

    A parameter marked ``tensor_model_parallel``, or with a partition dimension, counts on every
    rank, since each holds another part. Any other parameter counts on rank 0 of its group only. No
    communication.

    Args:
        param: The parameter. If its ``allreduce`` is False it is an expert parameter.
        tp_group: The tensor-parallel group of dense parameters. None means the default
            ProcessGroups' ``tp``, else rank 0.
        expert_tp_group: The tensor-parallel group of expert parameters. None means the default
            ProcessGroups' ``expt_tp``, else rank 0.

    Returns:
        True when this rank counts the parameter. Without torch.distributed always True.

    Raises:
        ValueError: This rank is not a member of the group that decides.

    Example:
        >>> import torch
        >>> param_is_not_tensor_parallel_duplicate(torch.nn.Parameter(torch.empty(2)))
        True
    """
    is_expert = False
    # A parameter without attributes has no mark: quicker than to look for each of them.
    if type(param) is not torch.nn.Parameter or vars(param):
        if _read(param, "tensor_model_parallel", False) or is_mcore_tensor_model_parallel(param):
            return True
        is_expert = _read(param, "allreduce", True) is False
    group = expert_tp_group if is_expert else tp_group
    return get_pg_rank(group_or_default(group, "expt_tp" if is_expert else "tp")) == 0


def set_tensor_model_parallel_attributes(
    param: torch.Tensor, is_parallel: bool, dim: int, stride: int = 1
) -> None:
    """Mark a parameter as split over the tensor-parallel ranks or as not split.

    Sets ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` on the parameter. No
    communication.

    Args:
        param: The parameter, or any object that takes attributes.
        is_parallel: True when each rank holds another part.
        dim: The split dimension, 0 or more. Any int (usually -1) if ``is_parallel`` is False.
        stride: The number of interleaved blocks that each rank holds along ``dim``, 1 or more.

    Raises:
        ValueError: One of the attributes is set already, or ``dim`` or ``stride`` is invalid.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.empty(4, 2))
        >>> set_tensor_model_parallel_attributes(weight, True, 0)
        >>> weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride
        (True, 0, 1)
    """
    for name in _SET_ATTRIBUTES:
        if hasattr(param, name):
            raise ValueError(
                f"{name} is already {getattr(param, name)!r} on the parameter: mark it once, or "
                "delete the attribute first"
            )
    ndim = getattr(param, "ndim", None)
    if is_parallel and (dim < 0 or (ndim is not None and dim >= ndim)):
        raise ValueError(
            f"a parallel parameter needs a dim of 0 or more and below its {ndim} dimensions, "
            f"got {dim}"
        )
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}")
    for name, value in zip(_SET_ATTRIBUTES, (is_parallel, dim, stride), strict=True):
        setattr(param, name, value)


def copy_tensor_model_parallel_attributes(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy the marks of one parameter to another, such as its fp32 main copy.

    Copies ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``,
    ``_tensor_parallel_mode``, ``_mcore_tp``, ``_tp_partition_dim`` and ``_tp_duplicated`` if
    ``src`` has them, and overwrites them in ``dst``. No communication.

    Args:
        dst: The parameter to mark.
        src: The parameter to copy from.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.empty(4, 2))
        >>> set_tensor_model_parallel_attributes(weight, True, 0)
        >>> main = weight.detach().double()
        >>> copy_tensor_model_parallel_attributes(main, weight)
        >>> get_mcore_tensor_parallel_partition_dim(main)
        0
    """
    for name in _SET_ATTRIBUTES + _OTHER_ATTRIBUTES:
        value = _read(src, name)
        if value is not _ABSENT:
            setattr(dst, name, value)
