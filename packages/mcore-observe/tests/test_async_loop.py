import asyncio
import os
import threading

import pytest

from mcore.observe import async_tasks, get_asyncio_loop


@pytest.fixture(autouse=True)
def close_the_loop():
    yield
    loop = getattr(async_tasks._cache, "loop", None)
    if loop is not None:
        loop.close()
    asyncio.set_event_loop(None)


def test_a_given_loop_is_returned():
    loop = asyncio.new_event_loop()
    try:
        assert get_asyncio_loop(loop) is loop
    finally:
        loop.close()


def test_the_running_loop_comes_before_the_cached_one():
    cached = get_asyncio_loop()

    async def both():
        return get_asyncio_loop(), asyncio.get_running_loop()

    seen, running = asyncio.run(both())
    assert seen is running
    assert seen is not cached


def test_the_new_loop_is_cached_current_and_shown():
    loop = get_asyncio_loop()
    assert get_asyncio_loop() is loop
    assert async_tasks._ASYNC_IO_LOOP is loop
    assert asyncio.get_event_loop_policy().get_event_loop() is loop
    assert loop.run_until_complete(asyncio.sleep(0, "ran")) == "ran"


def test_a_closed_loop_is_replaced():
    first = get_asyncio_loop()
    first.close()
    second = get_asyncio_loop()
    assert second is not first
    assert not second.is_closed()
    assert async_tasks._ASYNC_IO_LOOP is second


def test_each_thread_has_its_own():
    mine, theirs = get_asyncio_loop(), []

    def other():
        loop = get_asyncio_loop()
        theirs.extend([loop, get_asyncio_loop()])
        loop.close()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert theirs[0] is theirs[1]
    assert theirs[0] is not mine
    assert async_tasks._ASYNC_IO_LOOP is mine


def test_a_forked_child_gets_another_and_leaves_the_parents_alone():
    mine = get_asyncio_loop()
    child = os.fork()
    if child == 0:
        theirs = get_asyncio_loop()
        ok = theirs is not mine and not mine.is_closed() and get_asyncio_loop() is theirs
        theirs.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread = threading.Timer(0.05, lambda: mine.call_soon_threadsafe(mine.stop))
    thread.start()  # wakes the loop through the pipe that a closing child would have unregistered
    mine.run_forever()
    thread.join()
    assert get_asyncio_loop() is mine
