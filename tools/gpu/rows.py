"""Benchmark rows on one accelerator, timed by its events, in one process: ``python -m gpu.rows``.

Both sides of a row take turns. Their results are compared first.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.measure import alternate
from mcore.modules.graphs import GraphSpec, TorchGraphRunner
from mcore.observe import StragglerDetector
from mcore.observe.sinks.scalars import read_scalars
from mcore.parallel import checkpoint, cp_zigzag_index, vocab_parallel_cross_entropy
from mcore.parallel.replicas import param_hashes
from mcore.tensor import calc_norm, local_multi_tensor_l2_norm, local_multi_tensor_scale
from results.journal import append_line
from results.page import format_duration
from standin import switched_on

_CHUNK = 2048 * 32


class Case(NamedTuple):
    """Two sides of a row. Tensors that they return must be equal."""

    name: str
    ours: Callable[[], Any]
    peer: str
    theirs: Callable[[], Any]
    num_bytes: int = 0  # that a call moves
    number: int = 20  # calls in a round
    on_host: bool = False  # timed by the host's clock


def compare_norms(device: torch.device, scale: int) -> Iterator[Case]:
    """Norms of 100 tensors of 1 Mi."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [one.to(dtype) for one in _make(device, 100, (1 << 20) // scale)]
        flag = torch.zeros(1, dtype=torch.int, device=device)
        with_flag = partial(local_multi_tensor_l2_norm, _CHUNK, flag, [tensors], False)

        def compute_fused(tensors: list[Tensor] = tensors) -> Any:
            return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()

        for name, ours in (("calc_norm", partial(calc_norm, tensors)), ("l2_norm", with_flag)):
            yield Case(f"{name}, 100 {dtype}", ours, "torch._foreach_norm",
                       compute_fused, 100 * tensors[0].nbytes)  # fmt: skip


def compare_scaled_copies(device: torch.device, scale: int) -> Iterator[Case]:
    """Checked products of 100 tensors of 1 Mi, in place and into a narrower dtype."""
    wide = _make(device, 100, (1 << 20) // scale)
    narrow = [tensor.bfloat16() for tensor in wide]
    flag = torch.zeros(1, dtype=torch.int, device=device)
    found, one = torch.zeros((), device=device), torch.ones((), device=device)
    fused, name = torch._amp_foreach_non_finite_check_and_unscale_, "scale in place with flag, 100"
    for title, sources, targets, factor, peer, theirs, width in (
        (f"{name} float32", wide, wide, 1.0, "torch's fused check",
         partial(fused, wide, found, one), 8),
        (f"{name} bfloat16", narrow, narrow, 1.0, "_foreach_mul_, no check",
         partial(torch._foreach_mul_, narrow, 1.0), 4),
        ("scale float32 to bfloat16, 100", wide, narrow, 0.5, "_foreach_mul and copy, no check",
         lambda: torch._foreach_copy_(narrow, torch._foreach_mul(wide, 0.5)), 6),
    ):  # fmt: skip
        ours = partial(local_multi_tensor_scale, _CHUNK, flag, [sources, targets], factor)
        yield Case(title, ours, peer, theirs, 100 * wide[0].numel() * width)


def compare_scalars_and_slices(device: torch.device, scale: int) -> Iterator[Case]:
    """Thirty scalars of three dtypes, and the part of a sequence for a rank."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    values = {n: torch.full((), n, dtype=dtypes[n % 3], device=device) for n in range(30)}
    yield Case("read 30 scalars", lambda: torch.tensor([*read_scalars(values).values()]),
               "item() of each", lambda: torch.tensor([one.item() for one in values.values()]),
               on_host=True)  # fmt: skip
    tokens = torch.arange(4 * 32768, device=device).view(4, 32768)
    places = cp_zigzag_index(32768, 4, 1, device=device)
    yield Case("slice for a rank of four", lambda: tokens.index_select(1, places), "chunk and cat",
               lambda: torch.cat([tokens.chunk(8, 1)[1], tokens.chunk(8, 1)[6]], 1))  # fmt: skip


def compare_cross_entropy(device: torch.device, scale: int) -> Iterator[Case]:
    """Forward and backward of 4096 tokens with 32000 entries."""
    shape = (max(1, 4096 // scale), 32000)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(shape, device=device).to(dtype).requires_grad_()
        target = torch.randint(0, shape[-1], shape[:1], device=device)
        plain = partial(F.cross_entropy, reduction="none")
        ours, theirs = (partial(_differentiate, loss, logits, target)
                        for loss in (vocab_parallel_cross_entropy, plain))  # fmt: skip
        yield Case(f"cross entropy, {dtype}", ours, "F.cross_entropy", theirs, number=5)


def _differentiate(loss: Callable[..., Tensor], logits: Tensor, target: Tensor) -> list[Tensor]:
    losses = loss(logits, target)
    return [losses, *torch.autograd.grad(losses.sum(), logits)]


def compare_checkpoints(device: torch.device, scale: int) -> Iterator[Case]:
    """Save, load and hashes of 16 tensors of 64 MiB."""
    tensors = _make(device, 16, (1 << 24) // scale)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    with tempfile.TemporaryDirectory() as folder:
        paths = (f"{folder}/{number}" for number in range(1000))

        def describe() -> dict[str, Any]:
            make = checkpoint.make_sharded_tensor_for_checkpoint
            return {f"w{n}": make(tensor, f"w{n}") for n, tensor in enumerate(tensors)}

        yield Case("save", lambda: checkpoint.save_sharded_state_dict(describe(), next(paths)),
                   "torch.save", lambda: torch.save(tensors, f"{folder}/torch"), num_bytes, 1,
                   True)  # fmt: skip
        yield Case("load", lambda: checkpoint.load_sharded_state_dict(describe(), f"{folder}/0"),
                   "torch.load and copy", lambda: torch._foreach_copy_(tensors, torch.load(
                       f"{folder}/torch", map_location="cpu")), num_bytes, 1, True)  # fmt: skip
    model = torch.nn.ParameterList(tensors)
    yield Case("hashes of parameters", lambda: param_hashes(model), "copy to the host, no hashes",
               lambda: [tensor.cpu() for tensor in tensors], num_bytes, 1, True)  # fmt: skip


def compare_detector(device: torch.device, scale: int) -> Iterator[Case]:
    """A range of the straggler detector."""
    detector = StragglerDetector()
    detector.configure(world=1, rank=0, enabled=True, controller=False, prefill=65536)
    events = [torch.Event(device, enable_timing=True) for _ in range(2)]

    def time_range() -> None:
        with detector:
            pass

    yield Case("a range of the detector", time_range, "two events recorded",
               lambda: [*map(torch.Event.record, events)], 0, 2000, True)  # fmt: skip


def compare_graphs(device: torch.device, scale: int) -> Iterator[Case]:
    """Forward and backward of a layer, replayed."""
    if device.type == "cuda":
        layers = [torch.nn.Linear(1024, 1024).to(device) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        sample = torch.randn(64, 1024, device=device, requires_grad=True)
        [ours] = TorchGraphRunner().capture([GraphSpec(layers[0], layers[0].forward, (sample,))])
        theirs: Any = torch.cuda.make_graphed_callables(layers[1], (sample,))
        yield Case("replay of a layer", lambda: torch.autograd.grad(ours(sample).sum(), sample),
                   "make_graphed_callables",
                   lambda: torch.autograd.grad(theirs(sample).sum(), sample))  # fmt: skip


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the row of a case, failed if the results differ. On the stand-in, calls run once."""
    number, rounds = (case.number, 5) if device.type == "cuda" else (1, 1)
    row = {"kind": "row", "name": case.name, "peer": case.peer, "outcome": "failed"}
    for one, other in zip(_list_tensors(case.ours()), _list_tensors(case.theirs()), strict=False):
        error = (one.double().cpu() - other.double().cpu()).abs().max().item()
        if not error <= 1e-2 * max(1.0, other.double().abs().max().item()):
            return {**row, "reason": f"the results differ by {error:.2g}"}
    sides = [partial(_time, case, number, call, device) for call in (case.ours, case.theirs)]
    ours_s, peer_s = map(min, alternate(sides, rounds))
    rate = f", {case.num_bytes / ours_s / 1e9:.3g} GB/s" if case.num_bytes else ""
    reason = f"{format_duration(ours_s)}, {case.peer} {peer_s / ours_s:.2f} times as long{rate}"
    return {**row, "outcome": "passed", "reason": reason, "ours_s": ours_s, "peer_s": peer_s}


def _list_tensors(result: Any) -> list[Tensor]:
    return [one.detach() for one in tree_leaves(result) if isinstance(one, Tensor) and one.numel()]


def _time(case: Case, number: int, call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, by events of the device or by the host's clock."""
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    call()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    begin.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    host_s = time.perf_counter() - began
    return (host_s if case.on_host else begin.elapsed_time(end) / 1e3) / number


def _make(device: torch.device, number: int, length: int) -> list[Tensor]:
    return [torch.randn(length, device=device) for _ in range(number)]


def main(journal: str, kind: str) -> None:
    """Append the rows to a journal. The stand-in gets less data."""
    scale = (1 << 12) if kind == "standin" else 1
    with switched_on() if kind == "standin" else nullcontext(torch.device(kind, 0)) as device:
        for section in (one for name, one in globals().items() if name[:8] == "compare_"):
            try:
                for case in section(device, scale):
                    append_line(Path(journal), measure(case, device))
            except Exception:
                row = {"kind": "row", "name": section.__name__, "outcome": "failed"}
                append_line(Path(journal), {**row, "reason": traceback.format_exc()[-3000:]})


if __name__ == "__main__":
    main(*sys.argv[1:])
