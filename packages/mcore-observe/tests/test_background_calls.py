import subprocess
import sys
import threading
import time

import pytest

from mcore.observe.background_calls import BackgroundCalls


def test_calls_are_made_in_order_in_one_other_thread():
    calls, made = BackgroundCalls(4), []
    for number in range(100):
        calls.put(lambda number=number: made.append((number, threading.current_thread())))
    calls.drain()
    assert [number for number, _ in made] == list(range(100))
    (thread,) = {thread for _, thread in made}
    assert thread is not threading.current_thread()


def test_nothing_runs_before_the_first_call():
    before = threading.active_count()
    calls = BackgroundCalls(1)
    calls.drain()
    assert threading.active_count() == before


def test_a_full_queue_waits_for_room():
    gate, calls = threading.Event(), BackgroundCalls(1)
    calls.put(gate.wait)
    calls.put(lambda: None)
    threading.Timer(0.2, gate.set).start()
    started = time.perf_counter()
    calls.put(lambda: None)
    assert time.perf_counter() - started > 0.05
    calls.drain()


def test_the_first_error_is_raised_once_and_later_calls_are_made():
    calls, made = BackgroundCalls(4), []
    calls.put(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calls.drain()
    calls.put(lambda: made.append(1))
    calls.drain()
    assert made == [1]


def test_close_makes_all_calls_and_ends_the_thread():
    before, calls, made = threading.active_count(), BackgroundCalls(4), []
    for round_ in (1, 2):
        for _ in range(3):
            calls.put(lambda: made.append(1))
        calls.close()
        calls.close()
        assert (len(made), threading.active_count()) == (3 * round_, before)
    calls.put(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calls.close()


def test_calls_are_still_made_while_the_interpreter_exits():
    code = (
        "import atexit, time\n"
        "from mcore.observe.background_calls import BackgroundCalls\n"
        "calls = BackgroundCalls(100)\n"
        "atexit.register(lambda: (calls.drain(), print(len(made))))\n"
        "made = []\n"
        "for n in range(50): calls.put(lambda: (time.sleep(0.005), made.append(1)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "50\n", done.stderr
