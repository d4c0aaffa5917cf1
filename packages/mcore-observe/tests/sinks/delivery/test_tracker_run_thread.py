"""The thread of a run: order, full calls, outages, hanging calls and the end."""

import logging
import statistics
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import JsonlSink
from mcore.observe.sinks.delivery import tracker_run
from mcore.observe.sinks.delivery.spool import Spool, read_spool
from mcore.observe.sinks.delivery.tracker_run import TrackerRun
from rank_testing.scripts import run_script


class Run(TrackerRun):
    """A run of a tracker that is one function."""

    first_retry_s = 0.01

    def __init__(self, send, *, name="tracker", spool=None, closing_s=60.0, **settings):
        super().__init__(object, name=name, spool=spool, closing_s=closing_s)
        vars(self).update(settings)
        self.send = send
        self.open()

    def put(self, step, num=1):
        self.log_metrics({f"m{i}": float(step) for i in range(num)}, step)

    def _write(self, connection, entries):
        self.send(entries)

    def _end_run(self, connection, status):
        pass


def steps(calls):
    return [e.step for call in calls for e in call]


class Server:
    """Accepts calls. It can fail or hang."""

    def __init__(self):
        self.calls, self.is_down, self.attempts = [], False, 0
        self.gate = threading.Event()
        self.gate.set()

    def send(self, entries):
        self.gate.wait(300)
        self.attempts += 1
        if self.is_down:
            raise OSError("connection refused by http://me:password@host")
        self.calls.append(entries)


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for five minutes"
        time.sleep(0.005)


def records_of_the_tracker(caplog):
    """Return the records of these senders, without records of senders of earlier tests."""
    return [record for record in caplog.records if record.getMessage().startswith("tracker is ")]


def threads_to(name):
    return [thread for thread in threading.enumerate() if thread.name.endswith(f" to {name}")]


def test_order_and_threads():
    server = Server()
    sender = Run(server.send, name="this tracker")
    assert not threads_to("this tracker")
    for step in range(100):
        sender.put(step)
    sender.flush()
    assert len(threads_to("this tracker")) == 1
    assert steps(server.calls) == list(range(100))
    sender.put(100)
    sender.close()
    sender.close()
    assert steps(server.calls) == list(range(101))
    wait_for(lambda: not threads_to("this tracker"))
    with pytest.raises(RuntimeError, match="this tracker run  was closed"):
        sender.put(101)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 23), max_size=12))
def test_calls_are_full_but_not_too_full(sizes):
    server = Server()
    sender = Run(server.send, max_per_call=10)
    for step, size in enumerate(sizes):
        sender.put(step, size)
    sender.close()
    assert all(sum(len(e.metrics) for e in call) <= 10 for call in server.calls)
    got = [(e.step, name) for call in server.calls for e in call for name in e.metrics]
    assert got == [(step, f"m{i}") for step, size in enumerate(sizes) for i in range(size)]


def test_values_within_the_linger_time_share_one_call():
    server = Server()
    sender = Run(server.send, linger_s=60.0)
    for step in range(5):
        sender.put(step)
    sender.flush()
    assert [len(call) for call in server.calls] == [5]
    sender.close()


def test_a_full_call_does_not_linger():
    server = Server()
    sender = Run(server.send, linger_s=600.0, max_per_call=4)
    for step in range(4):
        sender.put(step)
    wait_for(lambda: server.calls)
    sender.close()


def test_an_outage_is_reported_once_and_nothing_is_lost(caplog):
    caplog.set_level(logging.INFO)
    server = Server()
    sender = Run(server.send, linger_s=0.0)
    sender.put(0)
    sender.flush()
    server.is_down = True
    for step in range(1, 50):
        sender.put(step)
    wait_for(lambda: server.attempts >= 4)
    sender.flush()  # the tracker is unreachable: returns without an error
    assert sender.num_kept == 49
    server.is_down = False
    for step in range(50, 60):
        sender.put(step)
    wait_for(lambda: not sender.num_kept)  # a flush may end with a call that was failing
    assert steps(server.calls) == list(range(60))
    sender.close()
    assert [(r.levelname, r.getMessage()) for r in records_of_the_tracker(caplog)] == [
        (
            "WARNING",
            "tracker is unreachable, training continues: the last 100000 values are kept and sent "
            "when it responds: OSError: connection refused by http://***@host",
        ),
        ("INFO", "tracker is reachable again, 0 values were lost"),
    ]


def test_the_oldest_are_dropped_when_too_many_wait_and_they_are_counted(caplog):
    server = Server()
    sender = Run(server.send, max_values=10, max_per_call=4, linger_s=0.0)
    server.is_down = True
    sender.put(0)
    wait_for(lambda: server.attempts >= 1)
    for step in range(1, 30):
        sender.put(step, 2)
    assert 10 <= sender.num_kept <= 14  # in the queue, and in the present call
    server.is_down = False
    sender.close()
    kept = steps(server.calls)
    assert kept == sorted(kept)
    assert kept[-5:] == [25, 26, 27, 28, 29]
    lost = 1 + 29 * 2 - sum(len(e.metrics) for call in server.calls for e in call)
    assert (
        records_of_the_tracker(caplog)[-1].getMessage()
        == f"tracker is reachable again, {lost} values were lost"
    )
    assert lost > 40


def test_a_value_counts_once_while_its_call_begins(monkeypatch):
    begun, gate = threading.Event(), threading.Event()
    count = tracker_run._count

    def count_slowly(entries):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return count(entries)

    monkeypatch.setattr(tracker_run, "_count", count_slowly)
    sender = Run(lambda entries: (begun.set(), gate.wait(300)), linger_s=0.0)
    sender.put(1)
    seen = {sender.num_kept}
    while not begun.is_set():
        seen.add(sender.num_kept)
    gate.set()
    sender.close()
    assert seen == {1}


def test_a_hanging_call_delays_nothing():
    server = Server()
    sender = Run(server.send, max_values=10, linger_s=0.0, patience_s=0.2)
    server.gate.clear()
    for step in range(200):
        sender.put(step)  # ends: the server's gate stays shut
    assert server.attempts == 0
    server.gate.set()
    sender.close()
    assert steps(server.calls)[-10:] == list(range(190, 200))


def test_a_step_costs_about_as_much_as_a_line_of_json_while_the_server_hangs(tmp_path):
    server = Server()
    run = Run(server.send, spool=Spool(tmp_path, "tracker", {}), linger_s=0.0, closing_s=0.1)
    file = JsonlSink(tmp_path / "metrics.jsonl")
    server.gate.clear()
    ours_ns, lines_ns = [], []
    for step in range(2000):
        began_ns = time.thread_time_ns()
        run.put(step, 5)
        ended_ns = time.thread_time_ns()
        file.log({f"m{i}": float(step) for i in range(5)}, step)
        ours_ns.append(ended_ns - began_ns)
        lines_ns.append(time.thread_time_ns() - ended_ns)
    assert server.calls == []
    assert statistics.median(ours_ns) < 5 * statistics.median(lines_ns)
    run.close("KILLED")
    (path,) = tmp_path.glob("*.spool.jsonl")
    assert [one.step for one in read_spool(path).entries.values()] == list(range(2000))
    server.gate.set()


def test_values_that_do_not_fit_into_memory_wait_on_the_disk_for_a_replay(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    server = Server()
    spool = Spool(tmp_path, "tracker", {})
    sender = Run(server.send, max_values=8, max_per_call=4, linger_s=0.0, spool=spool)
    server.is_down = True
    for step in range(60):
        sender.put(step)
    wait_for(lambda: server.attempts >= 2)
    server.is_down = False
    sender.close()
    arrived = steps(server.calls)
    assert arrived[-8:] == list(range(52, 60))
    assert records_of_the_tracker(caplog)[-1].getMessage() == (
        f"tracker is reachable again, {60 - len(arrived)} values wait on the disk for a replay"
    )
    assert spool.num_left == 60 - len(arrived) > 40
    kept = [one.step for one in read_spool(spool.path).entries.values()]
    assert sorted(kept + arrived) == list(range(60))


def test_a_refusal_is_raised_once_and_its_metrics_are_dropped():
    made = []

    def refuse_first(entries):
        made.append(entries)
        if len(made) == 1:
            raise ValueError("refused")

    sender = Run(refuse_first)
    sender.put(1)
    with pytest.raises(ValueError, match="refused"):
        sender.flush()
    sender.put(2)
    sender.close()
    assert steps(made) == [1, 2]


def test_close_gives_up_after_its_time_and_reports_the_lost_values(caplog):
    server = Server()
    server.is_down = True
    sender = Run(server.send, closing_s=0.1)
    for step in range(3, 6):
        sender.put(step, 2)
    sender.close()
    last = records_of_the_tracker(caplog)[-1]
    assert (last.levelname, last.getMessage()) == (
        "ERROR",
        "tracker is unreachable: 6 values of steps 3 to 5 have not arrived",
    )
    assert sender.num_kept == 0


def test_close_does_not_wait_for_a_hanging_call():
    server = Server()
    sender = Run(server.send, patience_s=0.1, closing_s=0.1)
    server.gate.clear()
    sender.put(1)
    thread = sender._thread
    sender.close()
    assert thread.daemon
    server.gate.set()
    thread.join(300)
    assert not thread.is_alive()
    assert sender.num_kept == 0


def test_metrics_are_still_sent_while_the_interpreter_exits():
    code = (
        "import atexit, time\n"
        "from mcore.observe.sinks.delivery.tracker_run import TrackerRun\n"
        "sent = []\n"
        "class Run(TrackerRun):\n"
        "    max_per_call = 5\n"
        "    def _write(self, connection, entries):\n"
        "        time.sleep(0.05)\n"
        "        sent.extend(entries)\n"
        "    def _end_run(self, connection, status): print(len(sent), status)\n"
        "run = Run(object)\n"
        "for n in range(50): run.log_metrics({'a': 1.0}, n)\n"
    )
    done = run_script(code)
    assert done.stdout == "50 FINISHED\n", done.stderr
