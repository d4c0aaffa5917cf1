"""The shared tracker of random number streams, this package's or TransformerEngine's."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mcore.parallel.rng import (
    CudaRNGStatesTracker,
    checkpoint_activations,
    get_all_rng_states,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    shared,
)
from mcore.versioning import clear_version_cache

pytestmark = pytest.mark.usefixtures("no_tracker_yet")


def warned(function: Any, *args: Any, **kwargs: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    # a collection of garbage may find what an earlier test has left open
    return [one for one in caught if one.category is not ResourceWarning]


def test_the_first_call_makes_the_tracker_and_all_others_return_it() -> None:
    tracker = get_cuda_rng_tracker()
    assert type(tracker) is CudaRNGStatesTracker
    assert not tracker.is_initialized()
    initialize_rng_tracker()
    assert get_cuda_rng_tracker() is tracker


def test_threads_that_ask_at_once_get_one_tracker() -> None:
    barrier, found = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(get_cuda_rng_tracker())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(tracker) for tracker in found}) == 1


def test_flags_choose_the_kind() -> None:
    graphable = get_cuda_rng_tracker(use_cudagraphable_rng=True)
    assert is_graph_safe_cuda_rng_tracker(graphable)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    inference = get_cuda_rng_tracker()
    assert inference is not graphable
    assert inference.is_inference_rng_tracker
    assert not is_graph_safe_cuda_rng_tracker(inference)
    assert not is_graph_safe_cuda_rng_tracker(object())


@pytest.mark.parametrize(
    "ask",
    [
        get_cuda_rng_tracker,
        initialize_rng_tracker,
        functools.partial(model_parallel_cuda_manual_seed, 1),
    ],
)
def test_other_flags_than_the_trackers_warn_once_and_change_nothing(ask: Any) -> None:
    tracker = get_cuda_rng_tracker(inference_rng_tracker=True)
    (warning,) = warned(ask, use_cudagraphable_rng=True)
    assert "already initialised with" in str(warning.message)
    assert "inference_rng_tracker=True, use_cudagraphable_rng=False. Requested" in str(
        warning.message
    )
    assert "force_reset" in str(warning.message)
    assert warning.filename == __file__
    assert warned(ask, use_cudagraphable_rng=True) == []
    assert get_cuda_rng_tracker() is tracker


def test_defaults_and_the_trackers_own_flags_never_warn() -> None:
    get_cuda_rng_tracker(use_cudagraphable_rng=True)
    for flags in ({}, {"use_cudagraphable_rng": True}):
        assert warned(get_cuda_rng_tracker, **flags) == []
        assert warned(initialize_rng_tracker, **flags) == []
    assert warned(initialize_rng_tracker, inference_rng_tracker=True, force_reset=True) == []


def test_all_states_are_those_of_the_shared_tracker() -> None:
    assert get_all_rng_states() == {}
    assert shared._shared is None
    tracker = get_cuda_rng_tracker(use_cudagraphable_rng=True)
    tracker.add("a", 1)
    states = get_all_rng_states()
    assert list(states) == ["a"]
    assert isinstance(states["a"], torch.Generator)
    assert states["a"].initial_seed() == 1
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    assert get_all_rng_states() == {}


# TransformerEngine is played by a module with a tracker of the same interface, on the CPU.


class EngineTracker:
    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise Exception("seed exists")
        self.seeds_.add(seed)
        if name in self.states_:
            raise Exception("name exists")
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        previous = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        yield
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(previous)


class InstallEngine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, version: str | None, tracker: Any = EngineTracker) -> None:
        clear_version_cache()
        modules: dict[str, Any] = dict.fromkeys(
            ("transformer_engine", "transformer_engine.pytorch"), None
        )
        if version is not None:
            modules = {name: types.ModuleType(name) for name in modules}
            modules["transformer_engine"].__version__ = version
            distributed = types.ModuleType("transformer_engine.pytorch.distributed")
            if tracker is not None:
                distributed.CudaRNGStatesTracker = tracker  # type: ignore[attr-defined]
            modules[distributed.__name__] = distributed
        for name, module in modules.items():
            self.monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def install_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[InstallEngine]:
    yield InstallEngine(monkeypatch)
    clear_version_cache()


def test_without_transformer_engine_the_own_tracker_is_used_with_one_logged_warning(
    install_engine: InstallEngine, caplog: pytest.LogCaptureFixture
) -> None:
    install_engine(None)
    with caplog.at_level(logging.WARNING):
        tracker = get_cuda_rng_tracker(use_te_rng_tracker=True)
        assert get_cuda_rng_tracker(use_te_rng_tracker=True) is tracker
    assert type(tracker) is CudaRNGStatesTracker
    (record,) = [one for one in caplog.records if one.name.startswith("mcore.")]
    assert record.levelno == logging.WARNING
    assert "TransformerEngine is not installed" in record.getMessage()


def test_an_old_transformer_engine_is_refused_and_the_tracker_kept(
    install_engine: InstallEngine,
) -> None:
    tracker = get_cuda_rng_tracker()
    install_engine("1.4.0")
    with pytest.raises(RuntimeError, match=r">= 1\.5\.0, found 1\.4\.0"):
        initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    assert get_cuda_rng_tracker() is tracker


def test_a_transformer_engine_without_a_tracker_is_refused(install_engine: InstallEngine) -> None:
    install_engine("2.1.0", tracker=None)
    with pytest.raises(RuntimeError, match=r"2\.1\.0 is installed, but its tracker"):
        get_cuda_rng_tracker(use_te_rng_tracker=True)


@pytest.mark.parametrize("version", ["1.5.0", "2.1.0"])
def test_the_tracker_of_transformer_engine_gets_the_checks_of_this_package(
    install_engine: InstallEngine, version: str
) -> None:
    install_engine(version)
    tracker = get_cuda_rng_tracker(use_te_rng_tracker=True)
    assert isinstance(tracker, EngineTracker)
    assert is_graph_safe_cuda_rng_tracker(tracker)
    assert not tracker.is_initialized()
    tracker.add("a", 1234)
    assert tracker.is_initialized()
    with pytest.raises(ValueError, match="seed 1234 already exists"):
        tracker.add("b", 1234)
    with pytest.raises(ValueError, match="cuda rng state a already exists"):
        tracker.add("a", 6)
    tracker.add("c", 6)  # a refused name left its seed free
    with tracker.fork("a", check_cpu=False):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(1234)))


def test_states_of_the_tracker_of_transformer_engine(install_engine: InstallEngine) -> None:
    install_engine("2.1.0")
    tracker = get_cuda_rng_tracker(use_te_rng_tracker=True)
    tracker.add("a", 1)
    saved = tracker.get_states(clone=True)
    assert saved["a"] is not tracker.get_states()["a"]
    assert list(get_all_rng_states()) == ["a"]
    tracker.reset()
    assert not tracker.is_initialized()
    tracker.set_states(saved)
    assert tracker.is_initialized()
    saved.clear()
    assert list(tracker.get_states()) == ["a"]
    tracker.add("b", 1)  # seeds are forgotten with the states they made


def test_a_checkpoint_repeats_the_streams_of_transformer_engine(
    install_engine: InstallEngine,
) -> None:
    install_engine("2.1.0")
    tracker = get_cuda_rng_tracker(use_te_rng_tracker=True)
    tracker.add("a", 1)

    def dropped(hidden: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            return torch.nn.functional.dropout(hidden) ** 2

    hidden = torch.ones(64, requires_grad=True)
    outputs = [checkpoint_activations(dropped, False, hidden) for _ in range(2)]
    states = tracker.get_states()
    for output in outputs:
        hidden.grad = None
        output.sum().backward()
        assert torch.equal(hidden.grad, 2 * output.detach())
    assert torch.equal(tracker.get_states()["a"], states["a"])
    with pytest.raises(ValueError, match="seed 1 already exists"):
        tracker.add("b", 1)


def test_the_inference_tracker_of_transformer_engine_leaves_the_numbers_alone(
    install_engine: InstallEngine,
) -> None:
    install_engine("2.1.0")
    tracker = get_cuda_rng_tracker(use_te_rng_tracker=True, inference_rng_tracker=True)
    tracker.add("a", 1)
    tracker.set_states({"a": 1})
    assert tracker.is_inference_rng_tracker
    assert tracker.get_states() == {}
    before = torch.get_rng_state()
    with tracker.fork("never added"):
        assert torch.equal(torch.get_rng_state(), before)


def test_seeding_gives_the_tracker_of_transformer_engine_its_streams(
    install_engine: InstallEngine,
) -> None:
    install_engine("2.1.0")
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True, tp_rank=1, device="cpu")
    tracker = get_cuda_rng_tracker()
    assert isinstance(tracker, EngineTracker)
    assert list(tracker.get_states()) == [
        "data-parallel-rng",
        "model-parallel-rng",
        "expert-parallel-rng",
    ]
    with tracker.fork():
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(3953)))


def test_two_trackers_of_transformer_engine_have_one_class(install_engine: InstallEngine) -> None:
    install_engine("2.1.0")
    first = get_cuda_rng_tracker(use_te_rng_tracker=True)
    initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
    assert get_cuda_rng_tracker() is not first
    assert type(get_cuda_rng_tracker()) is type(first)
