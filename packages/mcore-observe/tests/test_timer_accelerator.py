"""Timers on the stand-in accelerator: on several streams, and while a graph is captured."""

import pytest
import torch

from mcore.observe.timers import Timer
from standin import no_host_waits


def test_ranges_on_several_streams_are_all_waited_for(accelerator):
    timer, side = Timer("t", sync=False), torch.Stream(accelerator)
    values = torch.ones(1000, device=accelerator)
    with no_host_waits():
        with side:
            timer.start()
            values.sum()
            timer.stop()
        timer.start()
        values.sum()
        timer.stop()
        timer.start()  # ends on another stream than it began on
        with side:
            timer.stop()
    assert timer.elapsed() > 0
    assert timer.elapsed() == 0


@pytest.mark.parametrize("sync", [True, False])
def test_a_timer_in_a_capture_neither_waits_nor_records(accelerator, sync):
    """The stand-in refuses both while it captures, as CUDA does."""
    module, timer = torch.get_device_module(accelerator), Timer("t", sync=sync)
    with module.graph(module.CUDAGraph()):
        timer.start()
        timer.stop()
    assert timer.elapsed() > 0 if sync else timer.elapsed() == 0
