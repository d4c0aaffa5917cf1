import dataclasses
import errno
import logging
import math
import socket
import time

import pytest
import torch

import mcore.observe
from mcore.observe import StragglerDetector
from mcore.observe.straggler.ranges import HostRanges
from rank_testing import free_port
from rank_testing.scripts import run_script

LOGGER = "mcore.observe.straggler"
MS = 1_000_000


@pytest.fixture
def detector():
    StragglerDetector.reset_singleton()
    yield StragglerDetector()
    StragglerDetector.reset_singleton()


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self):
        self.ns = 0

    def __call__(self):
        return self.ns

    def range(self, opened, ms):
        with opened:
            self.ns += int(ms * MS)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    made = lambda device, *, prefill, sample_every: HostRanges(  # noqa: E731
        sample_every=sample_every, now_ns=clock
    )
    monkeypatch.setattr("mcore.observe.straggler.detector.make_ranges", made)
    return clock


def configured(detector, enabled=True, **kwargs):
    kwargs = {"controller": False, **kwargs}
    detector.configure(1, 0, enabled=enabled, **kwargs)
    return detector


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_not_configured(detector):
    with detector, detector(bdata=True), detector.section("x"):
        pass
    assert detector.elapsed() == (0, 0, 0, 0, 0, 0)
    assert detector.report() is detector.report(1e12, 10) is False
    detector.reset()
    detector.start()
    detector.stop()
    detector._check_toggle()
    detector._controller()
    detector._handler()
    assert detector._min_max(1, 1, 1, 1, 1, 1, 1) is None
    assert (detector.enabled, detector.configured, detector.world_size) == (False, False, 0)
    assert (detector._off, detector.toggle, detector.bdata) == (True, False, False)
    assert detector.controller_address is detector.controller_error is detector.last_report is None


@pytest.mark.xdist_group("imports")
def test_import_opens_nothing(imports):
    found = imports["with torch"]
    assert found["started"][0] == 1  # thread
    assert found["server"] == []
    assert (found["one detector"], found["configured"]) == (True, False)


def test_real_time_of_one_rank(detector):
    configured(detector, port=0, controller=True)
    with detector:
        time.sleep(0.010)
    with detector(bdata=True):
        time.sleep(0.005)
    delta, batch_delta, *readings = detector.elapsed()
    assert delta >= 10
    assert batch_delta >= 5
    assert readings == [0, 0, 0, 0] or torch.cuda.is_available()
    assert detector.elapsed()[:2] == (0.0, 0.0)


def test_times_are_a_sum_and_a_maximum(detector, clock):
    configured(detector, telemetry=lambda: (60.4, 399.5, math.nan, 1980.0))
    for ms in (10, 5):
        clock.range(detector, ms)
        clock.range(detector(bdata=True), ms)
    reading = detector.elapsed()
    assert reading == (15.0, 10.0, 60, 400, 0, 1980)
    assert [type(value) for value in reading[2:]] == [int] * 4
    clock.range(detector, 1)
    detector.reset()
    assert detector.elapsed()[:2] == (0.0, 0.0)


def test_report_of_one_rank(detector, clock, caplog):
    configured(detector)
    clock.range(detector, 10)
    before = time.time()
    with caplog.at_level(logging.INFO, LOGGER):
        assert detector.report(1e12, 10) is True
    after = time.time()
    [line] = lines_of(caplog)
    assert "MnRtt/Rnk: 1.00ms/0 | MxRtt/Rnk: 1.00ms/0" in line
    assert line.endswith("MnEtpt/Rnk: 33.33TF/0 | MxEtpt/Rnk: 33.33TF/0")
    assert "MnPwr/Rnk: nanW/-1" in line
    report = detector.last_report
    assert (report.world_size, report.log_interval, report.total_flops) == (1, 10, 1e12)
    assert report.hosts == (socket.gethostname(),)
    assert before <= report.unix_time <= after
    assert detector.elapsed()[0] == 0.0


def test_report_needs_flops_and_an_interval(detector, clock, caplog):
    configured(detector)
    clock.range(detector, 10)
    with caplog.at_level(logging.INFO, LOGGER):
        assert detector.report() is detector.report(1e12, 0) is detector.report(1e12, -1) is False
        assert detector.last_report is None
        assert detector.elapsed()[0] == 10.0
        assert detector.report(0.0, 10) is False
    assert lines_of(caplog) == []


def test_report_without_a_range(detector, caplog):
    configured(detector)
    with caplog.at_level(logging.INFO, LOGGER):
        assert detector.report(1e12, 10) is True
    [line] = lines_of(caplog)
    assert "MnRtt/Rnk: nanms/-1" in line
    assert "MnEtpt/Rnk: 0.00TF/0" in line
    assert detector.last_report.metrics["etpt_tf"] == (0.0,)
    assert detector.last_report.outliers == ()


def test_report_inside_a_range(detector, clock):
    configured(detector)
    with detector:
        clock.ns += 5 * MS
        detector.report(1e12, 1)
        assert math.isnan(detector.last_report.metrics["elapsed_ms"][0])
        clock.ns += 2 * MS
    detector.report(1e12, 1)
    assert detector.last_report.metrics["elapsed_ms"] == (7.0,)


def test_toggle_inside_a_range(detector, clock):
    """The range is kept for the next interval in which the detector is on."""
    configured(detector)
    with detector:
        clock.ns += MS
        detector._state.request(False)
        detector.report(1e12, 1)
        assert not detector.enabled
        clock.ns += MS
    clock.range(detector, 50)
    detector._state.request(True)
    detector.report(1e12, 1)
    assert detector.enabled
    assert detector.elapsed()[0] == 2.0


def test_toggle_comes_with_the_report_and_is_logged(detector, caplog):
    configured(detector, enabled=False)
    detector._state.toggle()
    assert (detector.toggle, detector.enabled) == (True, False)
    with caplog.at_level(logging.INFO, LOGGER):
        assert detector.report(1e12, 10) is False
        assert (detector.toggle, detector.enabled, detector._off) == (False, True, False)
        detector._state.toggle()
        detector._check_toggle()
    assert not detector.enabled
    assert lines_of(caplog) == [
        "Toggling StragglerDetector State ON",
        "Toggling StragglerDetector State OFF",
    ]


def test_off_measures_nothing_and_reports_nothing(detector, clock, caplog):
    configured(detector, enabled=False)
    clock.range(detector, 10)
    clock.range(detector(bdata=True), 10)
    with caplog.at_level(logging.INFO, LOGGER):
        assert detector.report(1e12, 10) is False
    assert detector.elapsed() == (0, 0, 0, 0, 0, 0)
    assert detector.last_report is None
    assert lines_of(caplog) == []


def test_reports_can_be_compared_and_changed(detector, clock):
    configured(detector)
    clock.range(detector, 10)
    detector.report(1e12, 10)
    report = detector.last_report
    assert dataclasses.replace(report) == report
    other = dataclasses.replace(report, hosts=("elsewhere",))
    assert other != report
    assert other.to_dict() == {**report.to_dict(), "hosts": ["elsewhere"]}
    assert report.to_dict()["metrics"]["elapsed_ms"] == [1.0]
    assert report.to_dict()["metrics"]["etpt_tf"] == [1e12 / (10 * 1e9 * 1 * 3)]


def test_it_is_the_same_object(detector):
    configured(detector, sections=["a"])
    assert StragglerDetector() is detector
    assert detector.enabled
    assert detector.configured
    assert StragglerDetector._configured


def test_a_second_configure_changes_nothing(detector, caplog):
    configured(detector, mmcnt=-3, amp=2.0)
    with caplog.at_level(logging.DEBUG, LOGGER):
        detector.configure(7, 99, port=70000, enabled=False)
    assert (detector.world, detector.rank, detector.mmcnt, detector.amp) == (1, 0, 1, 2.0)
    assert (detector.world_size, detector.my_rank, detector.enabled) == (1, 0, True)
    assert [r.levelno for r in caplog.records if r.name == LOGGER] == [logging.DEBUG]


def test_reset_singleton_frees_the_port(detector):
    port = free_port()
    configured(detector, port=port, controller=True)
    host, _ = detector.controller_address
    StragglerDetector.reset_singleton()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    assert not detector.configured
    assert detector.controller_address is None
    with detector:
        pass
    assert detector.elapsed() == (0, 0, 0, 0, 0, 0)
    new = configured(StragglerDetector(), port=port, controller=True)
    assert new is not detector
    assert new.controller_address == (host, port)
    with pytest.raises(RuntimeError, match="replaced"):
        configured(detector)
    StragglerDetector.reset_singleton()
    StragglerDetector.reset_singleton()


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"port": -1}, "port is -1"),
        ({"world": 0, "rank": 0}, "world is 0"),
        ({"rank": 1}, "rank is 1"),
        ({"rank": -1}, "rank is -1"),
        ({"world": 2}, "world is 2, but the process group has 1"),
        ({"amp": 0.0}, "amp is 0.0"),
        ({"amp": math.nan}, "amp is nan"),
        ({"prefill": -1}, "prefill is -1"),
        ({"sample_every": 0}, "sample_every is 0"),
        ({"sections": ["a", "a"]}, "declared twice"),
        ({"sections": [str(i) for i in range(65)]}, "at most 64"),
        ({"z_threshold": 0.0}, "z_threshold is 0.0"),
        ({"bind": "0.0.0.0", "port": 0}, "token"),
    ],
)
def test_wrong_arguments_change_nothing(detector, monkeypatch, kwargs, text):
    monkeypatch.delenv("MCORE_STRAGGLER_TOKEN", raising=False)
    with pytest.raises(ValueError, match=text):
        detector.configure(**{"world": 1, "rank": 0, "enabled": True, **kwargs})
    assert (detector.configured, detector.enabled, detector.world) == (False, False, 0)
    assert detector.controller_address is None
    configured(detector)


def test_token_of_the_environment(detector, monkeypatch, caplog):
    monkeypatch.setenv("MCORE_STRAGGLER_TOKEN", "s3cret-of-16-characters")
    with caplog.at_level(logging.DEBUG):
        configured(detector, bind="0.0.0.0", port=0, controller=True)
    assert detector.controller_address is not None
    assert "s3cret" not in caplog.text


def test_occupied_port(detector, clock, caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        configured(detector, port=other.getsockname()[1], controller=True)
        assert detector.controller_error.errno == errno.EADDRINUSE
    assert [r.levelno for r in caplog.records if r.name == LOGGER] == [logging.WARNING]
    assert detector.configured
    assert detector.controller_address is None
    clock.range(detector, 3)
    assert detector.elapsed()[0] == 3.0
    detector._controller()
    assert detector.controller_error is None
    assert detector.controller_address is not None


def test_close(detector, clock):
    configured(detector, port=0, controller=True)
    assert detector.port == 0
    clock.range(detector, 3)
    detector.close()
    detector.close()
    assert detector.controller_address is None
    assert (detector.configured, detector.enabled, detector.toggle) == (True, False, False)
    assert detector.report(1e12, 10) is False
    detector._state.request(True)
    detector.report()
    assert detector.elapsed()[0] == 0.0


def test_exceptions_pass_and_drop_the_range(detector, clock, caplog):
    configured(detector)
    error = OSError("disk")

    def fail():
        with detector:
            clock.ns += 5 * MS
            raise error

    with pytest.raises(OSError, match="disk") as caught:
        fail()
    assert caught.value is error
    assert detector.__exit__(None, None, None) is False
    clock.range(detector, 2)
    assert detector.elapsed()[0] == 2.0
    assert lines_of(caplog) == []


def test_nested_ranges(detector, clock):
    configured(detector)
    with detector:
        clock.ns += MS
        clock.range(detector(bdata=True), 2)
    assert detector.elapsed()[:2] == (3.0, 2.0)


def test_declared_sections(detector, clock, caplog):
    configured(detector, sections=["attention", "mlp"])
    with detector:
        for ms in (1, 2, 6):
            clock.range(detector.section("attention"), ms)
        with pytest.raises(ValueError, match="x"), detector.section("mlp"):
            raise ValueError("x")
    detector.report(1e12, 1)
    report = detector.last_report
    assert list(report.sections) == ["compute", "data", "attention", "mlp"]
    [stats] = report.sections["attention"]
    assert (stats.count, stats.sum_ms, stats.median_ms, stats.max_ms) == (3, 9.0, 2.0, 6.0)
    assert report.sections["mlp"][0].count == 0
    assert report.sections["compute"][0].sum_ms == 9.0
    assert report.local_sections == {}
    assert lines_of(caplog) == []
    clock.range(detector.section("attention"), 8)
    detector.report(1e12, 1)
    [score] = detector.last_report.individual_scores["attention"]
    assert score == 0.25
    assert math.isnan(detector.last_report.relative_scores["mlp"][0])


def test_undeclared_sections_are_local_with_one_warning(detector, clock, caplog):
    configured(detector, sections=["mlp"])
    for _ in range(2):
        clock.range(detector.section("extra"), 3)
    detector.report(1e12, 1)
    assert detector.last_report.local_sections["extra"].sum_ms == 6.0
    assert "extra" not in detector.last_report.sections
    [line] = [line for line in lines_of(caplog) if "Rtt" not in line]
    assert "'extra'" in line
    with pytest.raises(ValueError, match="give a non-empty text"):
        detector.section("")


def test_undeclared_sections_are_bounded(detector, clock, caplog):
    configured(detector)
    for index in range(100):
        clock.range(detector.section(f"step {index}"), 1)
    detector.report(1e12, 1)
    assert len(detector.last_report.local_sections) == 64
    first, too_many = [line for line in lines_of(caplog) if "step" in line]
    assert "'step 0'" in first
    assert "'step 64'" in too_many


def test_wrap(detector, clock):
    def forward(x, *, scale=1):
        """Documented."""
        clock.ns += 4 * MS
        return x * scale

    timed = detector.wrap(forward, "mlp")
    assert timed(3, scale=2) == 6
    configured(detector, sections=["mlp"])
    assert timed(3) == 3
    detector.report(1e12, 1)
    assert detector.last_report.sections["mlp"][0].sum_ms == 4.0
    assert (timed.__name__, timed.__doc__) == ("forward", "Documented.")

    async def suspends():
        pass

    def generates():
        yield 1

    for function in (suspends, generates):
        with pytest.raises(TypeError, match="suspends"):
            detector.wrap(function, "mlp")


def test_sampling_keeps_elapsed_comparable(detector, clock):
    configured(detector, sample_every=4)
    for _ in range(8):
        clock.range(detector, 5)
    assert detector.elapsed()[0] == 40.0


def test_telemetry_that_fails_does_not_stop_training(detector, clock, caplog):
    def lost():
        raise OSError("GPU is lost")

    configured(detector, telemetry=lost)
    for _ in range(2):
        clock.range(detector, 1)
        assert detector.report(1e12, 1) is True
    assert len([line for line in lines_of(caplog) if "GPU is lost" in line]) == 1
    assert math.isnan(detector.last_report.metrics["power_w"][0])


def test_telemetry_in_the_report(detector, clock, caplog):
    configured(detector, telemetry=lambda: (61, 601.796, 97, 1980))
    clock.range(detector, 1)
    with caplog.at_level(logging.INFO, LOGGER):
        detector.report(1e12, 1)
    for field in ("MnPwr/Rnk: 601.80W/0", "MxTmp/Rnk: 61.00C/0", "MnUtl/Rnk: 97.00%/0",
                  "MxClk/Rnk: 1980.00MHz/0"):  # fmt: skip
        assert field in lines_of(caplog)[0]


def test_min_max_of_one_rank(detector):
    configured(detector)
    data = detector._min_max(20.0, 1.0, 60.0, 400.0, 97.0, 1980.0, 8.0)
    assert str(data.max_elapsed) == "20.00ms/0"
    assert [str(value) for value in data.aflops] == ["8.00TF/0"]
    assert detector.last_report is None
    detector.close()
    assert detector._min_max(20.0, 1.0, 60.0, 400.0, 97.0, 1980.0, 8.0) is None


def test_slower_than_before_is_a_warning_also_without_a_throughput(detector, clock, caplog):
    configured(detector)
    for ms in (10,) * 16 + (20,) * 3:
        clock.range(detector, ms)
        assert not detector.report(0.0, 1)
    [line] = [line for line in lines_of(caplog) if line.startswith("straggler:")]
    assert "elapsed_ms=20.00ms median=20.00ms" in line
    assert "score=0.50" in line
    assert detector.last_report.outliers == ()


def test_a_new_work_load_is_the_usual_one_after_a_while(detector, clock):
    configured(detector)
    scores = []
    for ms in (10,) * 16 + (20,) * 24:
        clock.range(detector, ms)
        detector.report(1e12, 1)
        scores += detector.last_report.individual_scores["compute"]
    assert scores == [1.0] * 16 + [0.5] * 15 + [1.0] * 9
    assert detector.last_report.stragglers == ()


def test_reports_without_times_are_a_warning(detector, caplog):
    configured(detector, sample_every=1000)
    for _ in range(80):
        detector.report(0.0, 1)
    [line] = [line for line in lines_of(caplog) if "no rank can be judged" in line]
    assert "after 32 reports" in line
    assert "sample_every" in line
    assert detector.last_report.measuring


class Worker:
    def __init__(self):
        self.calls = []

    def step(self, value):
        self.calls.append(value)
        return value + 1

    @staticmethod
    def load(value):
        return value * 2

    @classmethod
    def made(cls, value):
        return cls, value


def test_existing_methods_can_be_timed_and_put_back(detector):
    configured(detector, sections=["step", "load", "made"])
    worker, other = Worker(), Worker()
    before = dict(vars(Worker))
    undo = detector.wrap_callables(
        {"step": (worker, "step"), "load": (Worker, "load"), "made": (Worker, "made")}
    )
    assert (worker.step(1), other.step(2), Worker.load(3), other.load(4)) == (2, 3, 6, 8)
    assert Worker.made(5) == other.made(5) == (Worker, 5)
    detector.report(1e12, 1)
    counts = {name: stats[0].count for name, stats in detector.last_report.sections.items()}
    assert counts == {"compute": 0, "data": 0, "step": 1, "load": 2, "made": 2}
    undo()
    undo()
    assert dict(vars(Worker)) == before
    assert "step" not in vars(worker)
    with pytest.raises(AttributeError):
        detector.wrap_callables({"step": (worker, "step"), "load": (worker, "no such method")})
    with pytest.raises(TypeError, match=r"'calls' of .* for the section 'load' is not callable"):
        detector.wrap_callables({"step": (worker, "step"), "load": (worker, "calls")})
    assert "step" not in vars(worker)


def test_reports_come_by_the_clock(detector, clock, monkeypatch):
    """Every 16 steps until the noise is known, then after as many as fit into the time."""
    now = [0.0]
    monkeypatch.setattr("mcore.observe.straggler.reporter.time.monotonic", lambda: now[0])
    configured(detector, report_every_s=60.0)
    reported = []
    for step in range(1, 400):
        now[0] += 1.0 if step <= 17 * 16 else 3.0
        clock.range(detector, 10)
        if detector.report_if_due(1e9):
            reported.append((step, detector.last_report.log_interval))
            assert detector.last_report.total_flops == reported[-1][1] * 1e9
    # A rank alone needs 15 reports.
    first = [(16 * number, 16) for number in range(1, 17)]
    assert reported == [*first, (316, 60), (340, 24), (360, 20), (380, 20)]
    StragglerDetector.reset_singleton()
    with pytest.raises(ValueError, match="report_every_s is 0; give seconds above 0"):
        configured(StragglerDetector(), report_every_s=0)


def test_the_longest_wait_for_data_is_shown(detector, clock):
    configured(detector)
    for ms in (1, 2, 9):
        clock.range(detector(bdata=True), ms)
    detector.report(1e12, 1)
    assert detector.last_report.metrics["data_ms"] == (9.0,)


def test_port_is_closed_at_the_end_of_the_process():
    code = (
        "from mcore.observe import StragglerDetector\n"
        "d = StragglerDetector()\n"
        "d.configure(1, 0, port=0)\n"
        "import atexit, threading\n"
        "seen = lambda: print([t.name for t in threading.enumerate() if t.name == 'straggler'])\n"
        "seen()\n"
        "d._listener.close()\n"
        "seen()\n"
        "d._controller()\n"
    )
    done = run_script(code)
    assert (done.returncode, done.stdout) == (0, "['straggler']\n[]\n"), done.stderr


def test_documented_attributes(detector):
    configured(detector, mmcnt=2)
    assert detector.start == detector.start_method
    assert detector.stop == detector.stop_method
    values = [getattr(detector, name) for name in ("world", "rank", "mmcnt", "port", "amp", "dev")]
    assert values == [1, 0, 2, 65535, 3.0, torch.device("cpu")]
    assert not detector.toggle
    assert not detector.bdata
    assert detector(bdata=True).bdata
    assert mcore.observe.__straggler__.__class__ is StragglerDetector
