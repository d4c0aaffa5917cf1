"""Tests of classes that warn when they are instantiated or subclassed."""

import abc
import copy
import dataclasses
import enum
import functools
import inspect
import pickle
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

from mcore.versioning import deprecated, get_deprecation

T = TypeVar("T")


@deprecated("1.0.0", alternative="New")
class K:
    """An old class."""

    def __init__(self, a: int) -> None:
        self.a = a


def _caught(call: Callable[[], Any]) -> tuple[Any, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, caught


def _lines(caught: list[warnings.WarningMessage]) -> list[str]:
    assert {warning.filename for warning in caught} <= {__file__}
    lines = Path(__file__).read_text().splitlines()
    return [lines[warning.lineno - 1].strip() for warning in caught]


def test_class_stays_a_class() -> None:
    assert isinstance(K, type)
    assert list(inspect.signature(K).parameters) == ["a"]
    assert inspect.signature(K) == inspect.signature(deprecated("1.0.0")(_plain()))
    assert (K.__name__, K.__qualname__, K.__doc__) == ("K", "K", "An old class.")
    assert K.__module__ == __name__


def _plain() -> type:
    class Plain:
        def __init__(self, a: int) -> None: ...

    return Plain


def test_attributes_are_in_the_class_itself() -> None:
    for name in (
        "_deprecated",
        "_deprecated_version",
        "_removal_version",
        "_alternative",
        "_deprecation_reason",
        "__deprecated__",
    ):
        assert name in vars(K)
    assert K.__deprecated__ == "K is deprecated since version 1.0.0. Use New instead."
    assert get_deprecation(K).alternative == "New"


def test_instantiation_warns_at_its_line() -> None:
    def use() -> list[int]:
        return [
            K(1).a,
            K(a=2).a,
        ]

    result, caught = _caught(use)
    assert result == [1, 2]
    assert _lines(caught) == ["K(1).a,", "K(a=2).a,"]
    assert {warning.category for warning in caught} == {DeprecationWarning}


def test_subclass_definition_warns_and_its_instances_do_not() -> None:
    def define() -> type[K]:
        class L(K):
            pass

        return L

    child, caught = _caught(define)
    assert _lines(caught) == ["class L(K):"]
    assert get_deprecation(child) is None
    instance, caught = _caught(lambda: child(1))
    assert (instance.a, caught) == (1, [])
    assert isinstance(instance, K)
    assert issubclass(child, K)


def test_subclass_of_a_subclass_does_not_warn() -> None:
    child, _ = _caught(lambda: type("Child", (K,), {}))
    _, caught = _caught(lambda: type("Grandchild", (child,), {}))
    assert caught == []


def test_pickling_and_copying_do_not_warn() -> None:
    instance, _ = _caught(lambda: K(1))
    for again in (
        lambda: pickle.loads(pickle.dumps(instance)),
        lambda: copy.copy(instance),
        lambda: copy.deepcopy(instance),
        lambda: isinstance(instance, K),
        lambda: pickle.loads(pickle.dumps(K)),
    ):
        _, caught = _caught(again)
        assert caught == []
    assert pickle.loads(pickle.dumps(instance)).a == 1


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, inspect.getmodule(_plain))


def test_twice_warns_once_with_the_outer_text() -> None:
    @deprecated("2.0.0")
    @deprecated("1.0.0")
    class Twice:
        def __init__(self, x: int) -> None:
            self.x = x

    def use() -> int:
        class Child(Twice): ...

        return Twice(3).x

    result, caught = _caught(use)
    assert result == 3
    assert [str(w.message) for w in caught] == ["Twice is deprecated since version 2.0.0."] * 2
    assert _lines(caught) == ["class Child(Twice): ...", "return Twice(3).x"]


def test_deprecated_child_of_a_deprecated_class_warns_once() -> None:
    def define() -> type[K]:
        @deprecated("1.5.0")
        class Child(K):
            def __init__(self, a: int, b: int) -> None:
                super().__init__(a)
                self.b = b

        return Child

    child, caught = _caught(define)
    assert len(caught) == 1
    instance, caught = _caught(lambda: child(1, 2))
    assert (instance.a, instance.b) == (1, 2)
    assert [str(warning.message) for warning in caught] == [
        "Child is deprecated since version 1.5.0."
    ]


def test_no_category_attaches_the_attributes_and_nothing_else() -> None:
    @deprecated("1.0.0", category=None)
    class Quiet:
        def __init__(self, a: int) -> None:
            self.a = a

    assert get_deprecation(Quiet).version == "1.0.0"
    result, caught = _caught(lambda: (Quiet(1).a, type("Child", (Quiet,), {})))
    assert (result[0], caught) == (1, [])


def test_stacklevel_of_a_class() -> None:
    @deprecated("1.0.0", stacklevel=2)
    class Far:
        pass

    def library() -> Far:
        return Far()

    _, caught = _caught(lambda: library())  # the user
    assert _lines(caught) == ["_, caught = _caught(lambda: library())  # the user"]


def test_class_without_a_constructor() -> None:
    @deprecated("1.0.0")
    class Empty:
        pass

    assert str(inspect.signature(Empty)) == "()"
    assert Empty.__init__.__name__ == "__init__"
    instance, caught = _caught(lambda: Empty())
    assert type(instance) is Empty
    assert len(caught) == 1
    for arguments, keywords in (((1,), {}), ((), {"x": 1})):
        with pytest.raises(TypeError, match=r"Empty\(\) takes no arguments"):
            _caught(lambda a=arguments, k=keywords: Empty(*a, **k))


def test_class_with_new_alone() -> None:
    @deprecated("1.0.0")
    class New:
        def __new__(cls, a: int) -> "New":
            self = super().__new__(cls)
            self.a = a
            return self

    assert str(inspect.signature(New)).startswith("(a: int)")
    instance, caught = _caught(lambda: New(4))
    assert (instance.a, len(caught)) == (4, 1)
    child, _ = _caught(lambda: type("Child", (New,), {}))
    assert _caught(lambda: child(5).a) == (5, [])


def test_inherited_constructor_and_cooperation() -> None:
    class Base:
        def __init__(self, x: int) -> None:
            self.x = x

    class Mixin:
        def __init__(self, x: int) -> None:
            super().__init__(x)
            self.mixed = True

    @deprecated("1.0.0")
    class Old(Base): ...

    assert inspect.signature(Old) == inspect.signature(Base)
    instance, caught = _caught(lambda: Old(3))
    assert (instance.x, len(caught)) == (3, 1)

    # Old hands on to Mixin, not to its own parent.
    mixed, _ = _caught(lambda: type("Mixed", (Old, Mixin, Base), {}))
    instance, caught = _caught(lambda: mixed(4))
    assert (instance.x, instance.mixed, caught) == (4, True, [])


@pytest.mark.parametrize("base", [dict, list, int, str, tuple, Exception, frozenset])
def test_subclass_of_a_builtin_type(base: type) -> None:
    @deprecated("1.0.0")
    class Special(base): ...

    arguments = () if base in (Exception, dict) else ("12",)
    instance, caught = _caught(lambda: Special(*arguments))
    assert len(caught) == 1
    if base is not Exception:
        assert instance == base(*arguments)


def test_exception_class_can_be_raised() -> None:
    @deprecated("1.0.0")
    class OldError(ValueError): ...

    error, caught = _caught(lambda: OldError("text"))
    assert len(caught) == 1
    with pytest.raises(OldError, match="text"):
        raise error


def test_named_tuple() -> None:
    @deprecated("1.0.0")
    class Pair(NamedTuple):
        a: int
        b: int = 2

    instance, caught = _caught(lambda: Pair(1))
    assert (instance, len(caught)) == ((1, 2), 1)
    assert _caught(lambda: instance._replace(a=5)) == ((5, 2), [])


def test_slots() -> None:
    @deprecated("1.0.0")
    class Slotted:
        __slots__ = ("x",)

        def __init__(self, x: int) -> None:
            self.x = x

    instance, caught = _caught(lambda: Slotted(1))
    assert (instance.x, len(caught)) == (1, 1)
    assert not hasattr(instance, "__dict__")


def test_dataclass_below() -> None:
    @deprecated("1.0.0")
    @dataclasses.dataclass
    class Point:
        x: int
        y: int = 2

    instance, caught = _caught(lambda: Point(1))
    assert len(caught) == 1
    assert _caught(lambda: dataclasses.asdict(instance)) == ({"x": 1, "y": 2}, [])
    assert str(inspect.signature(Point)) == "(x: int, y: int = 2) -> None"


def test_dataclass_above_says_how_to_do_it() -> None:
    @dataclasses.dataclass
    @deprecated("1.0.0")
    class Point:
        x: int

    with pytest.raises(TypeError, match="Put @deprecated above @dataclass"):
        _caught(lambda: Point(1))


def test_generic_class_is_blamed_on_the_line_of_the_call() -> None:
    @deprecated("1.0.0")
    class Box(Generic[T]):
        def __init__(self, item: T) -> None:
            self.item = item

    def use() -> int:
        class IntBox(Box[int]): ...

        return Box[int](3).item + Box(4).item

    result, caught = _caught(use)
    assert result == 7
    line = "return Box[int](3).item + Box(4).item"
    assert _lines(caught) == ["class IntBox(Box[int]): ...", line, line]


def test_abstract_class_is_blamed_on_the_class_statement() -> None:
    @deprecated("1.0.0")
    class Base(abc.ABC):
        @abc.abstractmethod
        def run(self) -> int: ...

    def define() -> type:
        class Runs(Base):
            def run(self) -> int:
                return 1

        return Runs

    child, caught = _caught(define)
    assert _lines(caught) == ["class Runs(Base):"]
    assert _caught(lambda: child().run()) == (1, [])


def test_metaclasses_written_in_python_are_not_blamed() -> None:
    class Meta(type):
        def __new__(meta, *args: Any, **options: Any) -> Any:
            return super().__new__(meta, *args, **options)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    @deprecated("1.0.0")
    class Old(metaclass=Meta):
        pass

    def use() -> None:
        class Child(Old):
            pass

        Old()

    _, caught = _caught(use)
    assert _lines(caught) == ["class Child(Old):", "Old()"]


def test_hook_of_the_class_still_runs() -> None:
    seen: list[Any] = []

    @deprecated("1.0.0")
    class Old:
        def __init_subclass__(cls, tag: int = 0) -> None:
            """Notes."""
            super().__init_subclass__()
            seen.append((cls.__name__, tag))

    class Mixin:
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)

    def define() -> None:
        class Child(Old, tag=3):
            pass

        class Mixed(Mixin, Old):
            pass

    _, caught = _caught(define)
    assert seen == [("Child", 3), ("Mixed", 0)]
    assert _lines(caught) == ["class Child(Old, tag=3):", "class Mixed(Mixin, Old):"]
    assert Old.__init_subclass__.__doc__ == "Notes."


def test_hook_of_a_parent_still_runs() -> None:
    seen: list[Any] = []

    class Parent:
        def __init_subclass__(cls, **kwargs: Any) -> None:
            seen.append((cls.__name__, kwargs))

    @deprecated("1.0.0")
    class Old(Parent): ...

    _caught(lambda: type("Child", (Old,), {}, tag=3))
    assert seen == [("Old", {}), ("Child", {"tag": 3})]


def test_class_made_at_the_bottom_of_the_stack_is_still_reported() -> None:
    import subprocess

    code = (
        "import warnings, mcore.versioning as v\n"
        "@v.deprecated('1.0.0', stacklevel=9)\n"
        "class Old: pass\n"
        "warnings.simplefilter('always')\n"
        "Old()\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "Old is deprecated since version 1.0.0." in finished.stderr


def test_enum_keeps_working() -> None:
    @deprecated("1.0.0")
    class Color(enum.Enum):
        RED = 1

    assert Color(1) is Color.RED
    assert get_deprecation(Color).version == "1.0.0"


def test_class_without_a_signature() -> None:
    @deprecated("1.0.0")
    class Number(int): ...

    result, caught = _caught(lambda: Number("7"))
    assert (result, len(caught)) == (7, 1)
    assert typing.get_type_hints(Number) == {}


def test_constructor_that_is_no_plain_function() -> None:
    def initialise(self: Any, x: int, y: int) -> None:
        self.sum = x + y

    @deprecated("1.0.0")
    class Partial:
        __init__ = functools.partialmethod(initialise, 1)

    instance, caught = _caught(lambda: Partial(2))
    assert (instance.sum, len(caught)) == (3, 1)
