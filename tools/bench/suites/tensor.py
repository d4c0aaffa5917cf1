"""``mcore.tensor`` against megatron-core and against alternatives written with torch alone.

- megatron-core's norm needs a CUDA device. "Megatron-LM's loop retyped" is its arithmetic on the
  CPU: ``torch.norm`` per tensor in the dtype of the tensor, then the norm of the list of norms. Its
  buffer allocates on CUDA only, so the benchmark provides the memory that it reuses.
- Long float32 norms are bound by the memory, which is faster if four places are read in turns. One
  float32 sum of 32 Mi squares is off by 0.2 %.
- For bfloat16 the retyped loop rounds each norm to 8 bits. A widened copy in the cache would cost
  0.75 of its speed before anything is summed. A kernel that widens in registers reads the rows
  instead: the gradient of a group norm's weight. A loop over ``t.float()`` is as exact as one
  float32 sum. It needs a float32 copy of each tensor, which is expensive if the system has to map
  fresh memory for it, as for the tensor of 32 Mi.
- The scaled copies here check every source element, the peers' do not. In place the check is free.
  Into other tensors it costs a sum of each block while the block is in the cache. For scale from
  fp32 to bf16, blocks of 128 KiB to 4 MiB were tried. 2 MiB, the present size, is the fastest. With
  smaller blocks, the calls take more time than the cache saves.
- A view's leaf costs ``detach()``, which is three quarters of the time. ``.data`` would be quicker,
  but would silently give wrong gradients after an in-place edit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.measure import Row, compare, compare_imports, cpu_seconds, loop, single
from bench.peers import megatron, name_of
from mcore.tensor import (
    GlobalMemoryBuffer,
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
    make_viewless_tensor,
)

_CALLS = 2000
_LARGE = 1 << 25
_MANY = "2000 tensors of 1000"
_ONE = f"one tensor of {_LARGE >> 20} Mi"
_MODEL = "85 M parameters of 12 layers"
_LENGTHS = {
    _MANY: [1000] * 2000,
    _ONE: [_LARGE],
    _MODEL: [768, 768, 3 * 768 * 768, 768 * 768, 4 * 768 * 768, 4 * 768 * 768, 3072, 768] * 12,
}
_NEARLY_EQUAL = 1 / 1.1


def run() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    peer, name = megatron("utils"), name_of()
    torch.manual_seed(0)
    yield _compare_buffers(peer, name)
    yield from _compare_viewless(peer, name)
    read, moved = _measure_bandwidth()
    yield from _compare_norms(read)
    yield from _compare_scalings(peer, name, moved)
    yield compare_imports(
        "mcore.tensor", "torch", f"import torch {torch.__version__}", 1 / 1.15, repeats=12
    )


def _compare_buffers(peer: Any, name: str) -> Row:
    shape = (128, 64)
    buffers = GlobalMemoryBuffer(), peer.GlobalMemoryBuffer()
    # Its first request needs a CUDA device, so the memory is put into its store here.
    buffers[1].buffer["mpu", torch.float32] = torch.empty(shape).flatten()
    ours, theirs = (partial(each.get_tensor, shape, torch.float32, "mpu") for each in buffers)
    is_shared = all(
        each().fill_(3).shape == shape and each().sum() == 3 * 128 * 64 for each in (ours, theirs)
    )
    return compare(
        "GlobalMemoryBuffer.get_tensor, reuse", ours, name, theirs, 1.4,
        agreement="shape, shared memory", number=5000, repeats=15,
        difference="" if is_shared else "a request does not see the memory of another",
    )  # fmt: skip


def _compare_viewless(peer: Any, name: str) -> Iterator[Row]:
    plain = torch.randn(12).view(3, 4)
    in_graph = (torch.randn(3, 4, requires_grad=True) * 2).view(4, 3)
    for case, view, keep_graph, target in (
        ("make_viewless_tensor, a leaf", plain, False, 5.0),
        ("make_viewless_tensor, in the graph", in_graph, True, None),
    ):
        makers = (make_viewless_tensor, peer.make_viewless_tensor)
        results = [make(view, False, keep_graph) for make in makers]
        is_same = all(out._base is None and out.data_ptr() == view.data_ptr() for out in results)
        ours, theirs = (loop(make, view, False, keep_graph, calls=_CALLS) for make in makers)
        yield compare(
            case, ours, name, theirs, target, agreement="same memory, no base",
            difference="" if is_same else "not the same memory, or a view",
            repeats=61, calls=_CALLS,
        )  # fmt: skip


def _measure_bandwidth() -> tuple[str, str]:
    """The memory's speed in this run, which no pass over long data exceeds."""
    source, destination = torch.zeros(_LARGE), torch.zeros(_LARGE)
    read_s = single(source.sum, number=1, repeats=15)
    copy_s = single(partial(destination.copy_, source), number=1, repeats=15)
    gigabytes = source.nbytes / 1e9
    return f"a sum {gigabytes / read_s:.0f}", f"a copy {2 * gigabytes / copy_s:.0f}"


def _make_tensors(kind: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(length).to(dtype) for length in _LENGTHS[kind]]


def _compute_our_norm(tensors: list[Tensor]) -> Tensor:
    flag = torch.zeros(1, dtype=torch.int)
    return local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [tensors], False)[0]


def _compute_loop_norm(tensors: Iterable[Tensor]) -> Tensor:
    """One norm per tensor, in its dtype. megatron-core puts the list on a CUDA device."""
    norms = [[torch.norm(tensor) for tensor in tensors]]
    total: Tensor = torch.tensor(norms, dtype=torch.float32).norm()
    return total


def _compute_fused_norm(tensors: list[Tensor]) -> Tensor:
    total: Tensor = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()
    return total


_LOOP, _FUSED, _EXACT = "Megatron-LM's loop retyped", "torch._foreach_norm", "float64 sum, as exact"
_COPIED, _WIDENED = "fp32 copy of all, one fused norm", "loop over t.float()"
_NORMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    _LOOP: _compute_loop_norm,
    _FUSED: _compute_fused_norm,
    _EXACT: lambda ts: torch.stack([t.norm(dtype=torch.float64) for t in ts]).norm(),
    _COPIED: lambda tensors: _compute_fused_norm([tensor.float() for tensor in tensors]),
    _WIDENED: lambda tensors: _compute_loop_norm(tensor.float() for tensor in tensors),
}


def _compare_norms(limit: str) -> Iterator[Row]:
    """For long float32 tensors all sides wait for the memory, so the aim against a loop is 1."""
    fp32, bf16 = torch.float32, torch.bfloat16
    for dtype, kind, peer, target in (
        (fp32, _MANY, _LOOP, 3.0), (fp32, _MANY, _FUSED, 1.2),
        (fp32, _MODEL, _LOOP, 1.0), (fp32, _MODEL, _FUSED, None), (fp32, _MODEL, _EXACT, 1.2),
        (fp32, _ONE, _LOOP, 1.0), (fp32, _ONE, _EXACT, 1.2),
        (bf16, _MANY, _COPIED, 1.8), (bf16, _MANY, _WIDENED, None), (bf16, _MANY, _LOOP, 0.75),
        (bf16, _MODEL, _COPIED, 5.0), (bf16, _MODEL, _WIDENED, None), (bf16, _MODEL, _LOOP, 0.75),
        (bf16, _ONE, _COPIED, 5.0), (bf16, _ONE, _WIDENED, None), (bf16, _ONE, _LOOP, 0.75),
    ):  # fmt: skip
        tensors = _make_tensors(kind, dtype)
        exact = math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
        ours, theirs = (partial(norm, tensors) for norm in (_compute_our_norm, _NORMS[peer]))
        errors = [abs(norm().item() - exact) / exact for norm in (ours, theirs)]
        is_wrong = errors[0] > (1e-6 if dtype is fp32 else 1e-5) or errors[1] > 1e-2
        gigabytes = sum(tensor.nbytes for tensor in tensors) / 1e9
        cpu_ratio = cpu_seconds(theirs, repeats=7) / cpu_seconds(ours, repeats=7)
        yield compare(
            f"norm {str(dtype)[6:]}, {kind}", ours, peer, theirs, target,
            agreement=f"off by {errors[0]:.0e}, peer by {errors[1]:.0e}",
            difference=f"off by {errors[0]:.1e} against {errors[1]:.1e}" if is_wrong else "",
            repeats=15,
            note=partial(_format_rate, "reads", gigabytes, f"{limit}, CPU time {cpu_ratio:.1f}"),
        )  # fmt: skip


def _format_rate(verb: str, gigabytes: float, limit: str, ours_s: float, peer_s: float) -> str:
    return f"{verb} {gigabytes / ours_s:.0f} GB/s, {limit}"


_Scale = Callable[[list[Tensor], list[Tensor], float], Any]


def _scale_unchecked(sources: list[Tensor], destinations: list[Tensor], factor: float) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        torch.mul(source, factor, out=destination)


def _make_scale(applier: Callable[..., Any], kernel: Callable[..., Any]) -> _Scale:
    def scale(sources: list[Tensor], destinations: list[Tensor], factor: float) -> None:
        applier(kernel, torch.zeros(1, dtype=torch.int), [sources, destinations], factor)

    return scale


def _compare_scalings(peer: Any, name: str, limit: str) -> Iterator[Row]:
    """In place, then into other tensors."""
    fp32, bf16 = torch.float32, torch.bfloat16
    unchecked = "mul(out=), unchecked"
    our_scale = _make_scale(local_multi_tensor_applier, local_multi_tensor_scale)
    peer_scale = _make_scale(peer.local_multi_tensor_applier, peer.local_multi_tensor_scale)
    for kind, dtype, new_dtype, factor, peer_name, target in (
        (_MANY, fp32, None, 1.0001, name, 3.0),
        (_ONE, fp32, None, 1.0001, name, 1.8),
        (_ONE, fp32, None, 1.0001, unchecked, _NEARLY_EQUAL),
        (_MODEL, fp32, None, 1.0001, name, 1.8),
        (_MODEL, fp32, None, 1.0001, unchecked, _NEARLY_EQUAL),
        (_MODEL, bf16, None, 1.0001, name, None),
        (_MANY, fp32, fp32, 0.5, name, None),
        (_ONE, fp32, fp32, 0.5, name, 1.8),
        (_ONE, fp32, fp32, 0.5, unchecked, None),
        (_MODEL, fp32, fp32, 0.5, name, 1.05),
        (_MANY, fp32, bf16, 1.0, name, None),
        (_ONE, fp32, bf16, 1.0, name, 1.8),
        (_MODEL, fp32, bf16, 1.0, name, 1.0),
        (_MODEL, fp32, bf16, 0.5, name, 1.0),
        (_MODEL, bf16, fp32, 1.0, name, 1.2),
    ):
        scales = our_scale, (_scale_unchecked if peer_name == unchecked else peer_scale)
        sources, results = _make_tensors(kind, dtype), []
        for scale in scales:
            into = [tensor.to(new_dtype or dtype, copy=True) for tensor in sources]
            scale(sources if new_dtype else into, into, factor)
            results.append(into)
        is_equal = all(map(torch.equal, *results))
        into = results[0] if new_dtype else sources
        ours, theirs = (partial(scale, sources, into, factor) for scale in scales)
        verb = "checked copy" if factor == 1 else "scale"
        place = f"to {str(new_dtype)[6:]}" if new_dtype else "in place"
        gigabytes = sum(tensor.nbytes for tensor in [*sources, *into]) / 1e9
        yield compare(
            f"{verb} {str(dtype)[6:]} {place}, {kind}", ours, peer_name, theirs, target,
            agreement="bitwise equal", difference="" if is_equal else "different products",
            repeats=15, note=partial(_format_rate, "moves", gigabytes, limit),
        )  # fmt: skip
