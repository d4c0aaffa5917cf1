import asyncio
import functools
import inspect
from contextlib import contextmanager

import pytest

from mcore.observe.async_tasks import kind_of, wrap_lifetime


async def coroutine():
    events.append("body")
    await asyncio.sleep(0)
    return "result"


async def async_generator():
    events.append("body")
    yield "item"


def generator():
    events.append("body")
    yield "item"
    return "result"


def function():
    return "result"


class AsyncCallable:
    async def __call__(self): ...


KINDS = {
    "async function": coroutine,
    "async generator": async_generator,
    "generator": generator,
    "function": function,
}
events = []


@pytest.fixture(autouse=True)
def no_events():
    events.clear()


@contextmanager
def around():
    events.append("open")
    try:
        yield
    except BaseException as error:
        events.append(type(error).__name__)
        raise
    finally:
        events.append("close")


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    assert kind_of(KINDS[kind]) == kind
    assert kind_of(functools.partial(KINDS[kind])) == kind


@pytest.mark.parametrize("thing", [len, AsyncCallable(), 3, None, "text"])
def test_everything_else_is_a_function(thing):
    assert kind_of(thing) == "function"


def test_a_plain_function_is_refused():
    with pytest.raises(ValueError, match="plain function"):
        wrap_lifetime(function, "function", around)


def test_the_call_itself_opens_nothing():
    wrapped = {kind: wrap_lifetime(KINDS[kind], kind, around) for kind in list(KINDS)[:3]}
    made = [wrapper() for wrapper in wrapped.values()]
    assert events == []
    made[0].close()
    assert inspect.iscoroutinefunction(wrapped["async function"])
    assert inspect.isasyncgenfunction(wrapped["async generator"])
    assert inspect.isgeneratorfunction(wrapped["generator"])


def test_whole_lives():
    async def consume():
        items = wrap_lifetime(async_generator, "async generator", around)
        return [item async for item in items()]

    whole = ["open", "body", "close"]
    assert asyncio.run(wrap_lifetime(coroutine, "async function", around)()) == "result"
    assert events == whole
    assert asyncio.run(consume()) == ["item"]
    assert list(wrap_lifetime(generator, "generator", around)()) == ["item"]
    assert events == whole * 3


def test_lives_that_are_cut_short():
    async def close_early():
        items = wrap_lifetime(async_generator, "async generator", around)()
        await items.__anext__()
        await items.aclose()

    asyncio.run(close_early())
    items = wrap_lifetime(generator, "generator", around)()
    next(items)
    items.close()
    running = wrap_lifetime(coroutine, "async function", around)()
    running.send(None)
    with pytest.raises(KeyError):
        running.throw(KeyError("k"))
    cut = ["open", "body", "GeneratorExit", "close"]
    assert events == [*cut, *cut, "open", "body", "KeyError", "close"]
