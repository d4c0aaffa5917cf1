import asyncio
import functools
import inspect
import logging
import time
from dataclasses import dataclass

import pytest

from mcore.observe import trace_async_exceptions
from mcore.observe.async_tasks import _ASYNC_TASK_STATS, _is_power_of_ten
from rank_testing.scripts import run_script

LOGGER = "mcore.observe.async_tasks"


@pytest.fixture(autouse=True)
def all_records(caplog):
    caplog.set_level(logging.DEBUG, logger=LOGGER)


def errors_in(caplog):
    return [r for r in caplog.records if r.levelno >= logging.ERROR]


async def failing():
    """Fails."""
    raise ValueError("bad")


async def numbers():
    """Counts."""
    sent = yield 1
    yield sent
    yield 3


def test_success_passes_through(caplog):
    @trace_async_exceptions
    async def add(a, *, b):
        """Adds."""
        return a + b

    traced = trace_async_exceptions(numbers)

    async def items():
        return [item async for item in traced()]

    assert asyncio.run(add(1, b=2)) == 3
    assert asyncio.run(items()) == [1, None, 3]
    assert caplog.records == []
    assert inspect.iscoroutinefunction(add)
    assert inspect.isasyncgenfunction(traced)
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert (traced.__name__, traced.__doc__) == ("numbers", "Counts.")


@pytest.mark.parametrize(
    "decorate",
    [
        trace_async_exceptions,
        trace_async_exceptions(),
        trace_async_exceptions(verbose=True),
        functools.partial(trace_async_exceptions, verbose=True),
    ],
)
def test_all_spellings_log_once_and_exit(caplog, decorate):
    with pytest.raises(SystemExit) as caught:
        asyncio.run(decorate(failing)())
    assert caught.value.code == 1
    assert isinstance(caught.value.__cause__, ValueError)
    (record,) = errors_in(caplog)
    assert record.getMessage() == "Exception in async function failing: bad"
    assert record.exc_info[0] is ValueError
    assert record.exc_info[2] is not None
    assert record.name == LOGGER


def test_failing_generator(caplog):
    @trace_async_exceptions
    async def broken():
        yield 1
        raise KeyError("k")

    async def consume():
        return [item async for item in broken()]

    with pytest.raises(SystemExit):
        asyncio.run(consume())
    (record,) = errors_in(caplog)
    assert record.getMessage() == "Exception in async generator broken: 'k'"


def test_raise_logs_and_lets_the_exception_continue(caplog):
    error = ValueError("mine")

    @trace_async_exceptions(on_error="raise")
    async def mine():
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        asyncio.run(mine())
    assert caught.value is error
    assert len(errors_in(caplog)) == 1


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@pytest.mark.parametrize("error", [ValueError("once"), FrozenError(3)])
def test_one_error_through_nested_calls_is_one_record(caplog, error):
    @trace_async_exceptions(on_error="raise")
    async def inner():
        raise error

    @trace_async_exceptions(on_error="raise")
    async def middle():
        yield 1
        await inner()

    @trace_async_exceptions
    async def outer():
        async for _ in middle():
            pass

    with pytest.raises(SystemExit) as caught:
        asyncio.run(outer())
    assert caught.value.__cause__ is error
    (record,) = errors_in(caplog)
    assert "inner" in record.getMessage()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_other_exceptions_pass_unlogged(caplog, error):
    @trace_async_exceptions(verbose=True)
    async def stop():
        raise error

    coroutine = stop()
    with pytest.raises(error):
        coroutine.send(None)
    assert caplog.records == []
    assert stop.__qualname__ not in _ASYNC_TASK_STATS


def test_a_cancelled_task_is_cancelled_and_unlogged(caplog):
    @trace_async_exceptions
    async def forever():
        await asyncio.sleep(3600)

    async def cancel():
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert errors_in(caplog) == []


def test_send_throw_and_close_reach_the_generator(caplog):
    seen = []

    @trace_async_exceptions(on_error="raise")
    async def talk():
        try:
            while True:
                try:
                    seen.append((yield len(seen)))
                except LookupError as error:
                    seen.append(repr(error))
        finally:
            seen.append("closed")

    async def conversation():
        generator = talk()
        assert await generator.__anext__() == 0
        assert await generator.asend("x") == 1
        assert await generator.athrow(LookupError("thrown")) == 2
        await generator.aclose()

    asyncio.run(conversation())
    assert seen == ["x", "LookupError('thrown')", "closed"]
    assert caplog.records == []


def test_sent_values_come_back():
    async def conversation():
        generator = trace_async_exceptions(numbers)()
        await generator.asend(None)
        sent = await generator.asend("x")
        await generator.aclose()
        return sent

    assert asyncio.run(conversation()) == "x"


def test_a_consumer_that_stops_early_closes_the_generator(caplog):
    closed = []

    @trace_async_exceptions
    async def endless():
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async def one():
        generator = endless()
        async for _ in generator:
            break
        await generator.aclose()

    asyncio.run(one())
    assert closed == [True]
    assert caplog.records == []


def test_an_error_while_closing_is_logged(caplog):
    @trace_async_exceptions(on_error="raise")
    async def stubborn():
        try:
            yield 1
        finally:
            raise OSError("cleanup")

    async def close():
        generator = stubborn()
        await generator.__anext__()
        await generator.aclose()

    with pytest.raises(OSError, match="cleanup"):
        asyncio.run(close())
    assert len(errors_in(caplog)) == 1


@pytest.mark.parametrize("thing", [lambda: 1, print, 3, iter, type("Callable", (), {})()])
def test_only_async_functions(thing):
    with pytest.raises(TypeError, match="async def"):
        trace_async_exceptions(thing)
    with pytest.raises(TypeError, match="async def"):
        trace_async_exceptions(verbose=True)(thing)


def test_generators_are_not_async():
    def generator():
        yield

    with pytest.raises(TypeError, match="a generator"):
        trace_async_exceptions(generator)


def test_unknown_on_error():
    with pytest.raises(ValueError, match="'ignore'"):
        trace_async_exceptions(on_error="ignore")


def test_a_partial_and_a_method():
    class Server:
        @trace_async_exceptions
        async def serve(self, number):
            return number

    assert asyncio.run(Server().serve(4)) == 4
    assert asyncio.run(trace_async_exceptions(functools.partial(Server().serve, 5))()) == 5


def test_verbose_counts_and_says_so_at_powers_of_ten(caplog):
    @trace_async_exceptions(verbose=True)
    async def v():
        await asyncio.sleep(0)

    async def many():
        for _ in range(101):
            await v()

    began = time.perf_counter()
    asyncio.run(many())
    took_ms = 1e3 * (time.perf_counter() - began)
    count, total_ms = _ASYNC_TASK_STATS[v.__qualname__]
    assert count == 101
    assert type(count) is int
    assert 0 < total_ms < took_ms
    assert isinstance(total_ms, float)
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(lines) == 3
    for line, expected in zip(lines, (1, 10, 100), strict=True):
        name, rest = line.split(" completed in ")
        assert name == v.__qualname__
        assert rest.endswith(f" ms, lifetime cnt: {expected}")
        assert " ms, lifetime avg: " in rest


def test_verbose_time_includes_suspension_and_failures_count(caplog):
    @trace_async_exceptions(verbose=True, on_error="raise")
    async def slow():
        await asyncio.sleep(0.03)
        raise ValueError("late")

    @trace_async_exceptions(verbose=True)
    async def slow_items():
        yield 1
        yield 2

    async def consume():
        async for _ in slow_items():
            await asyncio.sleep(0.015)

    with pytest.raises(ValueError, match="late"):
        asyncio.run(slow())
    asyncio.run(consume())
    for traced in (slow, slow_items):
        count, total_ms = _ASYNC_TASK_STATS[traced.__qualname__]
        assert count == 1
        assert total_ms >= 29


def test_powers_of_ten_are_exact():
    shown = [n for n in range(1, 1_100_000) if _is_power_of_ten(n)]
    assert shown == [10**k for k in range(7)]
    assert _is_power_of_ten(10**18)
    assert not _is_power_of_ten(10**18 + 1)


def run_program(body):
    code = (
        "import asyncio, signal, sys, threading, time\n"
        "from mcore.observe.async_tasks import trace_async_exceptions\n"
        "@trace_async_exceptions\n"
        "async def failing(): raise ValueError('bad')\n" + body
    )
    return run_script(code)


def test_an_unawaited_failing_task_ends_the_process():
    done = run_program(
        "async def main():\n"
        "    task = asyncio.create_task(failing())\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    assert done.returncode == 1
    assert done.stderr.count("Exception in async function failing: bad") == 1
    assert "ValueError: bad" in done.stderr


def test_an_awaiting_task_is_cancelled_while_the_process_ends():
    done = run_program(
        "async def main():\n"
        "    try: await asyncio.create_task(failing())\n"
        "    except asyncio.CancelledError: print('cancelled', flush=True); raise\n"
        "asyncio.run(main())\n"
    )
    assert (done.returncode, done.stdout) == (1, "cancelled\n")


def test_a_failure_in_another_thread_ends_the_process():
    done = run_program(
        "threading.Thread(target=lambda: asyncio.run(failing())).start()\ntime.sleep(60)\n"
    )
    assert done.returncode == -15
    assert done.stderr.count("Exception in async function failing: bad") == 1


def test_a_handler_of_sigterm_decides_how_the_process_ends():
    done = run_program(
        "def stop(*_):\n"
        "    print('stopping'); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "threading.Thread(target=lambda: asyncio.run(failing())).start()\ntime.sleep(60)\n"
    )
    assert (done.returncode, done.stdout) == (7, "stopping\n")
