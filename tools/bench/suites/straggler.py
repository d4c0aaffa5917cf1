"""The straggler detector and NVTX ranges against megatron-core's, each as a black box.

- megatron-core's detector needs CUDA: its events and sensors are stand-ins that cost nothing. Its
  NVTX needs CUDA too: the backend does nothing on either side.
- Reports run on gloo ranks of one machine, with one range of each kind. On two CPUs the ratio with
  four ranks varies from 3 to 7. On 16384 simulated ranks all messages arrive at once.
- A report of ours also judges each rank by its last 20 reports, which the peer does not. Of the
  1.2 ms with two ranks that is 0.45 ms on each rank. An earlier version without a model of noise
  took 0.76 ms in the same hour, 1.24 times as fast as the peer. Since then the times of sections
  are judged at once, few values without torch, and the noise only of ranks that seem slow.
"""

from __future__ import annotations

import logging
import pickle
import queue
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import mcore.observe.nvtx as observe_nvtx
import mcore.observe.straggler.exchange as exchange
from bench.measure import Row, compare, paired
from bench.peers import megatron, name_of, simulated_world
from mcore.observe import SectionStats, StragglerDetector
from mcore.observe.nvtx import configure_nvtx_profiling, nvtx_range_pop, nvtx_range_push
from mcore.observe.straggler.exchange import ELAPSED, ETPT, encode_row
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, HostRanges
from mcore.observe.straggler.reporter import etpt_tf
from rank_testing import run_ranks

_NUM_RANGES = 1000
_MANY_RANKS = 16384
_FLOPS, _INTERVAL = 4.8e13, 10
_SAME_LINE = "the logged line, to the letter"
_SENSORS = (60.0, 400.0, 97.0, 1980.0)  # C, W, %, MHz


def run() -> Iterable[Row]:
    """Yield the rows. Results are compared before each timing."""
    ours, peer = _make_ours(1, 0), _make_peer(1, 0)
    yield _compare_range(ours, peer, None, "off", 1.35)
    yield _compare_range(ours, peer, HostRanges(), "on, on the CPU", 6.0)
    yield _compare_rank_0()
    for world in (2, 4, 8):
        yield from _compare_reports(world)
    yield from _compare_nvtx()


class _Event:
    """A stand-in for a CUDA event, for both sides."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


def _make_ours(world: int, rank: int) -> StragglerDetector:
    StragglerDetector.reset_singleton()
    detector = StragglerDetector()
    detector.configure(world, rank, enabled=True, controller=False, telemetry=lambda: _SENSORS)
    return detector


def _make_peer(world: int, rank: int) -> Any:
    """The peer's detector in the state that its configure() leaves with CUDA."""
    peer = megatron("utils").StragglerDetector()
    peer.configure(world, rank, enabled=False, port=0)
    peer.world, peer.rank, peer.dev = world, rank, torch.device("cpu")
    peer.mmcnt, peer.amp = 1, 3.0
    peer.evt_q = queue.LifoQueue()
    for _ in range(4 * _NUM_RANGES):
        peer.evt_q.put(_Event())
    _switch_peer(peer, True)
    sensors = zip(("temperature", "power_draw", "utilization", "clock_rate"), _SENSORS, strict=True)
    for name, value in (("synchronize", None), ("current_device", 0), *sensors):
        setattr(torch.cuda, name, lambda *_, value=value: value)
    return peer


def _switch_peer(peer: Any, enabled: bool) -> None:
    peer._off = not enabled
    peer.start = peer.start_method if enabled else peer.null_method
    peer.stop = peer.stop_method if enabled else peer.null_method


def _repeat_range(detector: Any) -> None:
    """Enter and leave the detector's range, with the least around it."""
    for _ in range(_NUM_RANGES):
        with detector:
            pass


def _repeat_and_reset(detector: Any) -> None:
    _repeat_range(detector)
    detector.reset()


def _compare_range(
    ours: StragglerDetector, peer: Any, ranges: HostRanges | None, kind: str, target: float | None
) -> Row:
    """A range of two detectors, which are off without ``ranges``."""
    is_on = ranges is not None
    if ranges is not None:
        ours._use_ranges(ranges)
    ours._set_enabled(is_on)
    _switch_peer(peer, is_on)
    _repeat_range(ours)
    _repeat_range(peer)
    counts = ranges.take()[COMPUTE_KIND].count if ranges is not None else 0, len(peer.start_gemm_tm)
    peer.reset()
    work = _repeat_and_reset if is_on else _repeat_range
    return compare(
        f"with detector: pass, {kind}", partial(work, ours), name_of(), partial(work, peer), target,
        agreement="number of ranges" if is_on else "nothing is timed",
        difference="" if counts == (_NUM_RANGES * is_on,) * 2 else f"{counts} ranges",
        number=2 if is_on else 5, repeats=21, calls=_NUM_RANGES,
        note="reset included" if is_on else "",
    )  # fmt: skip


class _LastLine(logging.Handler):
    """Keeps the last line of a logger, without its time of day."""

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


def _report_once(detector: Any) -> None:
    """One range of each kind and a report."""
    with detector:
        pass
    with detector(bdata=True):
        pass
    detector.report(_FLOPS, _INTERVAL)


def _compare_reports(world: int) -> Iterator[Row]:
    case = f"report with its line, {world} ranks"
    lines, ours_s, peer_s = run_ranks(_time_reports, world, timeout_s=600)[0]
    if lines[0] != lines[1] or not lines[0]:
        yield Row.disagreement(case, name_of(), f"{lines[0]!r} against {lines[1]!r}")
        return
    target = {2: 2.0, 4: 3.0}.get(world)  # none for more ranks than two cores can run
    yield Row(case, ours_s, name_of(), peer_s, target, _SAME_LINE)


def _time_reports() -> tuple[list[str], float, float]:
    """Log the same values once through both, then time reports of real ranges."""
    logging.disable(logging.NOTSET)
    world, rank = dist.get_world_size(), dist.get_rank()
    lines = _LastLine("mcore.observe.straggler"), _LastLine("megatron.core.utils")
    ours, peer = _make_ours(world, rank), _make_peer(world, rank)
    elapsed_ms, data_ms = 100.0 + rank, 7.0 - rank / 2
    clock = iter([0, int(elapsed_ms * 1e6), 0, int(data_ms * 1e6)])
    ours._use_ranges(HostRanges(now_ns=lambda: next(clock)))
    ours._set_enabled(True)
    peer.elapsed = lambda: (elapsed_ms, data_ms, *_SENSORS)
    _report_once(ours)
    _report_once(peer)
    texts = [handler.line for handler in lines]
    del peer.elapsed
    peer.reset()
    # Ranges of equal length by our clock: no rank is an outlier by chance.
    ours._use_ranges(HostRanges(now_ns=count(0, 1_000_000).__next__))
    ours._set_enabled(True)
    sides = partial(_report_once, ours), partial(_report_once, peer)
    return texts, *paired(*sides, number=10, repeats=31)


def _compare_rank_0() -> Row:
    """A report of one process that plays rank 0. The other ranks' messages are prepared."""
    values = _make_values(_MANY_RANKS)
    lines = _LastLine("mcore.observe.straggler"), _LastLine("megatron.core.utils")
    with simulated_world(_MANY_RANKS):
        ours, peer = _make_ours(_MANY_RANKS, 0), _make_peer(_MANY_RANKS, 0)
        with _deliver(_make_matrix(values, ours), _pickle_rows(values)):
            _report_once(ours)
            _report_once(peer)
            ours_line, peer_line = (handler.line for handler in lines)
            is_same = ours_line == peer_line and ours_line
            return compare(
                f"report on rank 0 of {_MANY_RANKS} simulated ranks", partial(_report_once, ours),
                name_of(), partial(_report_once, peer), 50.0, agreement=_SAME_LINE,
                difference="" if is_same else f"{ours_line} against {peer_line}", repeats=11,
            )  # fmt: skip


def _make_values(world: int) -> torch.Tensor:
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


def _make_matrix(values: torch.Tensor, ours: StragglerDetector) -> torch.Tensor:
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


def _pickle_rows(values: torch.Tensor) -> torch.Tensor:
    """The peer's messages, ``[world, longest]`` uint8. A pickle may end before its row."""
    keys = ("time", "btime", "temp", "power", "util", "clock", "flops")
    pickles = [
        pickle.dumps({"rank": rank, **dict(zip(keys, row, strict=True))})
        for rank, row in enumerate(values.tolist())
    ]
    longest = max(map(len, pickles))
    padded = b"".join(each.ljust(longest, b"\0") for each in pickles)
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(len(pickles), longest)


@contextmanager
def _deliver(matrix: torch.Tensor, pickles: torch.Tensor) -> Iterator[None]:
    """Have the collectives of both sides deliver all ranks' messages, at the cost of a copy."""
    flat, ranks = matrix.flatten(), torch.arange(len(matrix)).view(torch.uint8).view(-1, 8)

    def all_gather_single(output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        if output.dtype == torch.uint8:  # names: version, hash, rank, host
            rows = output.view(len(matrix), -1)
            rows.copy_(own)
            rows[:, 16:24] = ranks
        else:
            output.copy_(flat)

    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, **kwargs: Any) -> None:
        _find_base(outputs[0]).fill_(pickles.shape[1])  # views of one tensor, one size each

    def gather(own: torch.Tensor, gather_list: list[torch.Tensor], **kwargs: Any) -> None:
        _find_base(gather_list[0]).copy_(pickles.flatten())

    # gather_object calls these two.
    torch_collectives = import_module("torch.distributed.distributed_c10d")
    with (
        patch.object(exchange, "all_gather_single", all_gather_single),
        patch.multiple(torch_collectives, all_gather=all_gather, gather=gather),
    ):
        yield


def _find_base(view: torch.Tensor) -> torch.Tensor:
    """The tensor of all messages. torch gives the collective one view of it for each."""
    return view if view._base is None else view._base


def _compare_nvtx() -> Iterator[Row]:
    """Ranges named after the caller, and their cost while off."""
    utils = megatron("utils")
    names: list[str] = []
    stand_in: Any = torch.cuda.nvtx
    stand_in.range_push, stand_in.range_pop = names.append, lambda: None

    def ours() -> None:
        nvtx_range_push()
        nvtx_range_pop()

    def peer() -> None:
        utils.nvtx_range_push()
        utils.nvtx_range_pop()

    configure_nvtx_profiling(True, backend="none")
    utils.configure_nvtx_profiling(True)
    try:
        nvtx_range_push()
        names += observe_nvtx._nvtx_range_messages
        nvtx_range_pop()
        utils.nvtx_range_push()
        utils.nvtx_range_pop()
        is_same = names == [f"{__name__}._compare_nvtx"] * 2
        stand_in.range_push = lambda message: None
        yield compare(
            "nvtx_range_push() and _pop(), automatic message", ours, name_of(), peer, 50.0,
            agreement="the message", difference="" if is_same else f"the ranges are {names}",
            number=200, repeats=15,
        )  # fmt: skip
    finally:
        configure_nvtx_profiling(False)
        utils.configure_nvtx_profiling(False)
    yield compare(
        "nvtx_range_push() and _pop(), off", ours, "two calls of an empty function",
        _call_twice, 1 / 1.15, agreement="nothing is recorded", number=20_000, repeats=21,
    )  # fmt: skip


def _do_nothing(msg: str | None = None, suffix: str | None = None) -> None:
    pass


def _call_twice() -> None:
    _do_nothing()
    _do_nothing()
