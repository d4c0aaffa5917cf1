import sys
import types

import pytest
import torch

import mcore.observe.nvtx as nvtx
from mcore.observe import configure_nvtx_profiling, nvtx_decorator, nvtx_range
from mcore.observe.nvtx import Pins, select_backend

COLOURS = {None: "green by default", "blue": 0x0000FF, "#ff0000": 0xFF0000}


class FakeDomain:
    """Records what an ``nvtx`` domain is asked for, and refuses colours as the package does."""

    def __init__(self, name):
        self.name, self.calls, self.attributes_made = name, [], 0

    def get_event_attributes(self, message=None, color=None):
        if color not in COLOURS:
            raise TypeError(f"Invalid color {color}")
        self.attributes_made += 1
        return (message, COLOURS[color])

    def push_range(self, attributes):
        self.calls.append(("push", attributes))

    def pop_range(self):
        self.calls.append(("pop",))

    def start_range(self, attributes):
        self.calls.append(("start", attributes))
        return 17

    def end_range(self, range_id):
        self.calls.append(("end", range_id))


@pytest.fixture
def domain(monkeypatch):
    package, made = types.ModuleType("nvtx"), FakeDomain("mcore")
    package.get_domain = {"mcore": made}.__getitem__
    monkeypatch.setitem(sys.modules, "nvtx", package)
    yield made
    configure_nvtx_profiling(False)


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    yield monkeypatch
    configure_nvtx_profiling(False)


@pytest.mark.parametrize("backend", ["auto", "nvtx"])
def test_the_nvtx_package(domain, backend):
    @nvtx_decorator(message="life", color="#ff0000")
    def generator():
        yield

    configure_nvtx_profiling(True, backend=backend)
    with nvtx_range("a", color="blue"), nvtx_range("b"):
        list(generator())
    assert domain.calls == [
        ("push", ("a", 0x0000FF)),
        ("push", ("b", "green by default")),
        ("start", ("life", 0xFF0000)),
        ("end", 17),
        ("pop",),
        ("pop",),
    ]


def test_attributes_are_made_once_for_each_look(domain):
    configure_nvtx_profiling(True, backend="nvtx")
    for color in (None, "blue", None, "blue"):
        with nvtx_range("a", color=color):
            pass
    assert domain.attributes_made == 2


def test_a_colour_that_the_package_refuses_is_one_warning(domain, caplog):
    configure_nvtx_profiling(True, backend="nvtx")
    for message in ("a", "b"):
        with nvtx_range(message, color="mauve"):
            pass
    assert domain.calls[0] == ("push", ("a", "green by default"))
    (record,) = caplog.records
    assert "'mauve'" in record.getMessage()


def test_a_missing_package_is_named_with_its_extra(no_package):
    with pytest.raises(RuntimeError, match=r'pip install "mcore-observe\[nvtx\]"'):
        configure_nvtx_profiling(True, backend="nvtx")
    assert nvtx._nvtx_enabled is False


def test_an_unusable_package_is_passed_over(monkeypatch, no_package):
    monkeypatch.setitem(sys.modules, "nvtx", types.ModuleType("nvtx"))  # too old: no get_domain
    with pytest.raises(RuntimeError, match="get_domain"):
        select_backend("nvtx")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend("auto").name == "record"


def test_auto_without_a_gpu_is_the_torch_profiler(no_package):
    no_package.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend("auto").name == "record"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build has NVTX calls")
def test_a_build_without_nvtx_calls(no_package):
    with pytest.raises(RuntimeError, match="install a CUDA build of torch"):
        configure_nvtx_profiling(True, backend="torch.cuda.nvtx")
    no_package.setattr(torch.cuda, "is_available", lambda: True)
    assert select_backend("auto").name == "record"


def test_torch_nvtx_calls(monkeypatch, no_package):
    calls = []
    for name in ("range_push", "range_pop", "range_start", "range_end"):
        monkeypatch.setattr(
            torch.cuda.nvtx, name, lambda *args, name=name: calls.append((name, *args)) or 17
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("mcore.observe.nvtx._find_nvtx_problem", lambda: None)
    configure_nvtx_profiling(True)
    assert nvtx._backend.name == "torch.cuda.nvtx"

    @nvtx_decorator(message="life")
    def generator():
        yield

    with nvtx_range("a", "b", color="blue"):
        list(generator())
    assert calls == [
        ("range_push", "a.b"),
        ("range_start", "life"),
        ("range_end", 17),
        ("range_pop",),
    ]


def test_none_shows_nothing_but_keeps_the_names():
    configure_nvtx_profiling(True, backend="none")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile, nvtx_range("unseen"):
        assert nvtx._nvtx_range_messages == ["unseen"]
    configure_nvtx_profiling(False)
    assert "unseen" not in {event.name for event in profile.events()}


def test_pins_keep_what_was_made_up_to_a_bound(caplog):
    pins = Pins(lambda name: [name], limit=2)
    first = pins["a"]
    assert pins["a"] is first
    assert pins["b"] == ["b"]
    assert caplog.records == []
    assert pins["c"] == ["c"]
    assert pins["c"] is not pins["c"]
    assert pins["d"] == ["d"]
    (record,) = caplog.records
    assert "more than 2 different range names" in record.getMessage()
    assert pins["a"] is first


def test_the_bound_is_65536_names(domain, caplog):
    configure_nvtx_profiling(True, backend="nvtx")
    for number in range(65536):
        with nvtx_range("n", str(number)):
            pass
    assert caplog.records == []
    for number in range(65536, 65539):
        with nvtx_range("n", str(number)):
            pass
    with nvtx_range("n.0"):
        pass
    assert len(caplog.records) == 1
    assert domain.attributes_made == 65539


def test_torch_names_are_kept_alive(monkeypatch):
    pushed = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    monkeypatch.setattr("mcore.observe.nvtx._find_nvtx_problem", lambda: None)
    configure_nvtx_profiling(True, backend="torch.cuda.nvtx")
    for _ in range(2):
        with nvtx_range("made", "up"):
            pass
    configure_nvtx_profiling(False)
    assert pushed[0] is pushed[1]
