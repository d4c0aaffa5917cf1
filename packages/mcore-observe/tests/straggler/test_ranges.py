import gc
import threading

import pytest

from mcore.observe import SectionStats, StragglerDetector
from mcore.observe.straggler.ranges import COMPUTE_KIND, DATA_KIND, HostRanges

MS = 1_000_000


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns

    def wait(self, ms):
        self.ns += int(ms * MS)


@pytest.fixture(autouse=True)
def leave_no_detector():
    yield
    StragglerDetector.reset_singleton()


def new_detector(ranges=None, **kwargs):
    clock = Clock()
    StragglerDetector.reset_singleton()
    detector = StragglerDetector()
    detector._use_ranges(ranges or HostRanges(now_ns=clock, **kwargs))
    detector._set_enabled(True)
    return detector, clock


def test_sum_median_and_longest():
    detector, clock = new_detector()
    for ms in (1, 2, 9):
        with detector:
            clock.wait(ms)
    assert detector._ranges.take() == {COMPUTE_KIND: SectionStats(3, 12.0, 2.0, 9.0)}
    assert detector._ranges.take() == {}


def test_nested_ranges_are_counted_once_each():
    detector, clock = new_detector()
    with detector:
        clock.wait(1)
        with detector(bdata=True):
            clock.wait(2)
        clock.wait(3)
    taken = detector._ranges.take()
    assert taken[COMPUTE_KIND] == SectionStats(1, 6.0, 6.0, 6.0)
    assert taken[DATA_KIND] == SectionStats(1, 2.0, 2.0, 2.0)


def test_mark_is_for_the_next_entry_only():
    detector, clock = new_detector()
    assert detector(bdata=True) is detector
    assert detector.bdata
    detector.start()
    assert not detector.bdata
    clock.wait(1)
    detector.stop()
    with detector:
        clock.wait(2)
    detector(bdata=True)
    detector(bdata=False)
    with detector:
        clock.wait(4)
    taken = detector._ranges.take()
    assert (taken[DATA_KIND].sum_ms, taken[COMPUTE_KIND].sum_ms) == (1.0, 6.0)


def test_mark_set_while_off_does_not_leak():
    detector, clock = new_detector()
    detector._set_enabled(False)
    with detector(bdata=True):
        clock.wait(1)
    detector._set_enabled(True)
    detector(bdata=True)
    detector._set_enabled(False)
    detector._set_enabled(True)
    with detector:
        clock.wait(2)
    assert list(detector._ranges.take()) == [COMPUTE_KIND]


def test_start_and_stop_are_what_the_state_says():
    detector, _ = new_detector()
    assert (detector.start, detector.stop) == (detector.start_method, detector.stop_method)
    detector._set_enabled(False)
    assert detector.start == detector.stop == detector.null_method
    assert detector._off
    assert not detector.enabled


def test_off_times_nothing():
    detector, clock = new_detector()
    detector._set_enabled(False)
    with detector:
        clock.wait(1)
    for open_range, close_range in (
        (detector.start, detector.stop),
        (detector.start_method, detector.stop_method),
    ):
        open_range()
        clock.wait(1)
        close_range()
    assert detector._ranges.take() == {}


def test_a_stop_too_many_does_nothing():
    detector, clock = new_detector()
    detector.stop()
    detector.start()
    clock.wait(1)
    detector.stop()
    detector.stop()
    assert detector._ranges.take()[COMPUTE_KIND].count == 1


def test_exception_drops_the_range_and_goes_on():
    detector, clock = new_detector()
    error = KeyError("mine")

    def fail():
        with detector:
            clock.wait(5)
            raise error

    with pytest.raises(KeyError) as caught:
        fail()
    assert caught.value is error
    with detector:
        clock.wait(1)
    assert detector._ranges.take()[COMPUTE_KIND] == SectionStats(1, 1.0, 1.0, 1.0)


def test_exception_in_an_inner_range_keeps_the_outer():
    detector, clock = new_detector()
    with detector:
        clock.wait(1)
        with pytest.raises(ValueError, match="inner"), detector(bdata=True):
            raise ValueError("inner")
        clock.wait(1)
    assert detector._ranges.take() == {COMPUTE_KIND: SectionStats(1, 2.0, 2.0, 2.0)}


def test_range_that_is_open_when_samples_are_taken_comes_later():
    detector, clock = new_detector()
    with detector:
        clock.wait(1)
        assert detector._ranges.take() == {}
        detector.reset()
        clock.wait(2)
    assert detector._ranges.take()[COMPUTE_KIND].sum_ms == 3.0


def test_turned_off_inside_a_range():
    """The range is kept for the next interval; those inside it while off are not timed."""
    detector, clock = new_detector()
    with detector:
        clock.wait(1)
        detector._set_enabled(False)
        with detector(bdata=True):
            clock.wait(2)
        with pytest.raises(OSError, match="inner"), detector:
            raise OSError("inner")
        assert not detector._idle
    assert detector._idle
    with detector:
        clock.wait(4)
    detector._set_enabled(True)
    assert detector._ranges.take() == {COMPUTE_KIND: SectionStats(1, 3.0, 3.0, 3.0)}


def test_turned_on_inside_a_range():
    detector, clock = new_detector()
    detector._set_enabled(False)
    with detector:
        clock.wait(1)
        detector._set_enabled(True)
        with detector(bdata=True):
            clock.wait(2)
    assert detector._ranges.take() == {DATA_KIND: SectionStats(1, 2.0, 2.0, 2.0)}


def test_turned_off_and_on_inside_ranges():
    detector, clock = new_detector()
    with detector:
        clock.wait(1)
        detector._set_enabled(False)
        with detector(bdata=True):
            clock.wait(1)
            detector._set_enabled(True)
            with detector(bdata=True):
                clock.wait(5)
    taken = detector._ranges.take()
    assert taken[COMPUTE_KIND].sum_ms == 7.0
    assert taken[DATA_KIND] == SectionStats(1, 5.0, 5.0, 5.0)


def test_only_each_nth_entry_of_a_kind_is_timed():
    detector, clock = new_detector(sample_every=3)
    for ms in (1, 100, 100, 2, 100, 100):
        with detector:
            clock.wait(ms)
            with detector(bdata=True):
                pass
    taken = detector._ranges.take()
    assert taken[COMPUTE_KIND] == SectionStats(2, 9.0, 1.5, 2.0)
    assert taken[DATA_KIND].count == 2
    with detector:
        clock.wait(7)
    with detector:
        clock.wait(100)
    assert detector._ranges.take()[COMPUTE_KIND].sum_ms == 21.0


def test_memory_is_bounded_and_the_median_is_of_the_last_1024():
    detector, clock = new_detector()
    for index in range(5000):
        with detector:
            clock.wait(10 if index < 5000 - 1024 else 1 + index % 2)
    ranges = detector._ranges
    assert len(detector._local.ranges.pending[COMPUTE_KIND]) < 1024
    expected = (5000 - 1024) * 10 + 1024 * 1.5
    assert ranges.take()[COMPUTE_KIND] == SectionStats(5000, expected, 1.5, 10.0)


def test_threads_have_ranges_of_their_own():
    detector, clock = new_detector()
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with detector(bdata=True):
            inside.set()
            go_on.wait(300)

    thread = threading.Thread(target=work)
    with detector:
        thread.start()
        assert inside.wait(300)
        clock.wait(1)
        assert detector._ranges.has_open()
        assert detector._ranges.take() == {}
    go_on.set()
    thread.join(300)
    taken = detector._ranges.take()
    assert taken[COMPUTE_KIND].sum_ms == taken[DATA_KIND].sum_ms == 1.0


def test_many_threads_lose_nothing():
    detector, _ = new_detector(HostRanges())
    counts, is_done = [], threading.Event()

    def work():
        for index in range(3000):
            with detector(bdata=index % 2 == 1):
                pass

    def take():
        while not is_done.wait(0.001):
            counts.append(detector._ranges.take())

    threads = [threading.Thread(target=work) for _ in range(4)]
    taker = threading.Thread(target=take)
    for thread in [taker, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    is_done.set()
    taker.join()
    counts.append(detector._ranges.take())
    for kind in (COMPUTE_KIND, DATA_KIND):
        assert sum(taken[kind].count for taken in counts if kind in taken) == 6000


def test_ended_threads_are_forgotten():
    detector, _ = new_detector()
    for _ in range(20):
        thread = threading.Thread(target=lambda: detector.__enter__().__exit__(None, None, None))
        thread.start()
        thread.join(300)
    gc.collect()
    assert detector._ranges.take()[COMPUTE_KIND].count == 20
    assert len(detector._ranges._threads) <= 1
