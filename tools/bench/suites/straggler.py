"""The straggler detector and NVTX ranges against megatron-core's, each as a black box.

- megatron-core's detector needs CUDA: its events and sensors are stand-ins that cost nothing. So
  does its NVTX: the backend does nothing on either side.
- Reports run on gloo ranks of one machine, with one range of each kind; on two CPUs the ratio with
  four ranks varies from 3 to 7. torch's all-gather of one row is what a report would cost at least
  if its row went through gloo. On 16384 simulated ranks all messages arrive at once.
"""

from __future__ import annotations

import logging
import pickle
import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

import mcore.observe.nvtx as observe_nvtx
import mcore.observe.straggler.exchange as exchange
from bench.measure import Row, paired
from mcore.observe import SectionStats, StragglerDetector
from mcore.observe.nvtx import configure_nvtx_profiling, nvtx_range_pop, nvtx_range_push
from mcore.observe.straggler.exchange import ELAPSED, ETPT, encode_row, row_length
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, EventRanges, HostRanges
from mcore.observe.straggler.reporter import etpt_tf
from mcore.parallel.torch_compat import all_gather_single
from rank_testing import run_ranks

_NUM_RANGES = 1000
_MANY_RANKS = 16384
_FLOPS, _INTERVAL = 4.8e13, 10
_SENSORS = (60.0, 400.0, 97.0, 1980.0)  # C, W, %, MHz


def run() -> Iterable[Row]:
    """Yield the rows; the checks of agreement come before each timing."""
    ours, peer = _ours(1, 0), _peer(1, 0)
    yield _range_off(ours, peer)
    yield _range_on(ours, peer, HostRanges(), "on the CPU", target=6.0)
    events = EventRanges(make_event=_Event, is_capturing=lambda: False, prefill=2 * _NUM_RANGES)
    yield _range_on(ours, peer, events, "with stand-in events on both sides", target=None)
    yield _work_of_rank_0()
    for world in (2, 4, 8):
        yield from _report(world)
    yield from _nvtx()


def _peer_name() -> str:
    return f"megatron-core {version('megatron-core')}"


class _Event:
    """Takes the place of a CUDA event, at no cost, for both sides."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


def _ours(world: int, rank: int) -> StragglerDetector:
    StragglerDetector.reset_singleton()
    detector = StragglerDetector()
    detector.configure(world, rank, enabled=True, controller=False, telemetry=lambda: _SENSORS)
    return detector


def _peer(world: int, rank: int) -> Any:
    """The peer's detector as it is after its own configure() where there is CUDA."""
    utils: Any = import_module("megatron.core.utils")
    peer = utils.StragglerDetector()
    peer.configure(world, rank, enabled=False, port=0)
    peer.world, peer.rank, peer.dev = world, rank, torch.device("cpu")
    peer.mmcnt, peer.amp = 1, 3.0
    peer.evt_q = queue.LifoQueue()
    for _ in range(4 * _NUM_RANGES):
        peer.evt_q.put(_Event())
    _switch_peer(peer, True)
    temp_c, power_w, util_pct, clock_mhz = _SENSORS
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *args: None
    cuda.current_device = lambda: 0
    cuda.temperature = lambda *args: temp_c
    cuda.power_draw = lambda *args: power_w
    cuda.utilization = lambda *args: util_pct
    cuda.clock_rate = lambda *args: clock_mhz
    return peer


def _switch_peer(peer: Any, enabled: bool) -> None:
    peer._off = not enabled
    peer.start = peer.start_method if enabled else peer.null_method
    peer.stop = peer.stop_method if enabled else peer.null_method


def _many(detector: Any) -> Callable[[], None]:
    """Enter and leave the detector's range, with the least around it."""

    def enter_and_leave() -> None:
        for _ in range(_NUM_RANGES):
            with detector:
                pass

    return enter_and_leave


def _range_off(ours: StragglerDetector, peer: Any) -> Row:
    ours._set_enabled(False)
    _switch_peer(peer, False)
    ours_s, peer_s = paired(_many(ours), _many(peer), number=5, repeats=21)
    return _per_range("with detector: pass, off", ours_s, peer_s, 1.35, "nothing is timed")


def _range_on(
    ours: StragglerDetector, peer: Any, ranges: HostRanges, how: str, *, target: float | None
) -> Row:
    case = f"with detector: pass, on, {how}"
    ours._use_ranges(ranges)
    ours._set_enabled(True)
    _switch_peer(peer, True)
    our_ranges, peer_ranges = _many(ours), _many(peer)
    our_ranges()
    peer_ranges()
    counts = ranges.take()[COMPUTE_KIND].count, len(peer.start_gemm_tm)
    peer.reset()
    if counts != (_NUM_RANGES, _NUM_RANGES):
        return Row.disagreement(case, _peer_name(), f"{counts} ranges of {_NUM_RANGES}")

    def on_ours() -> None:
        our_ranges()
        ours.reset()

    def on_peer() -> None:
        peer_ranges()
        peer.reset()

    ours_s, peer_s = paired(on_ours, on_peer, number=2, repeats=21)
    return _per_range(case, ours_s, peer_s, target, "number of ranges", "reset included")


def _per_range(
    case: str, ours_s: float, peer_s: float, target: float | None, agreement: str, note: str = ""
) -> Row:
    return Row(
        case, ours_s / _NUM_RANGES, _peer_name(), peer_s / _NUM_RANGES, target, agreement, note
    )


class _LastLine(logging.Handler):
    """Keeps the last line that a logger wrote, without its time of day."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.line = ""
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Rtt" in text:
            self.line = text.partition(" | ")[2]


def _reports(ours: StragglerDetector, peer: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One range of each kind and a report, of both sides."""

    def report_of(detector: Any) -> Callable[[], Any]:
        def report() -> None:
            with detector:
                pass
            with detector(bdata=True):
                pass
            detector.report(_FLOPS, _INTERVAL)

        return report

    return report_of(ours), report_of(peer)


def _report(world: int) -> Iterator[Row]:
    measured = run_ranks(_time_reports, world, timeout_s=600)
    case = f"report with its line, {world} ranks"
    ours_line, peer_line, against_peer, against_torch = measured[0]
    if ours_line != peer_line or not ours_line:
        yield Row.disagreement(case, _peer_name(), f"{ours_line!r} against {peer_line!r}")
        return
    target = {2: 2.0, 4: 3.0}.get(world)  # none with more ranks than that on two cores
    ours_s, peer_s = against_peer
    yield Row(case, ours_s, _peer_name(), peer_s, target, "the logged line, to the letter")
    ours_s, torch_s = against_torch
    yield Row(case, ours_s, "torch's all-gather of one row, bare", torch_s)


_Pair = tuple[float, float]


def _time_reports() -> tuple[str, str, _Pair, _Pair]:
    """Log the same values once through both, then time reports of real ranges."""
    logging.disable(logging.NOTSET)
    world, rank = dist.get_world_size(), dist.get_rank()
    lines = _LastLine("mcore.observe.straggler"), _LastLine("megatron.core.utils")
    ours, peer = _ours(world, rank), _peer(world, rank)
    elapsed_ms, data_ms = 100.0 + rank, 7.0 - rank / 2
    clock = iter([0, int(elapsed_ms * 1e6), 0, int(data_ms * 1e6)])
    ours._use_ranges(HostRanges(now_ns=lambda: next(clock)))
    ours._set_enabled(True)
    peer.elapsed = lambda: (elapsed_ms, data_ms, *_SENSORS)
    report_ours, report_peer = _reports(ours, peer)
    report_ours()
    report_peer()
    texts = [handler.line for handler in lines]
    del peer.elapsed
    peer.reset()
    # Ranges of equal length by our clock, so that no rank stands out by chance.
    ours._use_ranges(HostRanges(now_ns=count(0, 1_000_000).__next__))
    ours._set_enabled(True)
    row = torch.zeros(row_length(2), dtype=torch.float64)
    rows = row.new_empty(world * row.numel())
    bare = partial(all_gather_single, rows, row, dist.group.WORLD)
    against_peer = paired(report_ours, report_peer, number=10, repeats=31)
    return texts[0], texts[1], against_peer, paired(report_ours, bare, number=10, repeats=31)


def _work_of_rank_0() -> Row:
    """A report of one process that plays rank 0; what the other ranks would send is there."""
    case = f"report on rank 0 of {_MANY_RANKS} simulated ranks"
    values = _values_of(_MANY_RANKS)
    lines = _LastLine("mcore.observe.straggler"), _LastLine("megatron.core.utils")
    with _simulated_world(_MANY_RANKS):
        ours, peer = _ours(_MANY_RANKS, 0), _peer(_MANY_RANKS, 0)
        matrix = _matrix_of(values, ours)
        report_ours, report_peer = _reports(ours, peer)
        with _received(matrix, _pickled(values)):
            report_ours()
            report_peer()
            if lines[0].line != lines[1].line or not lines[0].line:
                return Row.disagreement(
                    case, _peer_name(), f"{lines[0].line} against {lines[1].line}"
                )
            ours_s, peer_s = paired(report_ours, report_peer, number=1, repeats=11)
    return Row(case, ours_s, _peer_name(), peer_s, 50.0, "the logged line, to the letter")


def _values_of(world: int) -> torch.Tensor:
    """Seven metrics of a healthy job, ``[world, 7]``."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.tensor([100.0, 5.0, *_SENSORS, 0.0], dtype=torch.float64)
    noise = torch.randn(world, 7, generator=generator, dtype=torch.float64)
    values = (usual * (1 + 0.002 * noise)).round(decimals=4)
    elapsed_ms = values[:, 0].tolist()
    throughput = [
        etpt_tf(_FLOPS * world, each * _INTERVAL, world=world, amp=3.0) for each in elapsed_ms
    ]
    values[:, 6] = torch.tensor(throughput, dtype=torch.float64)
    return values


def _matrix_of(values: torch.Tensor, ours: StragglerDetector) -> torch.Tensor:
    reporter: Any = ours._reporter
    sections_hash = reporter.exchange.sections_hash
    stats = {kind: SectionStats(1, 1.0, 1.0, 1.0) for kind in (COMPUTE_KIND, DATA_KIND)}
    row = encode_row(
        sections_hash, stats, 2, enabled=True, wanted=True, log_interval=_INTERVAL,
        total_flops=_FLOPS,
    )  # fmt: skip
    matrix = row.repeat(len(values), 1)
    matrix[:, ELAPSED : ETPT + 1] = values
    matrix[:, 18] = values[:, 0]  # the median of the compute ranges
    return matrix


def _pickled(values: torch.Tensor) -> torch.Tensor:
    """What the peer's ranks send, ``[world, longest]`` uint8; a pickle may end before its row."""
    keys = ("time", "btime", "temp", "power", "util", "clock", "flops")
    pickles = [
        pickle.dumps({"rank": rank, **dict(zip(keys, row, strict=True))})
        for rank, row in enumerate(values.tolist())
    ]
    longest = max(map(len, pickles))
    padded = b"".join(each.ljust(longest, b"\0") for each in pickles)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(pickles), longest)


@contextmanager
def _received(matrix: torch.Tensor, pickles: torch.Tensor) -> Iterator[None]:
    """Let the collectives of both sides bring what all ranks would send, at the cost of a copy."""
    flat, ranks = matrix.flatten(), torch.arange(len(matrix)).view(torch.uint8).view(-1, 8)

    def all_gather_single(output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        if output.dtype == torch.uint8:  # names: version, hash, rank, host
            rows = output.view(len(matrix), -1)
            rows.copy_(own)
            rows[:, 16:24] = ranks
        else:
            output.copy_(flat)

    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, **kwargs: Any) -> None:
        _base_of(outputs[0]).fill_(pickles.shape[1])  # views of one tensor, one size each

    def gather(own: torch.Tensor, gather_list: list[torch.Tensor], **kwargs: Any) -> None:
        _base_of(gather_list[0]).copy_(pickles.flatten())

    # What torch.distributed.gather_object itself calls.
    torch_collectives: Any = import_module("torch.distributed.distributed_c10d")
    with (
        _replaced(exchange, all_gather_single=all_gather_single),
        _replaced(torch_collectives, all_gather=all_gather, gather=gather),
    ):
        yield


def _base_of(view: torch.Tensor) -> torch.Tensor:
    """The tensor of all messages, of which torch hands the collective one view each."""
    return view if view._base is None else view._base


@contextmanager
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _simulated_world(size: int) -> Iterator[None]:
    """Rank 0 of a world whose collectives answer at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _nvtx() -> Iterator[Row]:
    """Ranges named after the caller, and what they cost while off."""
    utils: Any = import_module("megatron.core.utils")
    names: list[str] = []
    stand_in: Any = torch.cuda.nvtx
    stand_in.range_push, stand_in.range_pop = names.append, lambda: None

    def ours() -> None:
        nvtx_range_push()
        nvtx_range_pop()

    def peer() -> None:
        utils.nvtx_range_push()
        utils.nvtx_range_pop()

    case = "nvtx_range_push() and _pop(), automatic message"
    configure_nvtx_profiling(True, backend="none")
    utils.configure_nvtx_profiling(True)
    try:
        nvtx_range_push()
        names += observe_nvtx._nvtx_range_messages
        nvtx_range_pop()
        utils.nvtx_range_push()
        utils.nvtx_range_pop()
        if names != [f"{__name__}._nvtx"] * 2:
            yield Row.disagreement(case, _peer_name(), f"the ranges are called {names}")
            return
        stand_in.range_push = lambda message: None
        ours_s, peer_s = paired(ours, peer, number=200, repeats=15)
        yield Row(case, ours_s, _peer_name(), peer_s, 50.0, "the message")
    finally:
        configure_nvtx_profiling(False)
        utils.configure_nvtx_profiling(False)
    ours_s, empty_s = paired(ours, _two_empty_calls, number=20_000, repeats=21)
    yield Row(
        "nvtx_range_push() and _pop(), off",
        ours_s,
        "two calls of an empty function",
        empty_s,
        1 / 1.15,
        "nothing is recorded",
    )


def _empty(msg: str | None = None, suffix: str | None = None) -> None:
    pass


def _two_empty_calls() -> None:
    _empty()
    _empty()
