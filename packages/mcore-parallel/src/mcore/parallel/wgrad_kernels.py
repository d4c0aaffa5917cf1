"""One weight-gradient GEMM that adds to an accumulator of another dtype without losing bits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["accumulate_wgrad", "check_main_grad"]

_FUSED_EXTENSION = "fused_weight_gradient_mlp_cuda"
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MAIN_GRAD_DTYPES = (*_HALF_DTYPES, torch.float32, torch.float64)
_CAST_BYTES = 128 << 20  # of converted rows at a time


def check_main_grad(main_grad: object) -> torch.Tensor:
    """Return a weight's accumulator if gradients can be added to it.

    Raises:
        RuntimeError: There is none, or its dtype is not float16, bfloat16, float32 or float64.

    Example:
        >>> check_main_grad(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    if not isinstance(main_grad, torch.Tensor):
        raise RuntimeError(
            f"the weight's main_grad is {main_grad!r}; allocate it, with the shape of the weight, "
            "before weight gradients are deferred"
        )
    if main_grad.dtype not in _MAIN_GRAD_DTYPES:
        raise RuntimeError(
            f"Unsupported gradient type {main_grad.dtype} of main_grad; use one of "
            f"{', '.join(str(dtype) for dtype in _MAIN_GRAD_DTYPES)}"
        )
    return main_grad


def accumulate_wgrad(
    main_grad: torch.Tensor, grad_output: torch.Tensor, input_: torch.Tensor, *, use_fused: bool
) -> None:
    """Add ``grad_output^T @ input_`` to ``main_grad`` in place.

    A product of half-precision inputs is summed in the precision of ``main_grad``: it is never
    rounded to half precision on the way. No communication.

    Args:
        main_grad: ``[v, h]``, of a dtype that :func:`check_main_grad` takes.
        grad_output: ``[n, v]``.
        input_: ``[n, h]``.
        use_fused: Take the CUDA extension ``fused_weight_gradient_mlp_cuda`` where it is installed
            and the tensors are on a CUDA device.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> total = torch.zeros(1, 2)
        >>> ones = torch.ones(3, 1, dtype=torch.bfloat16)
        >>> accumulate_wgrad(total, ones, torch.ones(3, 2, dtype=torch.bfloat16), use_fused=False)
        >>> total
        tensor([[3., 3.]])
    """
    expected = (grad_output.shape[1], input_.shape[1])
    if tuple(main_grad.shape) != expected or grad_output.shape[0] != input_.shape[0]:
        raise ValueError(
            f"main_grad of shape {tuple(main_grad.shape)} cannot take the product of a gradient "
            f"{tuple(grad_output.shape)} and an input {tuple(input_.shape)}: it would have shape "
            f"{expected}"
        )
    fused = _fused_gemm(main_grad, grad_output, input_) if use_fused else None
    if fused is not None:
        fused(input_, grad_output, main_grad)
    elif main_grad.dtype == grad_output.dtype == input_.dtype:
        main_grad.addmm_(grad_output.t(), input_)
    elif _mixed_gemm_exists(main_grad, grad_output, input_):
        torch.addmm(main_grad, grad_output.t(), input_, out_dtype=torch.float32, out=main_grad)
    else:
        _accumulate_converted(main_grad, grad_output, input_)


def _fused_gemm(*tensors: torch.Tensor) -> Callable[..., Any] | None:
    """Return the extension's function for these tensors, or None where it cannot serve."""
    main_grad, grad_output, input_ = tensors
    if not all(tensor.is_cuda for tensor in tensors) or grad_output.dtype != input_.dtype:
        return None
    if main_grad.dtype == torch.float64:
        return None
    try:
        extension = importlib.import_module(_FUSED_EXTENSION)
    except ImportError:
        return None
    single = main_grad.dtype == torch.float32
    name = "wgrad_gemm_accum_fp32" if single else "wgrad_gemm_accum_fp16"
    gemm: Callable[..., Any] = getattr(extension, name)
    return gemm


def _mixed_gemm_exists(
    main_grad: torch.Tensor, grad_output: torch.Tensor, input_: torch.Tensor
) -> bool:
    """Say whether the device multiplies half-precision matrices into a float32 sum."""
    return (
        main_grad.is_cuda
        and main_grad.dtype == torch.float32
        and grad_output.dtype == input_.dtype
        and input_.dtype in _HALF_DTYPES
    )


def _accumulate_converted(
    main_grad: torch.Tensor, grad_output: torch.Tensor, input_: torch.Tensor
) -> None:
    """Convert the inputs, a bounded number of rows at a time, and add their product."""
    dtype = main_grad.dtype
    row_bytes = max(1, sum(main_grad.shape) * dtype.itemsize)
    length = max(1, _CAST_BYTES // row_bytes)
    for start in range(0, input_.shape[0], length):
        rows = slice(start, start + length)
        main_grad.addmm_(grad_output[rows].to(dtype).t(), input_[rows].to(dtype))
