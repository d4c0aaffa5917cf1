import contextlib
import os
import signal
import threading

import pytest
import torch

from mcore.tensor import (
    GlobalMemoryBuffer,
    destroy_global_memory_buffer,
    get_global_memory_buffer,
)


@pytest.fixture(autouse=True)
def fresh_buffer():
    destroy_global_memory_buffer()
    yield
    destroy_global_memory_buffer()


def test_there_is_one_instance():
    assert get_global_memory_buffer() is get_global_memory_buffer()
    assert isinstance(get_global_memory_buffer(), GlobalMemoryBuffer)


def test_destroying_it_twice_gives_a_new_empty_one():
    first = get_global_memory_buffer()
    first.reserve((4,), torch.float32, "x")
    destroy_global_memory_buffer()
    destroy_global_memory_buffer()
    assert get_global_memory_buffer() is not first
    assert get_global_memory_buffer().nbytes() == 0


def test_threads_get_the_same_instance():
    start = threading.Barrier(16)
    seen = []

    def ask():
        start.wait()
        seen.append(get_global_memory_buffer())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(seen) == 16
    assert len(set(map(id, seen))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_of_the_parent():
    buffers = GlobalMemoryBuffer()
    entered, leave = threading.Event(), threading.Event()

    def allocate_slowly():
        entered.set()
        leave.wait(300)
        return contextlib.nullcontext()

    arguments = ((2,), torch.float32, "x", allocate_slowly)
    thread = threading.Thread(target=buffers.get_tensor, args=arguments, kwargs={"device": "cpu"})
    thread.start()
    assert entered.wait(300)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits
        size = buffers.get_tensor((3,), torch.float32, "y", device="cpu").numel()
        os._exit(size)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 3


def test_a_forked_child_starts_empty():
    parent = get_global_memory_buffer()
    parent.reserve((4,), torch.float32, "x", device="cpu")
    child = os.fork()
    if child == 0:
        mine = get_global_memory_buffer()
        mine.reserve((2,), torch.float32, "x", device="cpu")
        os._exit(0 if mine is not parent and mine.nbytes() == 8 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert get_global_memory_buffer() is parent
    assert parent.nbytes() == 16
