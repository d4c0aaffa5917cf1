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
  Into other tensors it costs a sum of each block while the block is in the cache.
- A view's leaf costs ``detach()``, which is three quarters of the time. ``.data`` would be quicker,
  but would silently give wrong gradients after an in-place edit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.measure import Row, compare, compare_imports, loop, single
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
_LOOP = "Megatron-LM's loop retyped"
_NEARLY_EQUAL = 1 / 1.1


def run() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    peer, name = megatron("utils"), name_of()
    torch.manual_seed(0)
    yield _buffer_reuse(peer, name)
    yield from _viewless(peer, name)
    read, moved = _bandwidth_limits()
    yield from _norms(read)
    yield from _scalings(peer, name, moved)
    yield compare_imports(
        "mcore.tensor", "torch", f"import torch {torch.__version__}", 1 / 1.15, repeats=12
    )


def _buffer_reuse(peer: Any, name: str) -> Row:
    shape = (128, 64)
    ours, theirs = GlobalMemoryBuffer(), peer.GlobalMemoryBuffer()
    # Its first request needs a CUDA device, so the memory is put into its store here.
    theirs.buffer["mpu", torch.float32] = torch.empty(shape).flatten()
    requests = [partial(side.get_tensor, shape, torch.float32, "mpu") for side in (ours, theirs)]
    is_shared = all(
        request().fill_(3).shape == shape and request().sum() == 3 * 128 * 64
        for request in requests
    )
    return compare(
        "GlobalMemoryBuffer.get_tensor, reuse",
        requests[0],
        name,
        requests[1],
        1.4,
        agreement="shape, shared memory",
        difference="" if is_shared else "a request does not see the memory of another",
        number=5000,
        repeats=15,
    )


def _viewless(peer: Any, name: str) -> Iterator[Row]:
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


def _bandwidth_limits() -> tuple[str, str]:
    """The memory's speed in this run, which no pass over long data exceeds."""
    source, destination = torch.zeros(_LARGE), torch.zeros(_LARGE)
    read_s = single(source.sum, number=1, repeats=15)
    copy_s = single(partial(destination.copy_, source), number=1, repeats=15)
    gigabytes = source.nbytes / 1e9
    return f"a sum {gigabytes / read_s:.0f}", f"a copy {2 * gigabytes / copy_s:.0f}"


def _make_tensors(kind: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(length).to(dtype) for length in _LENGTHS[kind]]


def _our_norm(tensors: list[Tensor]) -> Tensor:
    flag = torch.zeros(1, dtype=torch.int)
    return local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [tensors], False)[0]


def _loop_norm(tensors: Iterable[Tensor]) -> Tensor:
    """One norm per tensor, in its dtype. megatron-core puts the list on a CUDA device."""
    norms = [[torch.norm(tensor) for tensor in tensors]]
    total: Tensor = torch.tensor(norms, dtype=torch.float32).norm()
    return total


def _widened_norm(tensors: list[Tensor]) -> Tensor:
    return _loop_norm(tensor.float() for tensor in tensors)


def _copied_norm(tensors: list[Tensor]) -> Tensor:
    return _fused_norm([tensor.float() for tensor in tensors])


def _fused_norm(tensors: list[Tensor]) -> Tensor:
    total: Tensor = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()
    return total


def _float64_norm(tensors: list[Tensor]) -> Tensor:
    total: Tensor = torch.stack([tensor.norm(dtype=torch.float64) for tensor in tensors]).norm()
    return total


def _norms(limit: str) -> Iterator[Row]:
    """For long float32 tensors all sides wait for the memory, so the aim against a loop is 1."""
    fused, exact = "torch._foreach_norm", "float64 sum, as exact"
    copied, widened = "fp32 copy of all, one fused norm", "loop over t.float()"
    fp32, bf16 = torch.float32, torch.bfloat16
    for dtype, kind, peer, peer_norm, target in (
        (fp32, _MANY, _LOOP, _loop_norm, 3.0),
        (fp32, _MANY, fused, _fused_norm, 1.2),
        (fp32, _MODEL, _LOOP, _loop_norm, 1.0),
        (fp32, _MODEL, fused, _fused_norm, None),
        (fp32, _MODEL, exact, _float64_norm, 1.2),
        (fp32, _ONE, _LOOP, _loop_norm, 1.0),
        (fp32, _ONE, exact, _float64_norm, 1.2),
        (bf16, _MANY, copied, _copied_norm, 1.8),
        (bf16, _MANY, widened, _widened_norm, None),
        (bf16, _MANY, _LOOP, _loop_norm, 0.75),
        (bf16, _MODEL, copied, _copied_norm, 5.0),
        (bf16, _MODEL, widened, _widened_norm, None),
        (bf16, _MODEL, _LOOP, _loop_norm, 0.75),
        (bf16, _ONE, copied, _copied_norm, 5.0),
        (bf16, _ONE, widened, _widened_norm, None),
        (bf16, _ONE, _LOOP, _loop_norm, 0.75),
    ):
        yield _norm_row(kind, dtype, peer, peer_norm, target, limit)


def _norm_row(
    kind: str,
    dtype: torch.dtype,
    peer: str,
    peer_norm: Callable[[list[Tensor]], Tensor],
    target: float | None,
    limit: str,
) -> Row:
    tensors = _make_tensors(kind, dtype)
    exact = math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
    ours, theirs = (partial(norm, tensors) for norm in (_our_norm, peer_norm))
    errors = [abs(norm().item() - exact) / exact for norm in (ours, theirs)]
    is_wrong = errors[0] > (1e-6 if dtype is torch.float32 else 1e-5) or errors[1] > 1e-2
    moved = sum(tensor.nbytes for tensor in tensors) / 1e9
    return compare(
        f"norm {str(dtype)[6:]}, {kind}", ours, peer, theirs, target,
        agreement=f"off by {errors[0]:.0e}, peer by {errors[1]:.0e}",
        difference=f"off by {errors[0]:.1e} against {errors[1]:.1e}" if is_wrong else "",
        repeats=15,
        note=lambda ours_s, peer_s: f"reads {moved / ours_s:.0f} GB/s, {limit}, "
        f"CPU time {_cpu_time_ratio(ours, theirs):.1f}",
    )  # fmt: skip


def _cpu_time_ratio(ours: Callable[[], Any], peer: Callable[[], Any]) -> float:
    best = []
    for call in (ours, peer):
        times = []
        for _ in range(7):
            started = time.process_time()
            call()
            times.append(time.process_time() - started)
        best.append(min(times))
    return best[1] / best[0]


Scale = Callable[[list[Tensor], list[Tensor], float], Any]


def _our_scale(sources: list[Tensor], destinations: list[Tensor], factor: float) -> None:
    flag = torch.zeros(1, dtype=torch.int)
    lists = [sources, destinations]
    local_multi_tensor_applier(local_multi_tensor_scale, flag, lists, factor)


def _unchecked_scale(sources: list[Tensor], destinations: list[Tensor], factor: float) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        torch.mul(source, factor, out=destination)


def _peer_scale(peer: Any) -> Scale:
    def scale(sources: list[Tensor], destinations: list[Tensor], factor: float) -> None:
        lists = [sources, destinations]
        peer.local_multi_tensor_applier(
            peer.local_multi_tensor_scale, torch.zeros(1, dtype=torch.int), lists, factor
        )

    return scale


def _scalings(peer: Any, name: str, limit: str) -> Iterator[Row]:
    """In place, then into other tensors."""
    fp32, bf16 = torch.float32, torch.bfloat16
    unchecked, peer_scale = "mul(out=), unchecked", _peer_scale(peer)
    for kind, dtypes, factor, peer_name, target in (
        (_MANY, (fp32, None), 1.0001, name, 3.0),
        (_ONE, (fp32, None), 1.0001, name, 1.8),
        (_ONE, (fp32, None), 1.0001, unchecked, _NEARLY_EQUAL),
        (_MODEL, (fp32, None), 1.0001, name, 1.8),
        (_MODEL, (fp32, None), 1.0001, unchecked, _NEARLY_EQUAL),
        (_MODEL, (bf16, None), 1.0001, name, None),
        (_MANY, (fp32, fp32), 0.5, name, None),
        (_ONE, (fp32, fp32), 0.5, name, 1.8),
        (_ONE, (fp32, fp32), 0.5, unchecked, None),
        (_MODEL, (fp32, fp32), 0.5, name, 1.05),
        (_MANY, (fp32, bf16), 1.0, name, None),
        (_ONE, (fp32, bf16), 1.0, name, 1.8),
        (_MODEL, (fp32, bf16), 1.0, name, 1.0),
        (_MODEL, (fp32, bf16), 0.5, name, 1.0),
        (_MODEL, (bf16, fp32), 1.0, name, 1.2),
    ):
        scale = _unchecked_scale if peer_name == unchecked else peer_scale
        yield _scale_row(kind, dtypes, factor, peer_name, scale, target, limit)


def _scale_row(
    kind: str,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    factor: float,
    peer: str,
    peer_scale: Scale,
    target: float | None,
    limit: str,
) -> Row:
    verb = "checked copy" if factor == 1 else "scale"
    into_text = "in place" if dtypes[1] is None else f"to {str(dtypes[1])[6:]}"
    sources = _make_tensors(kind, dtypes[0])
    results = []
    for scale in (_our_scale, peer_scale):
        into = [tensor.to(dtypes[1] or tensor.dtype, copy=True) for tensor in sources]
        scale(into if dtypes[1] is None else sources, into, factor)
        results.append(into)
    is_equal = all(map(torch.equal, *results))
    into = sources if dtypes[1] is None else results[0]
    moved = sum(tensor.nbytes for tensor in [*sources, *into]) / 1e9
    ours, theirs = (partial(scale, sources, into, factor) for scale in (_our_scale, peer_scale))
    return compare(
        f"{verb} {str(dtypes[0])[6:]} {into_text}, {kind}", ours, peer, theirs, target,
        agreement="bitwise equal", difference="" if is_equal else "different products",
        repeats=15, note=lambda ours_s, peer_s: f"moves {moved / ours_s:.0f} GB/s, {limit}",
    )  # fmt: skip
