import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.observe import Timer
from mcore.observe.timers import DeviceClock, DisabledTimer, HostClock
from rank_testing import run_ranks


class StepClock:
    """Ranges of 1, 2, 3 ... seconds."""

    def __init__(self):
        self.started = self.seconds = 0

    def start(self):
        self.started += 1

    def stop(self):
        self.seconds += self.started

    def take(self):
        seconds, self.seconds = self.seconds, 0
        return seconds


def test_ranges_add_up_until_the_reset():
    timer = Timer("t", clock=StepClock())
    for _ in range(3):
        timer.start()
        timer.stop()
    assert timer.elapsed(reset=False) == 6
    assert timer.elapsed() == 6
    assert timer.elapsed() == 0
    assert timer.active_time() == 6


def test_a_running_timer_goes_on():
    timer = Timer("t", clock=StepClock())
    timer.start()
    assert timer.elapsed() == 1
    assert timer.is_running
    timer.stop()
    assert timer.elapsed() == 2


def test_reset_drops_the_open_range():
    timer = Timer("t", clock=StepClock())
    timer.start()
    timer.reset()
    assert timer.elapsed() == 0
    with pytest.raises(RuntimeError, match="'t' is not running"):
        timer.stop()


def test_set_elapsed_replaces_what_was_measured():
    timer = Timer("t", clock=StepClock())
    timer.start()
    timer.stop()
    timer.set_elapsed(2.5)
    assert timer.elapsed() == 2.5
    assert timer.active_time() == 1


def test_starting_twice_and_stopping_what_does_not_run():
    timer = Timer("t")
    with pytest.raises(RuntimeError, match="is not running"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="already running"):
        timer.start()


def test_seconds_of_the_host():
    timer, began = Timer("t"), time.perf_counter()
    timer.start(barrier=True)  # no ranks to wait for
    time.sleep(0.05)
    timer.stop(barrier=True)
    assert 0.05 <= timer.elapsed() <= time.perf_counter() - began


def test_host_clock_waits_for_the_accelerator_only_when_asked(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    for sync, expected in ((True, 2), (False, 0)):
        waits.clear()
        clock = HostClock(sync=sync)
        clock.start()
        clock.stop()
        assert len(waits) == expected


def test_disabled_timer():
    timer = DisabledTimer()
    timer.start()
    timer.start()
    timer.stop()
    timer.reset()
    timer.set_elapsed(1.0)
    for read in (timer.elapsed, timer.active_time):
        with pytest.raises(RuntimeError, match="disabled"):
            read()


class FakeDevice:
    """A device whose queue runs when it is waited for; each event is one millisecond on."""

    def __init__(self):
        self.recorded = self.finished = 0
        self.made = self.waits = 0

    def make_event(self):
        self.made += 1
        event = SimpleNamespace(at=None)

        def record():
            self.recorded += 1
            event.at = self.recorded

        def synchronize():
            self.waits += 1
            self.finished = max(self.finished, event.at)

        event.record = record
        event.synchronize = synchronize
        event.query = lambda: event.at <= self.finished
        event.elapsed_time = lambda end: float(end.at - event.at)
        return event


def test_device_clock_waits_only_when_it_is_read_and_uses_events_again():
    device = FakeDevice()
    clock = DeviceClock(device.make_event)
    for _ in range(2):
        for _ in range(3):
            clock.start()
            clock.stop()
        assert clock.take() == pytest.approx(0.003)
    assert clock.take() == 0.0
    assert (device.waits, device.made) == (2, 6)


class Event:
    """An event of a stream that ends late or not: it has a time once the host has waited for it."""

    def __init__(self, at, is_done):
        self.at, self.is_done = at, is_done

    def record(self):
        pass

    def query(self):
        return self.is_done

    def synchronize(self):
        self.is_done = True

    def elapsed_time(self, end):
        if not (self.is_done and end.is_done):
            raise RuntimeError("both events must be completed")
        return end.at - self.at


@pytest.mark.parametrize("late", [{1}, {0}, {0, 1}, {2, 3}])
def test_device_clock_reads_ranges_of_streams_that_end_out_of_order(late):
    events = iter([Event(at, number not in late) for number, at in enumerate((0, 5, 6, 8))])
    clock = DeviceClock(lambda: next(events))
    for _ in range(2):
        clock.start()
        clock.stop()
    assert clock.take() == pytest.approx(0.007)


@pytest.mark.parametrize("captured", [[True], [False, True]])
def test_device_clock_leaves_out_ranges_in_a_capture(captured):
    device, capturing = FakeDevice(), iter([False, False, *captured, False, False])
    clock = DeviceClock(device.make_event, lambda: next(capturing))
    for _ in range(3):
        clock.start()
        clock.stop()
    assert clock.take() == pytest.approx(0.002)


def test_device_clock_does_not_collect_events_without_end():
    device = FakeDevice()
    clock = DeviceClock(device.make_event)
    for _ in range(10_000):
        clock.start()
        clock.stop()
        device.finished = device.recorded - 10  # the device lags five ranges behind
    assert device.made < 600
    assert device.waits == 0
    assert clock.take() == pytest.approx(10.0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sync", [True, False])
def test_time_of_a_kernel_on_the_device(sync):
    """Both clocks see the time that a kernel of known length takes on the device."""
    timer = Timer("t", sync=sync)
    timer.start()
    torch.cuda._sleep(1_000_000_000)
    timer.stop()
    assert timer.elapsed() > 0.2


def sleep_then_stop():
    timer = Timer("t")
    timer.set_barrier_group(dist.group.WORLD)
    timer.start()
    dist.barrier()  # none sleeps before the other's timer runs
    time.sleep(0.3 if dist.get_rank() == 1 else 0.0)
    timer.stop(barrier=True)
    return timer.elapsed()


def test_a_barrier_waits_for_the_slowest_rank():
    assert min(run_ranks(sleep_then_stop, 2)) >= 0.3
