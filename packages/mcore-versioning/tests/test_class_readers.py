"""Tests of who may use a gated class while its gate is closed: live objects and tools."""

import abc
import copy
import ctypes
import dataclasses
import doctest
import functools
import inspect
import pydoc
import rlcompleter
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest

from mcore.versioning import (
    ExperimentalNotEnabledError,
    experimental_cls,
    experimental_enabled,
    set_experimental_flag,
)


def _passing(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


def _limit_of(live: Any) -> int:
    return live.by_type()


class Parent:
    def template(self) -> int:
        return type(self).limit


@experimental_cls("0.1.0")
class Live(Parent):
    """A class whose methods look at the class."""

    limit = 3

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def by_type(self) -> int:
        return type(self).limit

    def by_class(self) -> int:
        return self.__class__.limit

    def by_name(self) -> int:
        return Live.limit

    def by_class_method(self) -> int:
        return self.limit_of_class()

    def by_nested_code(self) -> list[int]:
        return [(lambda: type(self).limit + n)() for n in range(1)]

    def later(self) -> Callable[[], int]:
        return lambda: type(self).limit

    def lazily(self) -> Iterator[int]:
        yield type(self).limit

    @property
    def by_property(self) -> int:
        return type(self).limit

    @_passing
    def by_wrapped(self) -> int:
        return type(self).limit

    @classmethod
    def limit_of_class(cls) -> int:
        return cls.limit

    @staticmethod
    def limit_of_name() -> int:
        """The limit.

        >>> 1 + 1
        2
        """
        return Live.limit

    @classmethod
    def build(cls) -> "Live":
        return cls(7)

    @classmethod
    def _build(cls) -> "Live":
        return cls(7)

    def deeper(self) -> "Live":
        return type(self)(self.depth + 1)

    def named_deeper(self) -> "Live":
        return Live(self.depth + 1)


class Child(Live):
    own = 5

    def by_own(self) -> int:
        return type(self).own + type(self).limit

    @staticmethod
    def leak() -> "Child":
        return Child()

    @staticmethod
    def leaked_limit() -> int:
        return Child.limit


@pytest.fixture(params=[Live, Child])
def live(request: pytest.FixtureRequest) -> Any:
    """An object that was made while experimental code was on."""
    with experimental_enabled():
        return request.param()


@pytest.mark.parametrize(
    "use",
    [
        lambda live: live.by_type(),
        lambda live: live.by_class(),
        lambda live: live.by_name(),
        lambda live: live.by_class_method(),
        lambda live: live.by_nested_code()[0],
        lambda live: live.later()(),
        lambda live: next(live.lazily()),
        lambda live: live.by_property,
        lambda live: live.by_wrapped(),
        lambda live: live.limit_of_class(),
        lambda live: live.limit_of_name(),
        lambda live: live.template(),
        _limit_of,
    ],
)
def test_live_objects_reach_attributes_of_their_class(use: Callable[[Any], int], live: Any) -> None:
    assert use(live) == 3
    with experimental_enabled():
        set_experimental_flag(False)
        assert use(live) == 3


def test_live_objects_make_others(live: Any) -> None:
    assert live.deeper().deeper().depth == 2
    assert live.named_deeper().depth == 1
    assert type(live.deeper()) is type(live)
    assert live.build().depth == 7


def test_objects_of_a_subclass_reach_both_classes() -> None:
    with experimental_enabled():
        child = Child()
    assert child.by_own() == 8


def test_live_object_is_used_by_another_thread(live: Any) -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(live.by_type()))
    thread.start()
    thread.join(timeout=30)
    assert results == [3]


@pytest.mark.parametrize(
    "use",
    [
        lambda: Live(),
        lambda: Live.limit,
        lambda: Live.limit_of_class(),
        lambda: Live._build(),
        lambda: Live.build(),
        lambda: Child.build(),
        lambda: Child.leak(),
        lambda: Child.leaked_limit(),
        lambda: [Live.limit for _ in range(1)],
        lambda: Live.by_type,
    ],
)
@pytest.mark.usefixtures("live")
def test_others_are_refused_after_the_class_was_used(use: Callable[[], object]) -> None:
    with pytest.raises(ExperimentalNotEnabledError):
        use()
    set_experimental_flag(True)
    use()
    with experimental_enabled(False), pytest.raises(ExperimentalNotEnabledError):
        use()
    set_experimental_flag(False)
    with pytest.raises(ExperimentalNotEnabledError):
        use()


def test_function_with_a_live_object_at_hand_is_refused(live: Any) -> None:
    def train(live: Any) -> object:
        return live.limit, Live()

    with pytest.raises(ExperimentalNotEnabledError):
        train(live)


def test_copies_are_made_of_live_objects() -> None:
    @experimental_cls("0.1.0")
    @dataclasses.dataclass
    class Point:
        x: int
        code = 1

    @experimental_cls("0.1.0")
    class CodeError(RuntimeError):
        code = 2

        def __str__(self) -> str:
            return f"{type(self).code}: {self.args[0]}"

    with experimental_enabled():
        point, error, pair = Point(1), CodeError("a"), experimental_cls("0.1.0")(_pair())(3)
    assert dataclasses.replace(point, x=2).x == 2
    assert [str(again) for again in (copy.copy(error), copy.deepcopy(error))] == ["2: a"] * 2
    assert dataclasses.asdict(dataclasses.replace(point, x=pair)) == {"x": pair}
    assert type(pair._replace(a=4)) is type(pair)
    for make in (lambda: Point(1), lambda: CodeError("a"), lambda: type(pair)(1)):
        with pytest.raises(ExperimentalNotEnabledError):
            make()


def test_signature_that_is_a_descriptor() -> None:
    class Lazy:
        def __get__(self, instance: object, owner: type) -> inspect.Signature:
            return inspect.signature(lambda x, y=2: None)

    @experimental_cls("0.1.0")
    class Model:
        __signature__ = Lazy()

    assert str(inspect.signature(Model)) == "(x, y=2)"


# Tools


def _members(cls: type[Any]) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls)}


def _plain() -> type[Any]:
    """The undecorated class, made once more."""

    class Layer(Parent):
        """A layer.

        >>> 2 * 3
        6
        """

        scale: float = 2.0

        def __init__(self, size: int, *, bias: bool = True) -> None:
            self.size = size

        def forward(self, x: float) -> float:
            """Scale.

            >>> 3 * 2.0
            6.0
            """
            return x * self.scale

        @property
        def area(self) -> int:
            """The area."""
            return self.size**2

        @classmethod
        def make(cls, size: int) -> "Layer":
            """Make one."""
            return cls(size)

        @staticmethod
        def helper(x: int, y: int = 2) -> int:
            """Help.

            >>> 5 - 2
            3
            """
            return x + y

        async def fetch(self) -> int:
            """Fetch."""
            return 1

    return Layer


def _abstract() -> type[Any]:
    class Base(abc.ABC):
        """A base."""

        scale = 1

        @abc.abstractmethod
        def run(self) -> int:
            """Run.

            >>> 1
            1
            """

    return Base


def _slotted() -> type[Any]:
    class Slotted:
        """A slotted class."""

        __slots__ = ("a", "b")

        def total(self) -> int:
            """Add.

            >>> 1 + 2
            3
            """
            return self.a + self.b

    return Slotted


class Pair(NamedTuple):
    """A pair."""

    a: int
    b: int = 2


def _pair() -> type[Any]:
    return Pair


KINDS = pytest.mark.parametrize("make", [_plain, _abstract, _slotted, _pair])
STATES = pytest.mark.parametrize("state", [False, True])


@KINDS
@STATES
def test_members_are_those_of_the_undecorated_class(
    make: Callable[[], type[Any]], state: bool
) -> None:
    plain, gated = make(), experimental_cls("0.1.0")(make())
    with experimental_enabled(state):
        added = {"is_experimental"}
        assert {n for n in _members(gated) if not n.startswith("_")} == added | {
            n for n in _members(plain) if not n.startswith("_")
        }
        own = {name for name in vars(gated) if not name.startswith("_experimental")}
        assert own >= set(vars(plain)) - {"__dict__", "__weakref__"}
        added |= {"_introduced_with_version", "__slots__"}
        assert own - set(vars(plain)) <= added
        kinds = {a.name: (a.kind, a.defining_class) for a in inspect.classify_class_attrs(plain)}
        for attribute in inspect.classify_class_attrs(gated):
            if attribute.name in vars(plain) and not attribute.name.startswith("_"):
                kind, owner = kinds[attribute.name]
                assert attribute.kind == kind
                assert owner is not plain or attribute.defining_class is gated


@KINDS
@STATES
def test_help_has_the_text_of_every_member(make: Callable[[], type[Any]], state: bool) -> None:
    gated = experimental_cls("0.1.0")(make())
    with experimental_enabled(state):
        text = pydoc.plain(pydoc.render_doc(gated))
    plain = make()  # its names go where it is collected
    assert gated.__bases__ == plain.__bases__
    for name, value in vars(plain).items():
        if not name.startswith("_"):
            assert name in text
            if isinstance(value, types.FunctionType):
                assert inspect.getdoc(value).partition("\n")[0] in text


@KINDS
@STATES
def test_doctest_finds_the_examples_of_methods(make: Callable[[], type[Any]], state: bool) -> None:
    found = []
    with experimental_enabled(state):
        for cls in (make(), experimental_cls("0.1.0")(make())):
            tests = doctest.DocTestFinder().find(cls, "name", module=False, globs={})
            found.append({(t.name, tuple(e.source for e in t.examples)) for t in tests})
    assert found[0] == found[1]


@STATES
def test_mocks_have_the_members(state: bool) -> None:
    plain, gated = _plain(), experimental_cls("0.1.0")(_plain())
    with experimental_enabled(state):
        specified = mock.Mock(spec=gated)
        assert isinstance(specified, gated)
        specified.forward(1.0)
        with pytest.raises(AttributeError):
            specified.backward  # noqa: B018
        for autospec in (mock.create_autospec(gated), mock.create_autospec(gated, instance=True)):
            with pytest.raises(TypeError, match="missing a required argument"):
                autospec.forward()
            assert inspect.iscoroutinefunction(autospec.fetch)
            assert autospec.helper(1) is not None
        with pytest.raises(TypeError, match="too many positional"):
            mock.create_autospec(gated)(1, 2, 3)
        with mock.patch.object(gated, "helper", autospec=True) as helper:
            helper(3)
        assert vars(gated)["helper"].__func__(1) == vars(plain)["helper"].__func__(1) == 3


@STATES
def test_a_shell_completes_the_members(state: bool) -> None:
    completer = rlcompleter.Completer({"Live": Live})
    with experimental_enabled(state):
        assert {match.rstrip("()") for match in completer.attr_matches("Live.by_")} >= {
            "Live.by_type",
            "Live.by_name",
        }


def test_a_tool_does_not_open_the_gate_for_the_user() -> None:
    with experimental_enabled(False):
        members = inspect.getmembers(Live)
        assert ("limit", 3) in members
        with pytest.raises(ExperimentalNotEnabledError):
            Live.limit  # noqa: B018


# Making classes


def test_keywords_of_the_class_reach_its_metaclass_once() -> None:
    calls: list[tuple[str, Any]] = []

    class Registering(type):
        def __new__(
            meta, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, table: str
        ) -> Any:
            calls.append(("new", table))
            return super().__new__(meta, name, bases, namespace)

        def __init__(
            cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, table: str
        ) -> None:
            calls.append(("init", table))
            super().__init__(name, bases, namespace)
            cls.table = table

    @experimental_cls("0.1.0")
    class Row(metaclass=Registering, table="rows"):
        def total(self) -> str:
            return type(self).table

    assert calls == [("new", "rows"), ("init", "rows")]
    assert isinstance(Row, Registering)
    with experimental_enabled():
        row = Row()
        assert Row.table == "rows"
    assert row.total() == "rows"
    with pytest.raises(ExperimentalNotEnabledError):
        Row()

    class SubRow(Row, table="others"): ...

    assert calls[2:] == [("new", "others"), ("init", "others")]
    with pytest.raises(ExperimentalNotEnabledError):
        SubRow()


def test_class_with_a_metaclass_stays_the_same_object() -> None:
    base = _abstract()
    assert experimental_cls("0.1.0")(base) is base
    assert abc.ABCMeta in type(base).__mro__


def test_classes_that_are_made_by_a_call_have_the_module_of_the_caller() -> None:
    dynamic = type("Dynamic", (Live,), {"x": 1})
    assert dynamic.__module__ == __name__
    assert types.new_class("Dynamic", (Live,)).__module__ == types.new_class("P", ()).__module__
    assert type("Placed", (Live,), {"__module__": "elsewhere"}).__module__ == "elsewhere"


def test_typed_dict_is_refused_clearly() -> None:
    import typing

    import typing_extensions

    for typed_dict in (typing.TypedDict, typing_extensions.TypedDict):
        with pytest.raises(TypeError, match=r"is a TypedDict.*@experimental_api"):
            experimental_cls("0.1.0")(typed_dict("Options", {"size": int}))


def test_descriptors_hear_of_one_owner() -> None:
    heard: list[type] = []

    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            heard.append(owner)

    @experimental_cls("0.1.0")
    class Form:
        field = Field()

        @functools.cached_property
        def cached(self) -> int:
            return 4

    assert len(heard) == 1
    with experimental_enabled():
        assert Form().cached == 4


def test_metaclass_that_is_written_in_c_is_refused_clearly() -> None:
    with pytest.raises(TypeError, match=r"a metaclass written in C.*@experimental_api"):

        @experimental_cls("0.1.0")
        class Point(ctypes.Structure):
            _fields_ = (("x", ctypes.c_int),)
