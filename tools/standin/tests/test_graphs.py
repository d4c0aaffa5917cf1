"""Captures refuse what CUDA refuses, and replays compute on the memory of the capture."""

import pytest
import torch

from standin.tests.test_recording import WAITS


def module():
    return torch.get_device_module("standin")


def capture(function, pool=None):
    graph = module().CUDAGraph()
    with module().graph(graph, pool=pool):
        made = function()
    return graph, made


def test_a_replay_computes_from_the_present_inputs(accelerator):
    source, total = torch.ones(3, device=accelerator), torch.zeros(3, device=accelerator)
    pinned, target = torch.ones(2).pin_memory(), torch.zeros(2, device=accelerator)

    def work():
        total.add_(source)
        target.copy_(pinned, non_blocking=True)
        return (source * 2).exp()

    graph, made = capture(work)
    assert made.isnan().all()
    assert total.tolist() == [0.0] * 3
    for value in (2.0, 0.0):
        source.fill_(value)
        pinned.fill_(value)
        graph.replay()
        assert torch.equal(made, torch.full_like(made, 2 * value).exp())
        assert target.tolist() == [value] * 2
    assert total.tolist() == [2.0] * 3


def test_a_replay_draws_new_numbers(accelerator):
    torch.manual_seed(1)
    graph, made = capture(lambda: torch.rand(3, device=accelerator))
    drawn = [graph.replay() or made.tolist() for _ in range(2)]
    torch.manual_seed(1)
    assert drawn == [torch.rand(3).tolist() for _ in range(2)]


def test_a_replay_spoils_graphs_captured_later_into_its_pool(accelerator):
    pool = module().graph_pool_handle()
    one = torch.ones(2, device=accelerator)
    first, _ = capture(lambda: one * 2, pool)
    second, made = capture(lambda: one * 3, pool)
    other, apart = capture(lambda: one * 4)
    for graph in (first, second, other):
        graph.replay()
    assert made.tolist() == [3.0, 3.0]
    first.replay()
    assert made.isnan().all()
    assert apart.tolist() == [4.0, 4.0]


REFUSED = {
    **WAITS,
    "pageable source": lambda x: x.copy_(torch.ones(4), non_blocking=True),
    "event query": lambda x: torch.accelerator.current_stream().record_event().query(),
    "new generator": lambda x: torch.Generator(x.device),
    "seed": lambda x: torch.manual_seed(1),
    "pinned memory": lambda x: torch.empty(2, pin_memory=True),
    "capture": lambda x: capture(lambda: x + 1),
}


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_work_that_cannot_be_captured_is_refused(accelerator, work):
    tensor = torch.ones(4, device=accelerator)
    if work is not REFUSED["capture"]:
        work(tensor)
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(lambda: work(tensor))
    assert not module().is_current_stream_capturing()
    assert tensor.tolist() == [1.0] * 4


def test_events_and_streams_of_captures(accelerator):
    event = torch.Event(accelerator, enable_timing=True)
    capture(event.record)
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="non-default stream"):
        module().CUDAGraph().capture_begin()
