import gc
import threading

import pytest

from mcore.observe.straggler.range_switch import RangeSwitch
from mcore.observe.straggler.section_stats import SectionStats
from mcore.observe.straggler.timing import COMPUTE_KIND, DATA_KIND, HostRanges

MS = 1_000_000


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns

    def wait(self, ms):
        self.ns += int(ms * MS)


def new_switch(**kwargs):
    clock = Clock()
    switch = RangeSwitch()
    switch._use_ranges(HostRanges(now_ns=clock, **kwargs))
    switch._set_enabled(True)
    return switch, clock


def test_sum_median_and_longest():
    switch, clock = new_switch()
    for ms in (1, 2, 9):
        with switch:
            clock.wait(ms)
    assert switch._ranges.take() == {COMPUTE_KIND: SectionStats(3, 12.0, 2.0, 9.0)}
    assert switch._ranges.take() == {}


def test_nested_ranges_are_counted_once_each():
    switch, clock = new_switch()
    with switch:
        clock.wait(1)
        with switch(bdata=True):
            clock.wait(2)
        clock.wait(3)
    taken = switch._ranges.take()
    assert taken[COMPUTE_KIND] == SectionStats(1, 6.0, 6.0, 6.0)
    assert taken[DATA_KIND] == SectionStats(1, 2.0, 2.0, 2.0)


def test_mark_is_for_the_next_entry_only():
    switch, clock = new_switch()
    assert switch(bdata=True) is switch
    assert switch.bdata
    switch.start()
    assert not switch.bdata
    clock.wait(1)
    switch.stop()
    with switch:
        clock.wait(2)
    switch(bdata=True)
    switch(bdata=False)
    with switch:
        clock.wait(4)
    taken = switch._ranges.take()
    assert (taken[DATA_KIND].sum_ms, taken[COMPUTE_KIND].sum_ms) == (1.0, 6.0)


def test_mark_set_while_off_does_not_leak():
    switch, clock = new_switch()
    switch._set_enabled(False)
    with switch(bdata=True):
        clock.wait(1)
    switch._set_enabled(True)
    switch(bdata=True)
    switch._set_enabled(False)
    switch._set_enabled(True)
    with switch:
        clock.wait(2)
    assert list(switch._ranges.take()) == [COMPUTE_KIND]


def test_start_and_stop_are_what_the_state_says():
    switch, _ = new_switch()
    assert (switch.start, switch.stop) == (switch.start_method, switch.stop_method)
    switch._set_enabled(False)
    assert switch.start == switch.stop == switch.null_method
    assert switch._off
    assert not switch.enabled


def test_off_times_nothing():
    switch, clock = new_switch()
    switch._set_enabled(False)
    with switch:
        clock.wait(1)
    for open_range, close_range in (
        (switch.start, switch.stop),
        (switch.start_method, switch.stop_method),
    ):
        open_range()
        clock.wait(1)
        close_range()
    assert switch._ranges.take() == {}


def test_a_stop_too_many_does_nothing():
    switch, clock = new_switch()
    switch.stop()
    switch.start()
    clock.wait(1)
    switch.stop()
    switch.stop()
    assert switch._ranges.take()[COMPUTE_KIND].count == 1


def test_exception_drops_the_range_and_goes_on():
    switch, clock = new_switch()
    error = KeyError("mine")

    def fail():
        with switch:
            clock.wait(5)
            raise error

    with pytest.raises(KeyError) as caught:
        fail()
    assert caught.value is error
    with switch:
        clock.wait(1)
    assert switch._ranges.take()[COMPUTE_KIND] == SectionStats(1, 1.0, 1.0, 1.0)


def test_exception_in_an_inner_range_keeps_the_outer():
    switch, clock = new_switch()
    with switch:
        clock.wait(1)
        with pytest.raises(ValueError, match="inner"), switch(bdata=True):
            raise ValueError("inner")
        clock.wait(1)
    assert switch._ranges.take() == {COMPUTE_KIND: SectionStats(1, 2.0, 2.0, 2.0)}


def test_range_that_is_open_when_samples_are_taken_comes_later():
    switch, clock = new_switch()
    with switch:
        clock.wait(1)
        assert switch._ranges.take() == {}
        switch.reset()
        clock.wait(2)
    assert switch._ranges.take()[COMPUTE_KIND].sum_ms == 3.0


def test_turned_off_inside_a_range():
    """The range is kept for the next interval; those inside it while off are not timed."""
    switch, clock = new_switch()
    with switch:
        clock.wait(1)
        switch._set_enabled(False)
        with switch(bdata=True):
            clock.wait(2)
        with pytest.raises(OSError, match="inner"), switch:
            raise OSError("inner")
        assert not switch._idle
    assert switch._idle
    with switch:
        clock.wait(4)
    switch._set_enabled(True)
    assert switch._ranges.take() == {COMPUTE_KIND: SectionStats(1, 3.0, 3.0, 3.0)}


def test_turned_on_inside_a_range():
    switch, clock = new_switch()
    switch._set_enabled(False)
    with switch:
        clock.wait(1)
        switch._set_enabled(True)
        with switch(bdata=True):
            clock.wait(2)
    assert switch._ranges.take() == {DATA_KIND: SectionStats(1, 2.0, 2.0, 2.0)}


def test_turned_off_and_on_inside_ranges():
    switch, clock = new_switch()
    with switch:
        clock.wait(1)
        switch._set_enabled(False)
        with switch(bdata=True):
            clock.wait(1)
            switch._set_enabled(True)
            with switch(bdata=True):
                clock.wait(5)
    taken = switch._ranges.take()
    assert taken[COMPUTE_KIND].sum_ms == 7.0
    assert taken[DATA_KIND] == SectionStats(1, 5.0, 5.0, 5.0)


def test_only_each_nth_entry_of_a_kind_is_timed():
    switch, clock = new_switch(sample_every=3)
    for ms in (1, 100, 100, 2, 100, 100):
        with switch:
            clock.wait(ms)
            with switch(bdata=True):
                pass
    taken = switch._ranges.take()
    assert taken[COMPUTE_KIND] == SectionStats(2, 9.0, 1.5, 2.0)
    assert taken[DATA_KIND].count == 2
    with switch:
        clock.wait(7)
    with switch:
        clock.wait(100)
    assert switch._ranges.take()[COMPUTE_KIND].sum_ms == 21.0


def test_memory_is_bounded_and_the_median_is_of_the_last_1024():
    switch, clock = new_switch()
    for index in range(5000):
        with switch:
            clock.wait(10 if index < 5000 - 1024 else 1 + index % 2)
    ranges = switch._ranges
    assert len(switch._local.ranges.pending[COMPUTE_KIND]) < 1024
    expected = (5000 - 1024) * 10 + 1024 * 1.5
    assert ranges.take()[COMPUTE_KIND] == SectionStats(5000, expected, 1.5, 10.0)


def test_threads_have_ranges_of_their_own():
    switch, clock = new_switch()
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with switch(bdata=True):
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=work)
    with switch:
        thread.start()
        assert inside.wait(30)
        clock.wait(1)
        assert switch._ranges.has_open()
        assert switch._ranges.take() == {}
    go_on.set()
    thread.join(30)
    taken = switch._ranges.take()
    assert taken[COMPUTE_KIND].sum_ms == taken[DATA_KIND].sum_ms == 1.0


def test_many_threads_lose_nothing():
    switch = RangeSwitch()
    switch._use_ranges(HostRanges())
    switch._set_enabled(True)
    counts, is_done = [], threading.Event()

    def work():
        for index in range(3000):
            with switch(bdata=index % 2 == 1):
                pass

    def take():
        while not is_done.wait(0.001):
            counts.append(switch._ranges.take())

    threads = [threading.Thread(target=work) for _ in range(4)]
    taker = threading.Thread(target=take)
    for thread in [taker, *threads]:
        thread.start()
    for thread in threads:
        thread.join(60)
    is_done.set()
    taker.join(60)
    counts.append(switch._ranges.take())
    for kind in (COMPUTE_KIND, DATA_KIND):
        assert sum(taken[kind].count for taken in counts if kind in taken) == 6000


def test_ended_threads_are_forgotten():
    switch, _ = new_switch()
    for _ in range(20):
        thread = threading.Thread(target=lambda: switch.__enter__().__exit__(None, None, None))
        thread.start()
        thread.join(30)
    gc.collect()
    assert switch._ranges.take()[COMPUTE_KIND].count == 20
    assert len(switch._ranges._threads) <= 1
