"""Tests of deprecated callables and of the markers for internal and experimental APIs."""

import asyncio
import copy
import functools
import inspect
import pickle
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import InvalidVersion

from mcore.versioning import (
    DeprecationInfo,
    deprecated,
    experimental_api,
    experimental_fn,
    get_deprecation,
    internal_api,
    is_experimental_api,
    is_internal_api,
)


@deprecated("1.0.0", "2.0.0", "g", "r")
def old(x: int, *, y: int = 2) -> int:
    """Add them."""
    return x + y


def _caught(call: Callable[[], Any]) -> tuple[Any, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, caught


def _blamed_lines(caught: list[warnings.WarningMessage]) -> list[str]:
    assert {warning.filename for warning in caught} <= {__file__}
    lines = Path(__file__).read_text().splitlines()
    return [lines[warning.lineno - 1].strip() for warning in caught]


# Message and attributes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("1.0.0",), "f is deprecated since version 1.0.0."),
        (
            ("1.0.0", "2.0.0", "g", "r"),
            "f is deprecated since version 1.0.0. Use g instead. "
            "Will be removed in version 2.0.0. Reason: r",
        ),
        (("1.0.0", None, "g"), "f is deprecated since version 1.0.0. Use g instead."),
        (
            ("1.0.0", "2.0.0"),
            "f is deprecated since version 1.0.0. Will be removed in version 2.0.0.",
        ),
        (("1.0.0", None, None, "r {}"), "f is deprecated since version 1.0.0. Reason: r {}"),
    ],
)
def test_message(arguments: tuple[Any, ...], expected: str) -> None:
    def f() -> None: ...

    decorated = deprecated(*arguments)(f)
    _, caught = _caught(decorated)
    assert [str(warning.message) for warning in caught] == [expected]
    assert decorated.__deprecated__ == expected


def test_attributes() -> None:
    assert old._deprecated is True
    assert old._deprecated_version == "1.0.0"
    assert old._removal_version == "2.0.0"
    assert old._alternative == "g"
    assert old._deprecation_reason == "r"
    bare = deprecated("1.0.0")(lambda: None)
    assert (bare._removal_version, bare._alternative, bare._deprecation_reason) == (None,) * 3


def test_record_of_a_deprecation() -> None:
    info = get_deprecation(old)
    assert info == DeprecationInfo("1.0.0", "2.0.0", "g", "r", old.__deprecated__)
    assert info._fields == ("version", "removal_version", "alternative", "reason", "message")
    with pytest.raises(AttributeError):
        info.version = "3"
    assert get_deprecation(len) is None
    assert get_deprecation(5) is None


class Outer:
    class Inner: ...

    def method(self) -> None: ...

    @property
    def empty(self) -> None: ...


def test_names_in_messages() -> None:
    class Callable_:  # noqa: N801
        def __call__(self) -> None: ...

    def local() -> None: ...

    for target, name in (
        (local, "local"),
        (Outer.method, "Outer.method"),
        (Outer().method, "Outer.method"),
        (functools.partial(functools.partial(local)), "local"),
        (functools.partial(Outer().method), "Outer.method"),
        (Callable_(), "Callable_"),
        (len, "len"),
        (dict.get, "dict.get"),
    ):
        assert deprecated("1.0.0")(target).__deprecated__.startswith(f"{name} is deprecated")
    assert deprecated("1.0.0")(Outer.Inner).__deprecated__.startswith("Outer.Inner is deprecated")


# Functions and methods


def test_function_works_and_each_call_warns_at_its_line() -> None:
    def use() -> list[int]:
        return [
            old(1),  # first
            old(1, y=5),  # second
        ]

    result, caught = _caught(use)
    assert result == [3, 6]
    assert [warning.category for warning in caught] == [DeprecationWarning] * 2
    assert _blamed_lines(caught) == ["old(1),  # first", "old(1, y=5),  # second"]


def test_introspection_survives() -> None:
    assert str(inspect.signature(old)) == "(x: int, *, y: int = 2) -> int"
    assert (old.__name__, old.__qualname__, old.__doc__) == ("old", "old", "Add them.")


def test_stacklevel_blames_the_callers_caller() -> None:
    @deprecated("1.0.0", stacklevel=2)
    def inner() -> None: ...

    def library() -> None:
        inner()

    _, caught = _caught(lambda: library())  # the user
    assert _blamed_lines(caught) == ["_, caught = _caught(lambda: library())  # the user"]


def test_category_is_used() -> None:
    @deprecated("1.0.0", category=FutureWarning)
    def f() -> None: ...

    _, caught = _caught(f)
    assert [warning.category for warning in caught] == [FutureWarning]


def test_no_category_attaches_the_attributes_and_nothing_else() -> None:
    def f() -> int:
        return 1

    decorated = deprecated("1.0.0", category=None)(f)
    assert decorated is f
    assert get_deprecation(f).version == "1.0.0"
    assert _caught(f) == (1, [])


class Methods:
    @deprecated("1.0.0")
    def plain(self) -> Any:
        return self

    @deprecated("1.0.0")
    @staticmethod
    def static_outer() -> int:
        return 1

    @staticmethod
    @deprecated("1.0.0")
    def static_inner() -> int:
        return 1

    @deprecated("1.0.0")
    @classmethod
    def class_outer(cls) -> Any:
        return cls

    @classmethod
    @deprecated("1.0.0")
    def class_inner(cls) -> Any:
        return cls


def test_methods_of_all_kinds() -> None:
    methods = Methods()

    def use() -> list[Any]:
        return [
            methods.plain(),
            Methods.static_outer(),
            Methods.static_inner(),
            Methods.class_outer(),
            methods.class_inner(),
        ]

    result, caught = _caught(use)
    assert result == [methods, 1, 1, Methods, Methods]
    names = ["plain", "static_outer", "static_inner", "class_outer", "class_inner"]
    assert [str(w.message).split(" ", 1)[0] for w in caught] == [f"Methods.{n}" for n in names]
    assert [n in line for n, line in zip(names, _blamed_lines(caught), strict=True)] == [True] * 5
    assert type(vars(Methods)["static_outer"]) is staticmethod
    assert type(vars(Methods)["class_outer"]) is classmethod
    assert vars(Methods)["static_outer"]._deprecated is True
    assert vars(Methods)["class_outer"]._deprecated is True
    for name in names:
        assert getattr(Methods, name).__deprecated__
        assert get_deprecation(vars(Methods)[name]) is not None
        assert get_deprecation(getattr(methods, name)) is not None


class WithProperty:
    def __init__(self) -> None:
        self.stored = 1

    @deprecated("1.0.0")
    @property
    def read_only(self) -> int:
        """What is stored."""
        return self.stored

    def _get(self) -> int:
        return self.stored

    def _set(self, value: int) -> None:
        self.stored = value

    def _delete(self) -> None:
        del self.stored

    full = deprecated("1.0.0")(property(_get, _set, _delete, "Everything."))


def test_property_warns_on_get_set_and_delete() -> None:
    instance = WithProperty()

    def use() -> int:
        instance.full = 5
        value = instance.full + instance.read_only
        del instance.full
        return value

    result, caught = _caught(use)
    assert result == 10
    assert _blamed_lines(caught) == [
        "instance.full = 5",
        "value = instance.full + instance.read_only",
        "value = instance.full + instance.read_only",
        "del instance.full",
    ]
    assert type(vars(WithProperty)["full"]) is property
    assert WithProperty.full.__doc__ == "Everything."
    assert WithProperty.read_only.__doc__ == "What is stored."
    assert get_deprecation(vars(WithProperty)["read_only"]).version == "1.0.0"
    with pytest.raises(AttributeError):
        instance.read_only = 3


def test_subclass_of_property_keeps_its_type() -> None:
    class Special(property): ...

    assert type(deprecated("1.0.0")(Special(lambda self: 1))) is Special


def test_coroutine_is_blamed_on_the_line_that_calls_it() -> None:
    @deprecated("1.0.0")
    async def co() -> int:
        return 1

    async def main() -> int:
        task = asyncio.ensure_future(co())  # the call
        await asyncio.sleep(0)
        return await task

    result, caught = _caught(lambda: asyncio.run(co()))
    assert result == 1
    assert len(caught) == 1
    assert caught[0].filename == __file__
    result, caught = _caught(lambda: asyncio.run(main()))
    assert result == 1
    assert _blamed_lines(caught) == ["task = asyncio.ensure_future(co())  # the call"]
    assert asyncio.iscoroutinefunction(co)
    if sys.version_info >= (3, 12):
        assert inspect.iscoroutinefunction(co)


def test_generators_warn_when_called() -> None:
    @deprecated("1.0.0")
    def count() -> Iterator[int]:
        yield 1

    @deprecated("1.0.0")
    async def stream() -> AsyncIterator[int]:
        yield 2

    items, caught = _caught(lambda: count())
    assert len(caught) == 1
    assert _caught(lambda: list(items)) == ([1], [])
    assert inspect.isgeneratorfunction(inspect.unwrap(count))
    generator, caught = _caught(lambda: stream())
    assert len(caught) == 1

    async def collect() -> list[int]:
        return [item async for item in generator]

    assert _caught(lambda: asyncio.run(collect())) == ([2], [])
    assert inspect.isasyncgenfunction(inspect.unwrap(stream))


def test_callables_without_a_name() -> None:
    class Adder:
        def __call__(self, x: int) -> int:
            return x + 1

    for target in (functools.partial(pow, 2), Adder()):
        decorated = deprecated("1.0.0")(target)
        result, caught = _caught(lambda decorated=decorated: decorated(3))
        assert result == target(3)
        assert len(caught) == 1
        expected = "pow" if isinstance(target, functools.partial) else "Adder"
        assert (decorated.__name__, decorated.__qualname__) == (expected, expected)


def test_builtin_function_can_be_deprecated() -> None:
    result, caught = _caught(lambda: deprecated("1.0.0")(len)([1]))
    assert (result, len(caught)) == (1, 1)


def test_twice_warns_once_with_the_outer_text() -> None:
    @deprecated("2.0.0", alternative="outer")
    @internal_api
    @deprecated("1.0.0", alternative="inner")
    def f() -> int:
        return 1

    result, caught = _caught(lambda: f())
    assert result == 1
    assert [str(warning.message) for warning in caught] == [
        "f is deprecated since version 2.0.0. Use outer instead."
    ]
    assert caught[0].filename == __file__
    assert f._deprecated_version == "2.0.0"
    assert is_internal_api(f)


def test_twice_with_the_outer_one_silent() -> None:
    @deprecated("2.0.0", category=None)
    @internal_api
    @deprecated("1.0.0")
    def f() -> int:
        return 1

    assert _caught(f) == (1, [])
    assert get_deprecation(f).version == "2.0.0"
    assert is_internal_api(f)
    assert str(inspect.signature(f)) == "() -> int"


def test_three_times_warns_once() -> None:
    def f() -> int:
        return 1

    for version in ("1.0.0", "2.0.0", "3.0.0"):
        f = deprecated(version)(f)
    result, caught = _caught(f)
    assert result == 1
    assert [str(warning.message) for warning in caught] == ["f is deprecated since version 3.0.0."]


def test_decorator_of_someone_else_in_between_is_kept() -> None:
    def doubling(func: Callable[[], int]) -> Callable[[], int]:
        @functools.wraps(func)
        def wrapper() -> int:
            return 2 * func()

        return wrapper

    @deprecated("2.0.0")
    @doubling
    @deprecated("1.0.0")
    def f() -> int:
        return 1

    result, _ = _caught(f)
    assert result == 2


def test_module_level_function_pickles_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, inspect.getmodule(old))
    assert pickle.loads(pickle.dumps(old)) is old
    assert copy.deepcopy(old) is old


# Bad input


@pytest.mark.parametrize("arguments", [("soon",), ("1.0.0", "later"), ("",)])
def test_text_that_is_no_version(arguments: tuple[str, ...]) -> None:
    with pytest.raises(InvalidVersion):
        deprecated(*arguments)


@pytest.mark.parametrize("removal", ["1.0.0", "0.9", "1.0.0rc1"])
def test_removal_must_come_later(removal: str) -> None:
    with pytest.raises(ValueError, match="must be later"):
        deprecated("1.0.0", removal)


def test_bare_use_is_refused() -> None:
    with pytest.raises(TypeError, match="Write the version in quotes"):

        @deprecated
        def bare() -> None: ...

    with pytest.raises(TypeError, match="Write the version in quotes"):

        @deprecated
        class Bare: ...


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(TypeError, match="removal_version"):
        deprecated("1.0.0", 2)
    with pytest.raises(TypeError, match="version of @deprecated is None"):
        deprecated(None)
    with pytest.raises(TypeError, match="subclass of Warning"):
        deprecated("1.0.0", category=ValueError)
    with pytest.raises(TypeError, match="subclass of Warning"):
        deprecated("1.0.0", category="DeprecationWarning")
    with pytest.raises(ValueError, match="stacklevel"):
        deprecated("1.0.0", stacklevel=0)
    with pytest.raises(TypeError, match="can't be decorated"):
        deprecated("1.0.0")(5)
    with pytest.raises(TypeError, match="accepts no attributes"):
        deprecated("1.0.0")(int)
    with pytest.raises(TypeError, match="accepts no attributes"):
        deprecated("1.0.0", category=None)(len)


# Markers


@pytest.mark.parametrize(
    ("mark", "attribute", "is_marked"),
    [
        (internal_api, "_internal_api", is_internal_api),
        (experimental_api, "_experimental_api", is_experimental_api),
    ],
)
def test_markers(mark: Any, attribute: str, is_marked: Any) -> None:
    def f() -> None: ...

    class K:
        def method(self) -> None: ...

    class Child(K): ...

    for target in (f, K, functools.partial(f)):
        assert is_marked(target) is False
        assert mark(target) is target
        assert mark(target) is target
        assert getattr(target, attribute) is True
        assert is_marked(target) is True
    assert getattr(Child, attribute) is True
    assert is_marked(Child) is False
    assert is_marked(K()) is False


@pytest.mark.parametrize("mark", [internal_api, experimental_api])
def test_markers_reach_into_descriptors(mark: Any) -> None:
    def get(self: Any) -> int:
        return 1

    def put(self: Any, value: int) -> None: ...

    is_marked = is_internal_api if mark is internal_api else is_experimental_api
    for descriptor in (staticmethod(get), classmethod(get), property(get, put)):
        assert mark(descriptor) is descriptor
        assert is_marked(descriptor)
    assert is_marked(get)
    assert is_marked(put)
    empty = property()
    assert mark(empty) is empty
    assert not is_marked(empty)


def test_marked_method_is_recognised_through_an_instance() -> None:
    class K:
        @internal_api
        def method(self) -> None: ...

    assert is_internal_api(K.method)
    assert is_internal_api(K().method)


@pytest.mark.parametrize("target", [len, int, 5, Outer().method])
def test_markers_refuse_what_takes_no_attributes(target: Any) -> None:
    for mark in (internal_api, experimental_api):
        with pytest.raises(TypeError, match="accepts no attributes") as caught:
            mark(target)
        assert repr(target) in str(caught.value)


def test_markers_survive_in_any_order() -> None:
    decorators = [
        internal_api,
        experimental_api,
        deprecated("1.0.0"),
        experimental_fn("0.1.0"),
    ]
    for shift in range(len(decorators)):

        def f() -> None: ...

        for decorate in decorators[shift:] + decorators[:shift]:
            f = decorate(f)
        assert is_internal_api(f)
        assert is_experimental_api(f)
        assert get_deprecation(f) is not None
        assert f._introduced_with_version == "0.1.0"


def test_descriptor_around_a_descriptor() -> None:
    chained = deprecated("1.0.0")(classmethod(staticmethod(lambda *args: len(args))))
    assert type(chained) is classmethod
    assert type(chained.__func__) is staticmethod
    assert get_deprecation(chained.__func__) is not None
    for mark, is_marked in (
        (internal_api, is_internal_api),
        (experimental_api, is_experimental_api),
    ):
        marked = mark(classmethod(staticmethod(lambda *args: len(args))))
        assert is_marked(marked)
