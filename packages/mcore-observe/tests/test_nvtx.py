import asyncio
import functools
import inspect
import threading
import types

import pytest
import torch

import mcore.observe.nvtx as nvtx
from mcore.observe import (
    configure_nvtx_profiling,
    nvtx_decorator,
    nvtx_range,
    nvtx_range_pop,
    nvtx_range_push,
)

HERE = __name__


@pytest.fixture(autouse=True)
def off_again():
    yield
    configure_nvtx_profiling(True, backend="none")
    while nvtx._nvtx_range_messages:
        nvtx_range_pop(nvtx._nvtx_range_messages[-1])
    configure_nvtx_profiling(False)


@pytest.fixture
def on():
    configure_nvtx_profiling(True, backend="none")


def messages():
    return list(nvtx._nvtx_range_messages)


def profiled(work):
    """The names of the ranges that the torch profiler saw, with start and end in us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return {event.name: event.time_range for event in profile.events()}


def make_module(name):
    """A module of its own with the smallest user of ranges."""
    module = types.ModuleType(name)
    code = (
        "from mcore.observe.nvtx import *\n"
        "import mcore.observe.nvtx as nvtx\n"
        "def f(*args, **kwargs):\n"
        "    nvtx_range_push(*args, **kwargs)\n"
        "    seen = list(nvtx._nvtx_range_messages)\n"
        "    nvtx_range_pop(*args, **kwargs)\n"
        "    return seen, list(nvtx._nvtx_range_messages)\n"
        "class C:\n"
        "    def meth(self): return f.__globals__['g']()\n"
        "def g():\n"
        "    with nvtx_range(): return list(nvtx._nvtx_range_messages)\n"
    )
    exec(code, module.__dict__)
    return module


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((), {}, "m.f"),
        ((), {"suffix": "s"}, "m.f.s"),
        (("a",), {}, "a"),
        (("a", "b"), {}, "a.b"),
    ],
)
def test_names_of_ranges(on, args, kwargs, name):
    module = make_module("m")
    assert module.f(*args, **kwargs) == ([name], [])
    configure_nvtx_profiling(False)
    assert module.f(*args, **kwargs) == ([], [])


def test_a_method_is_named_without_its_class(on):
    class Layer:
        def forward(self):
            nvtx_range_push()
            seen = messages()
            nvtx_range_pop()
            return seen

    assert Layer().forward() == [f"{HERE}.forward"]


def test_one_code_object_in_two_modules(on):
    code = compile("def f():\n    push(); seen = messages(); pop(); return seen", "f.py", "exec")
    for name in ("first", "second", "first"):
        scope = {"push": nvtx_range_push, "pop": nvtx_range_pop, "messages": messages}
        exec(code, {**scope, "__name__": name}, kept := {})
        assert kept["f"].__globals__["__name__"] == name
        assert kept["f"]() == [f"{name}.f"]


def test_a_caller_without_a_module_name(on):
    scope = {"push": nvtx_range_push, "pop": nvtx_range_pop, "messages": messages}
    exec("def f():\n    push(); seen = messages(); pop(); return seen", scope)
    del scope["__builtins__"]
    assert scope["f"]() == ["<unknown>.f"]


def test_the_documented_path_functions():
    def as_push_does():
        return nvtx._nvtx_range_get_func_path()

    class Callable:
        def __call__(self):
            return 1

    assert as_push_does() == f"{HERE}.test_the_documented_path_functions"
    path = nvtx._nvtx_decorator_get_func_path
    assert path(as_push_does) == f"{HERE}.as_push_does"
    assert path(functools.partial(as_push_does)) == "functools.partial"
    assert path(Callable()) == f"{HERE}.Callable"
    assert path(str.upper) == "<unknown>.upper"


def test_ranges_nest(on):
    nvtx_range_push("a")
    nvtx_range_push("b")
    assert messages() == ["a", "b"]
    nvtx_range_pop("b")
    assert messages() == ["a"]
    nvtx_range_pop("a")
    assert messages() == []


def test_wrong_pops_change_nothing(on):
    with pytest.raises(RuntimeError, match="'x', but this thread has no open range"):
        nvtx_range_pop("x")
    nvtx_range_push("a")
    with pytest.raises(ValueError, match="'b', but the innermost open one is 'a'"):
        nvtx_range_pop("b")
    assert messages() == ["a"]
    nvtx_range_pop("a")


def test_off_nothing_is_raised_whatever_is_popped():
    nvtx_range_pop()
    nvtx_range_pop("x", "y")
    nvtx_range_push("a")
    nvtx_range_pop("b")
    assert messages() == []


def test_switching_off_inside_a_range(on):
    nvtx_range_push("a")
    configure_nvtx_profiling(False)
    nvtx_range_push("b")  # not opened
    nvtx_range_pop("b")  # so nothing is closed
    assert messages() == ["a"]
    nvtx_range_pop("a")
    assert messages() == []
    nvtx_range_pop("a")


def test_pops_while_off_are_cheap_again_once_all_ranges_are_closed(on):
    opened, close, threads = threading.Event(), threading.Event(), []

    def other():
        nvtx_range_push("theirs")
        opened.set()
        close.wait(300)
        nvtx_range_pop("theirs")

    threads.append(threading.Thread(target=other))
    threads[0].start()
    assert opened.wait(300)
    nvtx_range_push("mine")
    configure_nvtx_profiling(False)
    nvtx_range_pop("mine")
    assert nvtx._may_be_open
    close.set()
    threads[0].join()
    assert not nvtx._may_be_open


def test_switching_inside_decorated_calls_and_blocks():
    @nvtx_decorator(message="d")
    def switch(enabled):
        configure_nvtx_profiling(enabled, backend="none")
        return messages()

    assert switch(True) == []
    assert messages() == []
    assert switch(False) == ["d"]
    assert messages() == []
    with nvtx_range("block"):
        configure_nvtx_profiling(True, backend="none")
    with nvtx_range("block"):
        configure_nvtx_profiling(False)
        assert messages() == ["block"]
    assert messages() == []


def test_a_block_closes_what_was_left_open_in_it(on):
    nvtx_range_push("outer")
    with nvtx_range("block"):
        nvtx_range_push("forgotten")
    assert messages() == ["outer"]
    with nvtx_range("block"):
        nvtx_range_pop("block")
    assert messages() == ["outer"]
    nvtx_range_pop("outer")


def test_ranges_close_when_something_is_raised(on):
    error = ValueError("mine")

    @nvtx_decorator()
    def raising():
        nvtx_range_push("inner")
        raise error

    def in_a_block():
        with nvtx_range():
            seen.extend(messages())
            raising()

    seen = []
    with pytest.raises(ValueError, match="mine") as caught:
        in_a_block()
    assert caught.value is error
    assert seen == [f"{HERE}.in_a_block"]
    assert messages() == []


def test_two_threads_never_mix(on):
    ready, seen = threading.Barrier(2), {"a": [], "b": []}

    def work(name):
        for number in range(50):
            ready.wait(300)
            nvtx_range_push(name, str(number))
            ready.wait(300)
            seen[name].append(messages())
            nvtx_range_pop(name, str(number))

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, lists in seen.items():
        assert lists == [[f"{name}.{number}"] for number in range(50)]


def test_decorated_functions_keep_their_looks():
    @nvtx_decorator()
    def plain(a: int) -> int:
        """Says so."""
        return a

    @nvtx_decorator()
    async def coroutine(): ...

    @nvtx_decorator()
    async def async_generator():
        yield

    @nvtx_decorator()
    def generator():
        yield

    assert (plain.__name__, plain.__doc__, plain(3)) == ("plain", "Says so.", 3)
    assert str(inspect.signature(plain)) == "(a: int) -> int"
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isasyncgenfunction(async_generator)
    assert inspect.isgeneratorfunction(generator)


def test_decorated_callables_without_a_name(on):
    class Asynchronous:
        async def __call__(self):
            return messages()

    seen = nvtx_decorator()(functools.partial(messages))()
    assert seen == ["functools.partial"]
    decorated = nvtx_decorator()(Asynchronous())
    assert inspect.iscoroutinefunction(decorated)
    assert asyncio.run(decorated()) == []  # open, but in no thread's stack


def test_the_profiler_shows_ranges_that_were_decorated_while_off():
    @nvtx_decorator()
    def decorated():
        with nvtx_range("inner", "s"):
            nvtx_range_push("pushed")
            nvtx_range_pop("pushed")

    assert f"{HERE}.decorated" not in profiled(decorated)
    configure_nvtx_profiling(True, backend="record")
    ranges = profiled(decorated)
    outer, inner, pushed = (ranges[n] for n in (f"{HERE}.decorated", "inner.s", "pushed"))
    assert outer.start <= inner.start <= pushed.start <= pushed.end <= inner.end <= outer.end


def test_the_range_of_a_coroutine_is_its_whole_life():
    configure_nvtx_profiling(True, backend="record")

    @nvtx_decorator(message="first")
    async def first(go):
        await go.wait()
        await asyncio.sleep(0.01)
        raise KeyError("end")

    @nvtx_decorator(message="second")
    async def second(go):
        go.set()
        await asyncio.sleep(0)

    async def both():
        go = asyncio.Event()
        return await asyncio.gather(first(go), second(go), return_exceptions=True)

    ranges = profiled(lambda: asyncio.run(both()))
    assert ranges["first"].start <= ranges["second"].start
    assert ranges["second"].end <= ranges["first"].end
    assert ranges["first"].elapsed_us() >= 9_000
    assert messages() == []


def test_the_range_of_a_generator_is_its_whole_life():
    configure_nvtx_profiling(True, backend="record")

    @nvtx_decorator(message="generator")
    def generator():
        sent = yield 1
        with nvtx_range("last step"):
            pass
        return sent

    @nvtx_decorator(message="async generator")
    async def async_generator():
        seen.append((yield 1))
        with nvtx_range("async step"):
            pass
        yield 2

    async def consume():
        items = async_generator()
        await items.__anext__()
        assert await items.asend("sent") == 2
        await items.aclose()

    def work():
        items = generator()
        next(items)
        with pytest.raises(StopIteration) as stopped:
            items.send("value")
        seen.append(stopped.value.value)
        asyncio.run(consume())

    seen = []
    ranges = profiled(work)
    assert seen == ["value", "sent"]
    for life, step in (("generator", "last step"), ("async generator", "async step")):
        assert ranges[life].start <= ranges[step].start
        assert ranges[step].end <= ranges[life].end


def test_a_generator_that_is_closed_early_closes_its_range():
    opened = []

    class Counting:
        name = "counting"

        def start(self, message, color):
            opened.append(message)
            return message

        def end(self, handle):
            opened.remove(handle)

    @nvtx_decorator(message="early")
    def generator():
        yield 1

    configure_nvtx_profiling(True, backend="none")
    nvtx._backend = Counting()
    items = generator()
    assert opened == []
    next(items)
    assert opened == ["early"]
    configure_nvtx_profiling(False)
    items.close()
    assert opened == []


def test_a_range_is_closed_by_the_backend_that_opened_it():
    configure_nvtx_profiling(True, backend="record")

    def work():
        nvtx_range_push("long")
        configure_nvtx_profiling(True, backend="none")
        nvtx_range_pop("long")

    assert "long" in profiled(work)


def test_configure_says_what_is_wrong_and_changes_nothing():
    for enabled in (True, False):
        with pytest.raises(ValueError, match=r"unknown range backend 'nsight'.*'auto', 'nvtx'"):
            configure_nvtx_profiling(enabled, backend="nsight")
    assert nvtx._nvtx_enabled is False
    configure_nvtx_profiling(True, backend="none")
    assert nvtx._nvtx_enabled is True
    configure_nvtx_profiling(False)
    assert nvtx._nvtx_enabled is False


def test_unknown_attributes_of_the_module():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = nvtx.no_such_name


def test_the_list_of_messages_can_be_imported(on):
    from mcore.observe.nvtx import _nvtx_range_messages

    nvtx_range_push("a")
    assert _nvtx_range_messages == ["a"]
    nvtx_range_pop("a")
    assert _nvtx_range_messages == []


def test_colours_are_ignored_where_there_are_none():
    configure_nvtx_profiling(True, backend="record")
    with nvtx_range("coloured", color="no such colour"):
        assert messages() == ["coloured"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_nvtx_on_a_gpu():
    """Real NVTX calls: nesting, overlapping lives, and the profiler's own emission of ranges."""
    configure_nvtx_profiling(True, backend="torch.cuda.nvtx")

    @nvtx_decorator(message="life")
    async def life(x):
        await asyncio.sleep(0)
        return x * 2

    async def two(x):
        return await asyncio.gather(life(x), life(x))

    x = torch.ones(8, device="cuda")
    with nvtx_range("outer", color="red"):
        nvtx_range_push("inner")
        assert messages() == ["outer", "inner"]
        doubled = asyncio.run(two(x))
        nvtx_range_pop("inner")
    assert messages() == []
    assert torch.equal(doubled[0].cpu(), torch.full((8,), 2.0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranges_inside_a_cuda_graph():
    """A range recorded in a CUDA graph keeps its name alive over replays."""
    configure_nvtx_profiling(True, backend="torch.cuda.nvtx")
    x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), nvtx_range("".join(["made", " at ", "run time"])):
        y = x + 1
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y.cpu(), torch.full((8,), 2.0))
    assert messages() == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_takes_nvtx_on_a_gpu():
    """Auto picks the nvtx package or torch's NVTX calls, not the profiler's."""
    configure_nvtx_profiling(True)
    assert nvtx._backend.name in ("nvtx", "torch.cuda.nvtx")
