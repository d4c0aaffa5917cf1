"""The accumulating GEMM: every choice of dtypes against float64."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore.parallel import wgrad
from mcore.parallel.wgrad import accumulate_wgrad, check_main_grad

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)


def reference(main_grad: torch.Tensor, grad: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
    return main_grad.double() + grad.double().t() @ input_.double()


@pytest.mark.parametrize(("main", "inputs"), list(product(FLOATS, FLOATS)), ids=str)
def test_the_product_is_added_in_the_precision_of_main_grad(main, inputs) -> None:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(33, 5, generator=generator).to(inputs)
    input_ = torch.randn(33, 3, generator=generator).to(inputs)
    main_grad = torch.randn(5, 3, generator=generator).to(main)
    expected = reference(main_grad, grad, input_)
    accumulate_wgrad(main_grad, grad, input_, use_fused=False)
    # one rounding of the sum for each of 33 products of up to 9 is the worst case
    bound = 33 * 9 * torch.finfo(main).eps
    assert (main_grad.double() - expected).abs().max() <= bound
    assert main_grad.dtype == main


def test_half_inputs_do_not_pass_through_a_half_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(512, 16, generator=generator).bfloat16()
    input_ = torch.randn(512, 16, generator=generator).bfloat16()
    main_grad = torch.zeros(16, 16)
    accumulate_wgrad(main_grad, grad, input_, use_fused=False)
    error = (main_grad.double() - reference(torch.zeros(16, 16), grad, input_)).abs().max()
    rounded = torch.zeros(16, 16).add_(grad.t() @ input_)
    rounded_error = (rounded - reference(torch.zeros(16, 16), grad, input_)).abs().max()
    assert error < 1e-4
    assert rounded_error > 0.05  # what a half-precision product would lose


class ConvertedRows(TorchDispatchMode):
    """Records how many rows are converted at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.counts.append(len(result))
        return result


@pytest.mark.parametrize(
    ("chunk_bytes", "most_rows"),
    [(1, 1), (4 * 7 * 2, 2), (4 * 7 * 5 + 1, 5), (4 * 7 * 23, 23), (4 * 7 * 24, 23)],
)
def test_conversion_in_chunks_covers_every_row(
    monkeypatch, chunk_bytes: int, most_rows: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(23, 4, generator=generator).half()
    input_ = torch.randn(23, 3, generator=generator).bfloat16()
    expected = reference(torch.zeros(4, 3), grad, input_)
    monkeypatch.setattr(wgrad, "_CAST_BYTES", chunk_bytes)
    main_grad = torch.zeros(4, 3)
    with ConvertedRows() as rows:
        accumulate_wgrad(main_grad, grad, input_, use_fused=False)
    torch.testing.assert_close(main_grad.double(), expected, rtol=0, atol=1e-5)
    assert max(rows.counts) == most_rows
    assert sum(rows.counts) == 2 * 23


def test_no_rows_add_nothing() -> None:
    main_grad = torch.ones(4, 3)
    accumulate_wgrad(main_grad, torch.ones(0, 4).half(), torch.ones(0, 3).half(), use_fused=False)
    assert torch.equal(main_grad, torch.ones(4, 3))


@pytest.mark.parametrize("shapes", [(4, 3, 8, 7), (3, 4, 8, 8)])
def test_shapes_that_do_not_fit_are_named(shapes: tuple[int, int, int, int]) -> None:
    rows, columns, of_grad, of_input = shapes
    with pytest.raises(ValueError, match=rf"main_grad of shape \({rows}, {columns}\)"):
        accumulate_wgrad(
            torch.zeros(rows, columns),
            torch.ones(of_grad, 4),
            torch.ones(of_input, 3),
            use_fused=False,
        )


def test_main_grads_that_cannot_be_added_to() -> None:
    with pytest.raises(RuntimeError, match="main_grad is None"):
        check_main_grad(None)
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(RuntimeError, match=f"Unsupported gradient type {dtype}"):
            check_main_grad(torch.zeros(2, dtype=dtype))


class OnCuda(torch.Tensor):
    """A tensor in host memory that claims to be on a CUDA device."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (torch.float32, "wgrad_gemm_accum_fp32"),
        (torch.float16, "wgrad_gemm_accum_fp16"),
        (torch.bfloat16, "wgrad_gemm_accum_fp16"),
    ],
)
def test_the_fused_extension_serves_cuda_tensors_where_it_is_installed(
    monkeypatch, main: torch.dtype, expected: str
) -> None:
    calls: list[Any] = []
    extension = SimpleNamespace(
        wgrad_gemm_accum_fp32=lambda *args: calls.append(("wgrad_gemm_accum_fp32", args)),
        wgrad_gemm_accum_fp16=lambda *args: calls.append(("wgrad_gemm_accum_fp16", args)),
    )
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", extension)
    tensors = torch.zeros(4, 3, dtype=main), torch.ones(8, 4).half(), torch.ones(8, 3).half()
    main_grad, grad, input_ = (tensor.as_subclass(OnCuda) for tensor in tensors)
    version = main_grad._version
    accumulate_wgrad(main_grad, grad, input_, use_fused=True)
    assert main_grad._version > version  # autograd has to know, the extension does not tell it
    [(name, args)] = calls
    assert name == expected
    assert args[0] is input_
    assert args[1] is grad
    assert args[2] is main_grad


def test_without_the_extension_or_off_cuda_the_sum_is_computed_here(monkeypatch) -> None:
    tensors = [torch.zeros(4, 3), torch.ones(8, 4), torch.ones(8, 3)]
    on_cuda = [tensor.clone().as_subclass(OnCuda) for tensor in tensors]
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)  # an ImportError
    accumulate_wgrad(*on_cuda, use_fused=True)
    assert (on_cuda[0] == 8).all()
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", SimpleNamespace())
    accumulate_wgrad(*tensors, use_fused=True)
    assert (tensors[0] == 8).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks the mixed GEMM of a CUDA device")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_mixed_gemm_on_cuda_adds_in_place(dtype: torch.dtype) -> None:
    grad, input_ = torch.randn(256, 64).to(dtype), torch.randn(256, 32).to(dtype)
    main_grad = torch.randn(64, 32)
    expected = reference(main_grad, grad, input_)
    on_device = main_grad.cuda()
    address = on_device.data_ptr()
    accumulate_wgrad(on_device, grad.cuda(), input_.cuda(), use_fused=False)
    assert on_device.data_ptr() == address
    torch.testing.assert_close(on_device.double().cpu(), expected, rtol=0, atol=1e-3)
