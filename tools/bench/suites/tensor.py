"""``mcore.tensor`` against megatron-core and against what one would build from torch itself.

- megatron-core's norm needs a CUDA device. "Megatron-LM's loop retyped" is its arithmetic on the
  CPU: ``torch.norm`` per tensor in the dtype of the tensor, then the norm of the list of norms. Its
  buffer allocates on CUDA only, so the memory that it reuses was put there by hand.
- Long float32 norms are bound by the memory, which delivers more when they are read from four
  places in turns. One float32 sum of 32 Mi squares is off by 0.2 %.
- For bfloat16 the retyped loop rounds each norm to 8 bits. A copy widened in the cache would cost
  0.75 of its speed before anything is summed, so the rows are read by a kernel that widens in
  registers: the gradient of a group norm's weight. A loop over ``t.float()`` is as exact as one
  float32 sum and needs a float32 copy of each tensor, which gets expensive where the system has to
  map fresh memory for it, as for the tensor of 32 Mi.
- The scaled copies here check every source element, the others none. In place the check is free.
  Into other tensors it costs a sum of each block while that is in the cache.
- A view's leaf costs ``detach()``, which takes three quarters of the time. ``.data`` would be
  quicker and would give wrong gradients silently after an in-place edit.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from timeit import Timer
from typing import Any

import torch
from torch import Tensor

from bench.measure import Row, paired, single
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
_WITHIN_A_TENTH = 1 / 1.1
_IMPORT_TIMER = (
    "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
)


def run() -> Iterable[Row]:
    """Yield the rows; results are checked for agreement before each timing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer: Any = import_module("megatron.core.utils")
    name = f"megatron-core {version('megatron-core')}"
    torch.manual_seed(0)
    yield _buffer_reuse(peer, name)
    yield from _viewless(peer, name)
    read, moved = _bandwidth_limits()
    yield from _norms_of_float32(read)
    yield from _norms_of_bfloat16(read)
    yield from _scaling_in_place(peer, name, moved)
    yield from _scaling_into_others(peer, name, moved)
    yield _import_cost()


def _buffer_reuse(peer: Any, name: str) -> Row:
    case, shape = "GlobalMemoryBuffer.get_tensor, reuse", (128, 64)
    ours, theirs = GlobalMemoryBuffer(), peer.GlobalMemoryBuffer()
    # Its first request asks for a CUDA device, so the memory is put where it would keep it.
    theirs.buffer["mpu", torch.float32] = torch.empty(shape).flatten()
    requests = [partial(side.get_tensor, shape, torch.float32, "mpu") for side in (ours, theirs)]
    for request in requests:
        tensor = request().fill_(3)
        if tensor.shape != shape or request().sum() != 3 * tensor.numel():
            return Row.disagreement(case, name, "a request does not see the memory of another")
    ours_s, peer_s = paired(*requests, number=5000, repeats=15)
    return Row(case, ours_s, name, peer_s, 1.4, "shape, shared memory")


def _viewless(peer: Any, name: str) -> Iterator[Row]:
    plain = torch.randn(12).view(3, 4)
    in_graph = (torch.randn(3, 4, requires_grad=True) * 2).view(4, 3)
    for case, view, keep_graph, target in (
        ("make_viewless_tensor, a leaf", plain, False, 5.0),
        ("make_viewless_tensor, in the graph", in_graph, True, None),
    ):
        makers = (make_viewless_tensor, peer.make_viewless_tensor)
        results = [make(view, False, keep_graph) for make in makers]
        if any(out._base is not None or out.data_ptr() != view.data_ptr() for out in results):
            yield Row.disagreement(case, name, "not the same memory, or a view")
            continue
        calls = [_calls(make, view, keep_graph) for make in makers]
        ours_s, peer_s = (seconds / _CALLS for seconds in paired(*calls, number=1, repeats=61))
        yield Row(case, ours_s, name, peer_s, target, "same memory, no base")


def _calls(make: Any, view: Tensor, keep_graph: bool) -> Callable[[], Any]:
    names = {"make": make, "view": view, "keep_graph": keep_graph}
    timer = Timer("make(view, False, keep_graph)", globals=names)
    return lambda: timer.timeit(_CALLS)


def _bandwidth_limits() -> tuple[str, str]:
    """What the memory gives on this machine, in this run: no pass over long data is faster."""
    source, destination = torch.zeros(_LARGE), torch.zeros(_LARGE)
    read_s = single(source.sum, number=1, repeats=15)
    copy_s = single(partial(destination.copy_, source), number=1, repeats=15)
    gigabytes = source.nbytes / 1e9
    return f"a sum {gigabytes / read_s:.0f}", f"a copy {2 * gigabytes / copy_s:.0f}"


def _made(kind: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(length).to(dtype) for length in _LENGTHS[kind]]


def _our_norm(tensors: list[Tensor]) -> Tensor:
    flag = torch.zeros(1, dtype=torch.int)
    return local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [tensors], False)[0]


def _loop_norm(tensors: Iterable[Tensor]) -> Tensor:
    """One norm per tensor, in its own dtype; megatron-core puts the list on a CUDA device."""
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


def _norms_of_float32(limit: str) -> Iterator[Row]:
    """Against a loop over long tensors all sides wait for the memory: the target is to keep up."""
    fused, exact = "torch._foreach_norm", "float64 sum, as exact"
    for kind, peer, peer_norm, target in (
        (_MANY, _LOOP, _loop_norm, 3.0),
        (_MANY, fused, _fused_norm, 1.2),
        (_MODEL, _LOOP, _loop_norm, 1.0),
        (_MODEL, fused, _fused_norm, None),
        (_MODEL, exact, _float64_norm, 1.2),
        (_ONE, _LOOP, _loop_norm, 1.0),
        (_ONE, exact, _float64_norm, 1.2),
    ):
        yield _norm_row(kind, torch.float32, peer, peer_norm, target, limit, 1e-6)


def _norms_of_bfloat16(limit: str) -> Iterator[Row]:
    for kind in (_MANY, _MODEL, _ONE):
        for peer, peer_norm, target in (
            ("fp32 copy of all, one fused norm", _copied_norm, 1.8 if kind == _MANY else 5.0),
            ("loop over t.float()", _widened_norm, None),
            (_LOOP, _loop_norm, 0.75),
        ):
            yield _norm_row(kind, torch.bfloat16, peer, peer_norm, target, limit, 1e-5)


def _norm_row(
    kind: str,
    dtype: torch.dtype,
    peer: str,
    peer_norm: Callable[[list[Tensor]], Tensor],
    target: float | None,
    limit: str,
    allowed_error: float,
) -> Row:
    case = f"norm {str(dtype)[6:]}, {kind}"
    tensors = _made(kind, dtype)
    exact = math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))
    errors = [abs(norm(tensors).item() - exact) / exact for norm in (_our_norm, peer_norm)]
    if errors[0] > allowed_error or errors[1] > 1e-2:
        return Row.disagreement(case, peer, f"off by {errors[0]:.1e} against {errors[1]:.1e}")
    calls = [partial(norm, tensors) for norm in (_our_norm, peer_norm)]
    ours_s, peer_s = paired(*calls, number=1, repeats=15)
    moved = sum(tensor.nbytes for tensor in tensors) / ours_s / 1e9
    agreement = f"off by {errors[0]:.0e}, peer by {errors[1]:.0e}"
    note = f"reads {moved:.0f} GB/s, {limit}; CPU time {_cpu_time_ratio(*calls):.1f}"
    return Row(case, ours_s, peer, peer_s, target, agreement, note)


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


def _scaling_in_place(peer: Any, name: str, limit: str) -> Iterator[Row]:
    for kind, dtype, peer_name, scale, target in (
        (_MANY, torch.float32, name, _peer_scale(peer), 3.0),
        (_ONE, torch.float32, name, _peer_scale(peer), 1.8),
        (_ONE, torch.float32, "mul(out=), unchecked", _unchecked_scale, _WITHIN_A_TENTH),
        (_MODEL, torch.float32, name, _peer_scale(peer), 1.8),
        (_MODEL, torch.float32, "mul(out=), unchecked", _unchecked_scale, _WITHIN_A_TENTH),
        (_MODEL, torch.bfloat16, name, _peer_scale(peer), None),
    ):
        case = f"scale {str(dtype)[6:]} in place, {kind}"
        yield _scale_row(case, kind, (dtype, None), 1.0001, peer_name, scale, target, limit)


def _scaling_into_others(peer: Any, name: str, limit: str) -> Iterator[Row]:
    fp32, bf16 = torch.float32, torch.bfloat16
    for kind, dtypes, factor, peer_name, scale, target in (
        (_MANY, (fp32, fp32), 0.5, name, _peer_scale(peer), None),
        (_ONE, (fp32, fp32), 0.5, name, _peer_scale(peer), 1.8),
        (_ONE, (fp32, fp32), 0.5, "mul(out=), unchecked", _unchecked_scale, None),
        (_MODEL, (fp32, fp32), 0.5, name, _peer_scale(peer), 1.05),
        (_MANY, (fp32, bf16), 1.0, name, _peer_scale(peer), None),
        (_ONE, (fp32, bf16), 1.0, name, _peer_scale(peer), 1.8),
        (_MODEL, (fp32, bf16), 1.0, name, _peer_scale(peer), 1.0),
        (_MODEL, (fp32, bf16), 0.5, name, _peer_scale(peer), 1.0),
        (_MODEL, (bf16, fp32), 1.0, name, _peer_scale(peer), 1.2),
    ):
        what = "checked copy" if factor == 1 else "scale"
        case = f"{what} {str(dtypes[0])[6:]} to {str(dtypes[1])[6:]}, {kind}"
        yield _scale_row(case, kind, dtypes, factor, peer_name, scale, target, limit)


def _scale_row(
    case: str,
    kind: str,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    factor: float,
    peer: str,
    peer_scale: Scale,
    target: float | None,
    limit: str,
) -> Row:
    sources = _made(kind, dtypes[0])
    results = []
    for scale in (_our_scale, peer_scale):
        into = [tensor.to(dtypes[1] or tensor.dtype, copy=True) for tensor in sources]
        scale(into if dtypes[1] is None else sources, into, factor)
        results.append(into)
    if not all(map(torch.equal, *results)):
        return Row.disagreement(case, peer, "different products")
    into = sources if dtypes[1] is None else results[0]
    calls = [partial(scale, sources, into, factor) for scale in (_our_scale, peer_scale)]
    ours_s, peer_s = paired(*calls, number=1, repeats=15)
    moved = sum(tensor.nbytes for tensor in [*sources, *into]) / ours_s / 1e9
    note = f"moves {moved:.0f} GB/s, {limit}"
    return Row(case, ours_s, peer, peer_s, target, "bitwise equal", note)


def _import_cost() -> Row:
    """The minimum over fresh interpreters, which take turns; the first of each warms up."""
    best = {"mcore.tensor": math.inf, "torch": math.inf}
    for repeat in range(13):
        for module in best:
            command = [sys.executable, "-W", "ignore", "-c", _IMPORT_TIMER.format(module=module)]
            finished = subprocess.run(command, check=True, capture_output=True, text=True)
            if repeat:
                best[module] = min(best[module], float(finished.stdout.splitlines()[-1]))
    ours_s, peer_s = best.values()
    case, peer = "import mcore.tensor", f"import torch {torch.__version__}"
    return Row(case, ours_s, peer, peer_s, 1 / 1.15, note="fresh processes, the import statement")
