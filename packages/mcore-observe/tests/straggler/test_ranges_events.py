import threading
import time

import pytest
import torch

from mcore.observe import SectionStats, StragglerDetector
from mcore.observe.straggler.ranges import (
    COMPUTE_KIND,
    DATA_KIND,
    EventPool,
    EventRanges,
    HostRanges,
    make_ranges,
)

MS = 1_000_000

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Device:
    """A device and a host whose clocks pass when a test says so."""

    def __init__(self):
        self.device_ms = 0.0
        self.host_ns = 0
        self.is_capturing = False
        self.num_made = 0
        self.num_waits = 0

    def event(self):
        self.num_made += 1
        return StandInEvent(self)

    def work(self, device_ms, host_ms=0.0):
        self.device_ms += device_ms
        self.host_ns += int(host_ms * MS)


class StandInEvent:
    """Behaves as an event of torch: it has to be complete before its time can be asked for."""

    def __init__(self, device):
        self.device = device
        self.at_ms = None
        self.is_complete = False

    def record(self):
        self.at_ms, self.is_complete = self.device.device_ms, False
        if self.device.is_capturing:
            pytest.fail("an event was recorded into a graph")

    def synchronize(self):
        self.device.num_waits += 1
        self.is_complete = True

    def elapsed_time(self, end):
        if not end.is_complete and end.device.num_waits == 0:
            raise RuntimeError("device is not ready")
        return end.at_ms - self.at_ms


@pytest.fixture(autouse=True)
def leave_no_detector():
    StragglerDetector.reset_singleton()
    yield
    StragglerDetector.reset_singleton()


def new_detector(prefill=4, **kwargs):
    device = Device()
    ranges = EventRanges(
        make_event=device.event,
        is_capturing=lambda: device.is_capturing,
        prefill=prefill,
        now_ns=lambda: device.host_ns,
        **kwargs,
    )
    detector = StragglerDetector()
    detector._use_ranges(ranges)
    return detector, device


def test_slower_clock_counts_and_only_the_report_waits():
    detector, device = new_detector()
    assert device.num_made == 0
    detector._set_enabled(True)
    assert device.num_made == 4
    for device_ms, host_ms in ((5, 1), (1, 3)):
        with detector:
            device.work(device_ms, host_ms)
    assert device.num_waits == 0
    assert detector._ranges.take()[COMPUTE_KIND] == SectionStats(2, 8.0, 4.0, 5.0)
    assert device.num_waits == 1
    assert detector._ranges.take() == {}
    assert device.num_waits == 1


def test_data_ranges_use_the_host_alone():
    detector, device = new_detector(prefill=0)
    detector._set_enabled(True)
    with detector(bdata=True):
        device.work(50, 2)
    assert detector._ranges.take()[DATA_KIND].sum_ms == 2.0
    assert device.num_made == device.num_waits == 0


def test_events_are_used_again():
    detector, device = new_detector(prefill=2)
    detector._set_enabled(True)
    for _ in range(3):
        with detector, detector:
            device.work(1)
        detector._ranges.take()
    assert device.num_made == 4
    with detector:
        pass
    detector.reset()
    for _ in range(3):
        with pytest.raises(ValueError, match="x"), detector:
            raise ValueError("x")
    assert device.num_made == 4
    assert len(detector._ranges._pool._free) == 2
    detector._ranges.free()
    assert detector._ranges._pool.num_made == 0


def test_nested_and_sampled_ranges():
    detector, device = new_detector(sample_every=2)
    detector._set_enabled(True)
    for _ in range(2):
        with detector:
            device.work(1)
            with detector(bdata=True):
                device.work(0, 4)
    taken = detector._ranges.take()
    assert taken[COMPUTE_KIND] == SectionStats(1, 8.0, 4.0, 4.0)
    assert taken[DATA_KIND] == SectionStats(1, 8.0, 4.0, 4.0)


def test_nothing_is_timed_in_a_capture():
    detector, device = new_detector()
    detector._set_enabled(True)
    device.is_capturing = True
    with detector:
        device.work(1)
    device.is_capturing = False
    with detector:  # a capture that begins inside
        device.is_capturing = True
    device.is_capturing = False
    with detector:
        device.work(2)
    assert detector._ranges.skipped_capture == 2
    assert detector._ranges.take()[COMPUTE_KIND].count == 1
    assert len(detector._ranges._pool._free) == 2


def test_without_events_the_host_times_and_counts():
    detector, device = new_detector(prefill=2)
    detector._ranges._pool._capacity = 2
    detector._set_enabled(True)
    with detector, detector:
        device.work(9, 3)
    taken = detector._ranges.take()
    assert taken[COMPUTE_KIND] == SectionStats(2, 12.0, 6.0, 9.0)
    assert detector._ranges.dropped == 1
    assert device.num_made == 2


def test_each_thread_is_waited_for():
    detector, device = new_detector()
    detector._set_enabled(True)

    def work():
        with detector:
            device.work(1)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(300)
    assert detector._ranges.take()[COMPUTE_KIND].count == 2
    assert device.num_waits == 2


def test_a_range_on_another_stream_is_waited_for():
    class OtherStreamEvent(StandInEvent):
        def elapsed_time(self, end):
            if not end.is_complete:
                raise RuntimeError("device is not ready")
            return end.at_ms - self.at_ms

    detector, device = new_detector()
    detector._ranges._pool._make_event = lambda: OtherStreamEvent(device)
    detector._set_enabled(True)
    for _ in range(2):
        with detector:
            device.work(1)
    assert detector._ranges.take()[COMPUTE_KIND].sum_ms == 2.0


def test_long_intervals_keep_few_data_samples():
    detector, device = new_detector()
    detector._set_enabled(True)
    for _ in range(3000):
        with detector(bdata=True):
            device.work(0, 1)
    assert len(detector._local.ranges.pending[DATA_KIND]) < 1024
    assert detector._ranges.take()[DATA_KIND].count == 3000


def test_pool_never_exceeds_its_capacity():
    pool = EventPool(object, prefill=70_000)
    assert pool._capacity == 70_000
    pool = EventPool(object, prefill=1)
    assert pool._capacity == 65_536
    pool._capacity = 5
    pool.fill()
    pairs = [pool.take() for _ in range(3)]
    assert pairs[2] is None
    assert len({id(event) for pair in pairs[:2] for event in pair}) == 4
    assert pool.num_made == 4
    pool.give_back(pairs[:1])
    assert pool.take() is pairs[0]


def test_the_cpu_makes_no_events():
    assert type(make_ranges(torch.device("cpu"), prefill=4, sample_every=1)) is HostRanges


@pytest.mark.cuda
@needs_cuda
def test_cuda_range_lasts_as_long_as_the_kernels():
    """A range around queued kernels is far longer than the host needed to queue them."""
    detector = StragglerDetector()
    detector.configure(1, 0, enabled=True, controller=False)
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    with detector:
        for _ in range(50):
            matrix = (matrix @ matrix).tanh()
    queued_ms = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    done_ms = (time.perf_counter() - began) * 1e3
    delta_ms, *_ = detector.elapsed()
    assert queued_ms <= delta_ms + 1 <= done_ms + 2


@pytest.mark.cuda
@needs_cuda
def test_cuda_graph_capture_skips_ranges():
    """A captured range records no event, the capture works, and later ranges are timed."""
    detector = StragglerDetector()
    detector.configure(1, 0, enabled=True, controller=False)
    tensor, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), detector:
        tensor += 1
    graph.replay()
    with detector:
        tensor += 1
    skipped, delta_ms = detector.skipped_capture, detector.elapsed()[0]
    assert tensor.tolist() == [2.0] * 8
    assert skipped == 1
    assert delta_ms > 0


@pytest.mark.cuda
@needs_cuda
def test_cuda_ranges_of_two_streams_in_one_thread():
    """Both streams' events are complete when the times are read."""
    detector = StragglerDetector()
    detector.configure(1, 0, enabled=True, controller=False)
    matrix = torch.randn(2048, 2048, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()), detector:
        for _ in range(100):
            matrix = (matrix @ matrix).tanh()
    with detector:
        torch.zeros(1, device="cuda")
    delta_ms, *_ = detector.elapsed()
    assert delta_ms > 0
