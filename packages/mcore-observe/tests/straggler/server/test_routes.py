import threading
from types import SimpleNamespace

from mcore.observe import StragglerReport
from mcore.observe.straggler.server.routes import ControllerState


def report_at(unix_time):
    return StragglerReport(
        unix_time=unix_time,
        world_size=1,
        log_interval=1,
        total_flops=1.0,
        hosts=("h",),
        metrics={},
        sections={},
        relative_scores={},
        individual_scores={},
        outliers=(),
    )


def test_before_anything():
    state = ControllerState(rank=2, world_size=4, enabled=True)
    assert list(state.status().values()) == [True, None, 2, 4, 0, None]
    assert state.wanted()
    assert state.last_report is None


def test_two_toggles_cancel_out():
    state = ControllerState(rank=0, world_size=1, enabled=False)
    assert state.toggle() is True
    assert state.status()["pending"] is True
    assert state.toggle() is False
    assert state.status()["pending"] is None


def test_requests_are_idempotent():
    state = ControllerState(rank=0, world_size=1, enabled=False)
    assert state.request(True) is state.request(True) is True
    assert state.status()["pending"] is True
    assert state.request(False) is False
    assert state.status()["pending"] is None


def test_a_report_applies_what_was_wanted():
    state = ControllerState(rank=0, world_size=1, enabled=False)
    state.toggle()
    state.applied(True, SimpleNamespace(unix_time=5.0, report=report_at(5.0)))
    assert list(state.status().values()) == [True, None, 0, 1, 1, 5.0]
    state.applied(True, None)
    assert state.status()["reports"] == 1
    assert state.last_report == report_at(5.0)


def test_a_request_during_a_report_is_kept():
    state = ControllerState(rank=0, world_size=1, enabled=False)
    told = state.wanted()
    state.toggle()
    state.applied(told, None)
    assert state.status()["pending"] is True
    told = state.wanted()
    state.toggle()
    state.applied(told, None)
    assert state.status()["enabled"] is True
    assert state.status()["pending"] is False


def test_toggles_of_many_threads():
    state = ControllerState(rank=0, world_size=1, enabled=False)
    threads = [
        threading.Thread(target=lambda: [state.toggle() for _ in range(101)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert state.status()["pending"] is None
