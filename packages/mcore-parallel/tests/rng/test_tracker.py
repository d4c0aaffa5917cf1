"""Named streams of random numbers: forks, states, refusals."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel.rng import (
    _MODEL_PARALLEL_RNG_TRACKER_NAME,
    CudaRNGStatesTracker,
    RNGStatesTracker,
    UnknownRngStreamError,
    convert_cuda_rng_state,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
)
from mcore.parallel.rng.tracker import (
    _DATA_PARALLEL_RNG_TRACKER_NAME,
    _EXPERT_PARALLEL_RNG_TRACKER_NAME,
)

EACH_DEVICE = pytest.mark.usefixtures("on_each_device")  # draws are of the default device
BOTH_MODES = pytest.mark.parametrize("graph_safe", [False, True], ids=["plain", "graph-safe"])
SEEDS = {"s1": 11, "s2": 22}


def new_generator(seed: int) -> torch.Generator:
    """A separate generator of the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def make_tracker(graph_safe: bool, **seeds: int) -> CudaRNGStatesTracker:
    tracker = CudaRNGStatesTracker(graph_safe, device=torch.get_default_device())
    for name, seed in (seeds or SEEDS).items():
        tracker.add(name, seed)
    return tracker


def numbers(seed: int, count: int) -> list[float]:
    """The first draws, one at a time, of a separate generator."""
    generator = new_generator(seed)
    return [torch.rand(1, generator=generator).item() for _ in range(count)]


def draw() -> float:
    return torch.rand(1).item()


def test_the_names_of_the_streams() -> None:
    assert _MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    assert get_expert_parallel_rng_tracker_name() == _EXPERT_PARALLEL_RNG_TRACKER_NAME
    assert get_data_parallel_rng_tracker_name() == _DATA_PARALLEL_RNG_TRACKER_NAME
    assert _EXPERT_PARALLEL_RNG_TRACKER_NAME == "expert-parallel-rng"
    assert _DATA_PARALLEL_RNG_TRACKER_NAME == "data-parallel-rng"
    assert RNGStatesTracker is CudaRNGStatesTracker


@EACH_DEVICE
@BOTH_MODES
def test_a_fork_draws_from_the_stream_and_leaves_the_default_numbers(
    graph_safe: bool, default_state: Callable[[], torch.Tensor]
) -> None:
    before = default_state()
    tracker = make_tracker(graph_safe, a=1234)
    assert torch.equal(default_state(), before)
    with tracker.fork("a"):
        drawn = torch.rand(3)
    generator = new_generator(1234)
    assert torch.equal(drawn, torch.rand(3, generator=generator))
    assert torch.equal(default_state(), before)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=generator))


@EACH_DEVICE
def test_the_default_name_is_the_model_parallel_stream() -> None:
    tracker = make_tracker(False, **{"model-parallel-rng": 3})
    with tracker.fork():
        assert draw() == numbers(3, 1)[0]


@EACH_DEVICE
@BOTH_MODES
def test_nested_forks_of_both_streams_give_the_numbers_of_single_ones(graph_safe: bool) -> None:
    tracker = make_tracker(graph_safe)
    x, y = [], []
    with tracker.fork("s1"):
        x.append(draw())
        with tracker.fork("s2"):
            y.append(draw())
            with tracker.fork("s1"):
                x.append(draw())
            y.append(draw())
        x.append(draw())
    assert x == numbers(SEEDS["s1"], 3)
    assert y == numbers(SEEDS["s2"], 2)
    for name, seed in SEEDS.items():
        expected = new_generator(seed)
        torch.rand(1, generator=expected)
        torch.rand(1, generator=expected)
        if name == "s1":
            torch.rand(1, generator=expected)
        stored = convert_cuda_rng_state(tracker.get_states()[name])
        assert torch.equal(stored, expected.get_state())


@st.composite
def walks(draw_value: st.DrawFn) -> list[tuple[str, str]]:
    """Enter and leave forks, draw in between, in any order that nests."""
    steps, depth = [], 0
    for _ in range(draw_value(st.integers(1, 25))):
        kinds = ["enter", "draw"] + (["leave"] if depth else [])
        kind = draw_value(st.sampled_from(kinds))
        depth += {"enter": 1, "draw": 0, "leave": -1}[kind]
        steps.append((kind, draw_value(st.sampled_from(sorted(SEEDS)))))
    return steps


@BOTH_MODES
@settings(deadline=None)
@given(steps=walks())
def test_any_nesting_gives_each_stream_its_own_sequence(
    graph_safe: bool, steps: list[tuple[str, str]]
) -> None:
    torch.manual_seed(99)
    tracker = make_tracker(graph_safe)
    drawn: dict[str, list[float]] = {"s1": [], "s2": [], "default": []}
    open_forks: list[tuple[str, Any]] = []
    for kind, name in steps:
        if kind == "enter":
            open_forks.append((name, tracker.fork(name)))
            open_forks[-1][1].__enter__()
        elif kind == "leave":
            open_forks.pop()[1].__exit__(None, None, None)
        else:
            drawn[open_forks[-1][0] if open_forks else "default"].append(draw())
    while open_forks:
        open_forks.pop()[1].__exit__(None, None, None)
    drawn["default"].append(draw())
    for name, seed in {**SEEDS, "default": 99}.items():
        assert drawn[name] == numbers(seed, len(drawn[name]))


@EACH_DEVICE
@BOTH_MODES
def test_an_exception_leaves_the_fork_unchanged_and_the_stream_where_it_stood(
    graph_safe: bool, default_state: Callable[[], torch.Tensor]
) -> None:
    tracker = make_tracker(graph_safe)
    before, error = default_state(), RuntimeError("from the body")

    def body() -> None:
        with tracker.fork("s1"), tracker.fork("s2"):
            draw()
            raise error

    with pytest.raises(RuntimeError) as caught:
        body()
    assert caught.value is error
    assert torch.equal(default_state(), before)
    with tracker.fork("s2"):
        assert draw() == numbers(SEEDS["s2"], 2)[1]


def test_an_unknown_stream_raises_a_key_error_at_the_with_and_changes_nothing(
    default_state: Callable[[], torch.Tensor],
) -> None:
    tracker = make_tracker(False)
    before, entered = default_state(), False
    pending = tracker.fork("missing")
    with pytest.raises(KeyError) as caught, pending:
        entered = True
    assert not entered
    assert str(caught.value) == "cuda rng state missing is not added"
    assert isinstance(caught.value, UnknownRngStreamError)
    assert torch.equal(default_state(), before)


@BOTH_MODES
def test_a_refused_name_or_seed_changes_nothing(graph_safe: bool) -> None:
    tracker = make_tracker(graph_safe, a=1234)
    with pytest.raises(ValueError, match=r"^seed 1234 already exists$"):
        tracker.add("b", 1234)
    tracker.add("b", 5)
    with pytest.raises(ValueError, match=r"^cuda rng state a already exists$"):
        tracker.add("a", 6)
    tracker.add("c", 6)
    assert sorted(tracker.get_states()) == ["a", "b", "c"]
    assert tracker.seeds_ == {1234, 5, 6}


def test_a_seed_that_torch_refuses_does_not_initialise_the_tracker() -> None:
    tracker = CudaRNGStatesTracker(device=torch.get_default_device())
    with pytest.raises(ValueError, match="Overflow"):
        tracker.add("a", 2**70)
    assert not tracker.is_initialized()
    assert tracker.get_states() == {}
    assert tracker.seeds_ == set()


def test_initialised_by_add_or_set_states_until_reset() -> None:
    tracker = CudaRNGStatesTracker(device=torch.get_default_device())
    assert not tracker.is_initialized()
    tracker.add("a", 1)
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.is_initialized()
    assert tracker.get_states() == {}
    assert tracker.seeds_ == set()
    tracker.set_states({})
    assert tracker.is_initialized()


@BOTH_MODES
def test_states_that_were_saved_repeat_the_numbers(graph_safe: bool) -> None:
    tracker = make_tracker(graph_safe)
    saved = tracker.get_states(clone=graph_safe)
    with tracker.fork("s1"):
        first = draw()
    tracker.set_states(saved)
    for _ in range(2):  # the second time shows that the draws left the saved states alone
        with tracker.fork("s1"):
            assert draw() == first
        tracker.set_states(saved)
    tracker.add("again", SEEDS["s1"])  # seeds are free after set_states


@BOTH_MODES
def test_the_dicts_of_states_are_copies(graph_safe: bool) -> None:
    tracker = make_tracker(graph_safe)
    states = tracker.get_states()
    states.clear()
    given_states = tracker.get_states()
    tracker.set_states(given_states)
    given_states.clear()
    assert sorted(tracker.get_states()) == ["s1", "s2"]
    copies = tracker.get_states(clone=True)
    assert all(copies[name] is not tracker.states_[name] for name in SEEDS)


@EACH_DEVICE
def test_states_of_plain_streams_survive_pickling() -> None:
    tracker = make_tracker(False)
    restored = CudaRNGStatesTracker(device=torch.get_default_device())
    restored.set_states(pickle.loads(pickle.dumps(tracker.get_states())))
    with restored.fork("s2"):
        assert draw() == numbers(SEEDS["s2"], 1)[0]


@EACH_DEVICE
@BOTH_MODES
def test_states_read_inside_a_fork_are_those_of_the_moment(graph_safe: bool) -> None:
    tracker = make_tracker(graph_safe)
    with tracker.fork("s1"):
        draw()
        saved = tracker.get_states(clone=True)
        second = draw()
    tracker.set_states(saved)
    with tracker.fork("s1"):
        assert draw() == second == numbers(SEEDS["s1"], 2)[1]


@pytest.mark.parametrize("value", ["state", 1, None])
def test_values_are_looked_at_only_when_they_are_used(
    value: object, default_state: Callable[[], torch.Tensor]
) -> None:
    tracker = CudaRNGStatesTracker(device=torch.get_default_device())
    tracker.set_states({"a": value})
    assert tracker.get_states() == {"a": value}
    before = default_state()
    with pytest.raises(TypeError, match="rng state"), tracker.fork("a"):
        pass
    assert torch.equal(default_state(), before)


@EACH_DEVICE
@BOTH_MODES
def test_states_change_between_plain_and_graph_safe_trackers(graph_safe: bool) -> None:
    source, target = (
        make_tracker(graph_safe),
        CudaRNGStatesTracker(not graph_safe, device=torch.get_default_device()),
    )
    with source.fork("s1"):
        draw()
    target.set_states(
        {
            name: convert_cuda_rng_state(
                state, to_graphable=not graph_safe, device=torch.get_default_device()
            )
            for name, state in source.get_states().items()
        }
    )
    with target.fork("s1"):
        assert draw() == numbers(SEEDS["s1"], 2)[1]


@EACH_DEVICE
@BOTH_MODES
def test_a_reset_inside_a_fork_keeps_the_new_streams(
    graph_safe: bool, default_state: Callable[[], torch.Tensor]
) -> None:
    tracker = make_tracker(graph_safe)
    before = default_state()
    with tracker.fork("s1"), tracker.fork("s2"):
        draw()
        tracker.reset()
        tracker.add("s2", 33)
        with tracker.fork("s2"):
            assert draw() == numbers(33, 1)[0]
    assert torch.equal(default_state(), before)
    assert list(tracker.get_states()) == ["s2"]
    with tracker.fork("s2"):
        assert draw() == numbers(33, 2)[1]


@EACH_DEVICE
def test_an_inference_tracker_leaves_the_numbers_alone() -> None:
    tracker = CudaRNGStatesTracker(is_inference_rng_tracker=True)
    tracker.add("a", 1)
    tracker.add("a", 1)
    tracker.set_states({"a": "anything"})
    assert tracker.is_inference_rng_tracker
    assert tracker.get_states() == {}
    torch.manual_seed(4)
    with tracker.fork("never added"), tracker.fork():
        assert draw() == numbers(4, 1)[0]
    assert draw() == numbers(4, 2)[1]
    assert not CudaRNGStatesTracker().is_inference_rng_tracker


def test_a_cpu_tracker_never_warns_about_the_cpu(recwarn: pytest.WarningsRecorder) -> None:
    tracker = make_tracker(False)
    with tracker.fork("s1"):
        draw()
    assert not [one for one in recwarn if one.category is not ResourceWarning]  # of garbage


def test_the_device_is_decided_at_first_use_and_held_by_streams() -> None:
    tracker = CudaRNGStatesTracker(device="cuda:99")
    with pytest.raises(RuntimeError, match="cuda:99"):
        tracker.add("a", 1)
    tracker.device = "cpu"
    tracker.add("a", 1)
    assert tracker.device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"\['a'\] are on cpu"):
        tracker.device = "cpu"


@EACH_DEVICE
@BOTH_MODES
def test_a_snapshot_repeats_all_numbers_any_number_of_times(graph_safe: bool) -> None:
    torch.manual_seed(99)
    tracker = make_tracker(graph_safe)

    def draws() -> list[float]:
        with tracker.fork("s2"), tracker.fork("s1"):
            nested = draw()
        return [draw(), nested, draw()]

    with tracker.fork("s1"):
        first = draw()
        now = tracker.snapshot()
        drawn = draws()
    assert [first, *drawn] == [numbers(SEEDS["s1"], 4)[place] for place in (0, 2, 1, 3)]
    for _ in range(2):
        with now:
            assert draws() == drawn
            with now:
                assert draws() == drawn
    assert draw() == numbers(99, 1)[0]
    with tracker.fork("s1"):
        assert draw() == numbers(SEEDS["s1"], 5)[4]


# Forks that close out of order, and seeds that mean the same numbers.


@EACH_DEVICE
@BOTH_MODES
def test_a_fork_that_closes_before_an_inner_one_is_an_error_and_every_stream_is_intact(
    graph_safe: bool,
) -> None:
    torch.manual_seed(99)
    tracker = make_tracker(graph_safe)
    first, second = tracker.fork("s1"), tracker.fork("s2")
    drawn: dict[str, list[float]] = {"s1": [], "s2": [], "default": [draw()]}
    first.__enter__()
    drawn["s1"].append(draw())
    second.__enter__()
    drawn["s2"].append(draw())
    with pytest.raises(
        RuntimeError, match=r"fork of s1 closed while a fork of s2, opened inside it"
    ):
        first.__exit__(None, None, None)
    drawn["s2"].append(draw())
    with tracker.fork("s1"):
        drawn["s1"].append(draw())
    drawn["s2"].append(draw())
    second.__exit__(None, None, None)
    drawn["default"].append(draw())
    for name, seed in {**SEEDS, "default": 99}.items():
        with tracker.fork(name) if name in SEEDS else contextlib.nullcontext():
            assert [*drawn[name], draw()] == numbers(seed, len(drawn[name]) + 1), name


def test_an_error_on_its_way_is_not_replaced_by_one_about_the_order() -> None:
    tracker, error = make_tracker(False), RuntimeError("from the body")
    first, second = tracker.fork("s1"), tracker.fork("s2")
    first.__enter__()
    second.__enter__()
    assert not first.__exit__(RuntimeError, error, None)
    second.__exit__(None, None, None)
    assert tracker.get_states().keys() == SEEDS.keys()


@EACH_DEVICE
def test_a_generator_that_is_closed_late_leaves_the_streams_intact() -> None:
    torch.manual_seed(99)
    tracker = make_tracker(False)

    def draws() -> Iterator[float]:
        with tracker.fork("s1"):
            while True:
                yield draw()

    suspended = draws()
    next(suspended)
    with tracker.fork("s2"):
        suspended.close()
        assert draw() == numbers(SEEDS["s2"], 1)[0]
    assert draw() == numbers(99, 1)[0]
    with tracker.fork("s1"):
        assert draw() == numbers(SEEDS["s1"], 2)[1]


@settings(deadline=None)
@given(steps=walks(), positions=st.lists(st.integers(0, 5), min_size=25, max_size=25))
def test_any_order_of_closing_keeps_every_stream(
    steps: list[tuple[str, str]], positions: list[int]
) -> None:
    torch.manual_seed(99)
    tracker = make_tracker(False)
    drawn: dict[str, list[float]] = {"s1": [], "s2": [], "default": []}
    open_forks: list[tuple[str, Any]] = []

    def close(position: int) -> None:
        index = position % len(open_forks)
        is_innermost = index == len(open_forks) - 1
        _, fork = open_forks.pop(index)
        expected = contextlib.nullcontext() if is_innermost else pytest.raises(RuntimeError)
        with expected:
            fork.__exit__(None, None, None)

    for (kind, name), position in zip(steps, positions, strict=False):
        if kind == "enter":
            open_forks.append((name, tracker.fork(name)))
            open_forks[-1][1].__enter__()
        elif kind == "leave":
            close(position)
        else:
            drawn[open_forks[-1][0] if open_forks else "default"].append(draw())
    while open_forks:
        close(positions[len(open_forks) - 1])
    drawn["default"].append(draw())
    for name, seed in {**SEEDS, "default": 99}.items():
        assert drawn[name] == numbers(seed, len(drawn[name]))


@EACH_DEVICE
def test_a_fork_decorates_a_function_and_one_fork_cannot_be_open_twice() -> None:
    tracker = make_tracker(False)
    assert [tracker.fork("s1")(draw)() for _ in range(2)] == numbers(SEEDS["s1"], 2)
    decorated = tracker.fork("s2")(lambda depth: [draw(), *(decorated(depth - 1) if depth else [])])
    assert decorated(2) == numbers(SEEDS["s2"], 3)
    fork = tracker.fork("s1")
    with fork, pytest.raises(RuntimeError, match="fork of s1 is already open"), fork:
        pass
    with fork:
        assert draw() == numbers(SEEDS["s1"], 3)[2]


@BOTH_MODES
@pytest.mark.parametrize("kind", [np.int64, np.uint32, torch.tensor])
def test_a_seed_may_be_an_integer_of_another_library(kind: Any, graph_safe: bool) -> None:
    tracker = CudaRNGStatesTracker(graph_safe, device=torch.get_default_device())
    tracker.add("a", kind(7))
    with tracker.fork("a"):
        assert draw() == numbers(7, 1)[0]
    assert [type(seed) for seed in tracker.seeds_] == [int]
    with pytest.raises(ValueError, match=r"^seed 7 already exists$"):
        tracker.add("b", 7)


def test_two_seeds_of_the_same_numbers_are_one_seed() -> None:
    tracker = CudaRNGStatesTracker(device=torch.get_default_device())
    tracker.add("a", -1)
    with pytest.raises(ValueError, match=r"^seed 18446744073709551615 already exists, as -1$"):
        tracker.add("b", 2**64 - 1)
    tracker.add("b", 2**64 - 5)
    with pytest.raises(ValueError, match=r"^seed -5 already exists, as 18446744073709551611$"):
        tracker.add("c", -5)
    assert sorted(tracker.get_states()) == ["a", "b"]


@pytest.mark.parametrize("seed", [1.0, "1", None, np.float64(1)])
def test_a_seed_that_is_no_integer_is_refused(seed: Any) -> None:
    tracker = CudaRNGStatesTracker(device=torch.get_default_device())
    with pytest.raises(TypeError, match=r"seed of stream a must be an int, got .*(1|None)"):
        tracker.add("a", seed)
    assert not tracker.is_initialized()


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
@BOTH_MODES
def test_nested_forks_on_a_gpu(graph_safe: bool) -> None:
    """Checks on a GPU that nesting keeps each stream's sequence, by state and by handle."""
    tracker = CudaRNGStatesTracker(graph_safe)
    for name, seed in SEEDS.items():
        tracker.add(name, seed)
    before, x = torch.cuda.get_rng_state(), []
    with tracker.fork("s1"):
        x.append(torch.rand(4, device="cuda"))
        with tracker.fork("s2"), tracker.fork("s1"):
            x.append(torch.rand(4, device="cuda"))
        x.append(torch.rand(4, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(SEEDS["s1"])
    for drawn in x:
        assert torch.equal(drawn, torch.rand(4, device="cuda", generator=generator))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.cuda
@needs_cuda
def test_draws_on_the_cpu_inside_a_fork_of_a_gpu_warn_once() -> None:
    """Checks the warning about CPU draws: once for a tracker, and off with check_cpu=False."""
    tracker = CudaRNGStatesTracker()
    tracker.add("s1", 1)
    with tracker.fork("s1", check_cpu=False):
        draw()
    message = "CPU RNG state changed within GPU RNG context"
    with pytest.warns(RuntimeWarning, match=message), tracker.fork("s1"):
        draw()
    with warnings.catch_warnings(), tracker.fork("s1"):
        warnings.simplefilter("error")
        draw()


@pytest.mark.cuda
@needs_cuda
def test_a_graph_replays_new_numbers_of_a_captured_fork() -> None:
    """Checks that replays of a CUDA graph advance the captured stream like eager draws."""
    tracker = CudaRNGStatesTracker(use_cudagraphable_rng=True)
    tracker.add("s1", 5)
    graph, output = torch.cuda.CUDAGraph(), torch.empty(8, device="cuda")
    graph.register_generator_state(tracker.get_states()["s1"])
    with torch.cuda.graph(graph), tracker.fork("s1", check_cpu=False):
        output.uniform_()
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(output.clone())
    generator = torch.Generator("cuda").manual_seed(5)
    expected = [torch.empty(8, device="cuda").uniform_(generator=generator) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))
