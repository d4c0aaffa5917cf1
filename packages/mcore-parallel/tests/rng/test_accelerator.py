"""Random streams on the stand-in accelerator, whose generators share states as those of CUDA."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mcore.parallel import CudaRNGStatesTracker, checkpoint_context_fn, replay_rng_streams
from mcore.parallel.rng import state


@pytest.fixture
def tracker(accelerator):
    made = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    made.add("s1", 5)
    return made


@contextlib.contextmanager
def captured(device):
    """A block whose work is captured in a graph."""
    module = torch.get_device_module(device)
    with module.graph(module.CUDAGraph()):
        yield


def draw(device, generator=None):
    return torch.rand(4, device=device, generator=generator).cpu()


def test_a_snapshot_repeats_what_graphs_draw_from_registered_generators(accelerator, tracker):
    """A replayed graph reads the state of the generator that was registered at its capture."""
    registered = tracker.get_states()["s1"]
    now = tracker.snapshot()
    first = draw(accelerator, registered)
    with now:
        assert torch.equal(draw(accelerator, registered), first)
    expected = torch.Generator(accelerator).manual_seed(5)
    assert torch.equal(draw(accelerator, expected), first)
    assert torch.equal(draw(accelerator, registered), draw(accelerator, expected))


def test_a_snapshot_in_a_fork_repeats_fork_and_default_numbers(accelerator, tracker):
    registered = tracker.get_states()["s1"]
    with tracker.fork("s1"):
        now = tracker.snapshot()
        first = draw(accelerator)
    default = draw(accelerator)
    with now:
        assert torch.equal(draw(accelerator), first)
    after = torch.get_device_module(accelerator).get_rng_state()
    with tracker.snapshot():
        draw(accelerator)
    assert torch.equal(torch.get_device_module(accelerator).get_rng_state(), after)
    assert not torch.equal(draw(accelerator), default)
    expected = torch.Generator(accelerator).manual_seed(5)
    assert torch.equal(draw(accelerator, expected), first)
    assert torch.equal(draw(accelerator, registered), draw(accelerator, expected))


@pytest.mark.parametrize("graph_safe", [False, True])
def test_recomputed_dropout_is_the_same_and_streams_go_on(accelerator, graph_safe):
    def run(repeats):
        tracker = CudaRNGStatesTracker(graph_safe, device=accelerator)
        tracker.add("s1", 5)
        leaf = torch.ones(64, device=accelerator, requires_grad=True)

        def drop(hidden):
            with tracker.fork("s1"):
                return torch.nn.functional.dropout(hidden * 2, 0.5) * hidden

        if repeats:
            context = lambda: checkpoint_context_fn(tracker=tracker)  # noqa: E731
            output = checkpoint(drop, leaf, use_reentrant=False, context_fn=context)
        else:
            output = drop(leaf)
        output.sum().backward()
        with tracker.fork("s1"):
            return output.detach().cpu(), leaf.grad.cpu(), draw(accelerator)

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


def test_repeating_streams_inside_a_capture_is_refused(accelerator, tracker):
    now, repeat = tracker.snapshot(), replay_rng_streams(torch.rand, tracker=tracker)
    repeat(1, device=accelerator)
    refused = pytest.raises(RuntimeError, match=r"cannot be repeated inside a graph.*without a gra")
    with captured(accelerator):
        with refused:
            checkpoint_context_fn(tracker=tracker)
        with refused, now:
            pass
        with refused:
            repeat(1, device=accelerator)
    with tracker.fork("s1"):  # the streams are where they were
        drawn = draw(accelerator)
    expected = torch.Generator(accelerator).manual_seed(5)
    assert torch.equal(drawn, draw(accelerator, expected))


def test_forks_in_a_capture_make_no_generator(accelerator, tracker, monkeypatch):
    """CUDA refuses to seed a new generator while a graph is captured."""

    class Refused(torch.Generator):
        def __new__(cls, *_, **__):
            raise AssertionError("a generator was made")

    state._can_share_state.cache_clear()
    monkeypatch.setattr(torch, "Generator", Refused)
    with captured(accelerator), tracker.fork("s1"), tracker.fork("s1"):
        pass
