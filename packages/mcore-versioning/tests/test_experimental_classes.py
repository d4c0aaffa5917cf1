"""Tests of classes that can be used only while experimental code is switched on."""

import abc
import copy
import dataclasses
import enum
import gc
import inspect
import logging
import pickle
import pydoc
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Optional, Protocol, TypeVar
from unittest import mock

import pytest
from packaging.version import InvalidVersion

from mcore.versioning import (
    ExperimentalNotEnabledError,
    deprecated,
    experimental_cls,
    experimental_enabled,
    get_deprecation,
    internal_api,
    is_experimental_api,
    is_internal_api,
    set_experimental_flag,
)

T = TypeVar("T")
RECORD = "ENABLE_EXPERIMENTAL is True, running experimental code."


@experimental_cls("0.1.0")
class A:
    """An experimental thing."""

    x: int = 5
    _hidden = 6
    made = 0

    def __init__(self, value: int = 1, *, label: str = "a") -> None:
        type(self).made += 1
        self.value = value
        self.label = label

    @classmethod
    def class_method(cls) -> str:
        return cls.__name__

    @staticmethod
    def some_static_method() -> str:
        return "static"

    def some_method(self) -> str:
        return "A"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, A) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.value)


class B(A):
    """A subclass that was defined while the flag was off."""

    own = 8

    def some_method(self) -> str:
        return "B" + super().some_method()


@pytest.fixture
def enabled() -> Iterator[None]:
    with experimental_enabled():
        yield


# Flag off


@pytest.mark.parametrize("make", [A, B, lambda: A(3), lambda: B(label="b")])
def test_no_instance_is_made(make: Callable[[], Any]) -> None:
    before = A.made
    with pytest.raises(ExperimentalNotEnabledError, match="A is experimental"):
        make()
    assert A.made == before


@pytest.mark.parametrize(
    "call", [A.class_method, A.some_static_method, B.class_method, B.some_static_method]
)
def test_calls_through_the_class_are_gated(call: Callable[[], Any]) -> None:
    for _ in range(2):  # also after the class was used
        with pytest.raises(ExperimentalNotEnabledError, match="A is experimental"):
            call()
        with experimental_enabled():
            assert call() in ("A", "B", "static")


def test_calls_through_an_instance_are_free() -> None:
    with experimental_enabled():
        live = B()
    assert (live.class_method(), live.some_static_method(), live.some_method()) == (
        "B",
        "static",
        "BA",
    )

    def function_with_a_self(self: object) -> Any:
        return A()

    with pytest.raises(ExperimentalNotEnabledError):
        function_with_a_self(live)


def test_data_attributes_and_functions_are_free() -> None:
    assert (A.x, B.x, B.own) == (5, 5, 8)
    assert A.some_method(object()) == "A"  # type: ignore[arg-type]


def test_class_is_the_same_object() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Bare(Base):
        def name(self) -> str:
            return "bare " + super().name()

    gated = experimental_cls("0.1.0")(Bare)
    assert gated is Bare
    with experimental_enabled():
        assert gated().name() == "bare base"


def test_constructor_of_a_subclass_does_not_pass_by() -> None:
    class Passing(A):
        def __init__(self) -> None:
            self.value = 2

    @dataclass
    class Data(A):
        value: int = 3

    @dataclass
    class Post(A):
        value: int = 3

        def __post_init__(self) -> None:
            self.value += 1

    for make in (Passing, Data, Post):
        with pytest.raises(ExperimentalNotEnabledError):
            make()
    with experimental_enabled():
        assert [make().value for make in (Passing, Data, Post)] == [2, 3, 4]


def test_copies_of_live_objects_are_free() -> None:
    with experimental_enabled():
        live = A(7)
    for copied in (copy.copy(live), copy.deepcopy(live), pickle.loads(pickle.dumps(live))):
        assert type(copied) is A
        assert copied.value == 7


def test_tools_see_the_methods() -> None:
    assert isinstance(vars(A)["class_method"], classmethod)
    assert isinstance(inspect.getattr_static(B, "some_static_method"), staticmethod)
    kinds = {one.name: one.kind for one in inspect.classify_class_attrs(A)}
    assert (kinds["class_method"], kinds["some_static_method"]) == ("class method", "static method")
    assert "class_method" in pydoc.plain(pydoc.render_doc(A))
    assert mock.create_autospec(A)(3, label="b").some_method() is not None
    with pytest.raises(TypeError):
        mock.create_autospec(A)(wrong=1)


def test_attributes_of_the_descriptor_of_a_method_are_kept() -> None:
    method: Any = staticmethod(lambda: 1)
    method.route = "/call"

    @experimental_cls("0.1.0")
    class Routed:
        call = method

    assert vars(Routed)["call"].route == "/call"


def test_class_that_is_gated_twice_is_gated() -> None:
    @experimental_cls("0.2.0")
    @experimental_cls("0.1.0")
    class Twice:
        @staticmethod
        def call() -> int:
            return 1

    with pytest.raises(ExperimentalNotEnabledError):
        Twice.call()
    with experimental_enabled():
        assert (Twice.call(), type(Twice())) == (1, Twice)
        live = Twice()
    assert live.call() == 1


def test_missing_attributes_are_missing() -> None:
    assert not hasattr(A, "missing")
    assert getattr(B, "missing", "default") == "default"


def test_attributes_of_the_metaclass_are_not_gated() -> None:
    assert A.mro()[0] is A


def test_private_names_and_names_of_python_work() -> None:
    assert A._hidden == 6
    assert A.__name__ == "A"
    assert A.__qualname__ == "A"
    assert A.__module__ == __name__
    assert A.__doc__ == "An experimental thing."
    assert inspect.getdoc(A) == "An experimental thing."
    assert repr(A) == f"<class '{__name__}.A'>"
    assert isinstance(A, type)
    assert A.__annotations__ == {"x": int}


def test_type_hints_and_type_checks_work() -> None:
    def function(a: Optional[A] = None, b: "A | None" = None) -> None: ...  # noqa: UP045

    assert Optional[A] == typing.get_type_hints(function)["b"]  # noqa: UP045
    assert typing.get_type_hints(A) == {"x": int}
    assert issubclass(B, A)
    assert not isinstance(3, A)
    assert typing.Union[A, int].__args__ == (A, int)  # noqa: UP007


def test_signature_is_that_of_the_class() -> None:
    assert str(inspect.signature(A)) == "(value: int = 1, *, label: str = 'a') -> None"
    assert inspect.signature(B) == inspect.signature(A)


def test_class_pickles_by_name() -> None:
    assert pickle.loads(pickle.dumps(A)) is A
    assert copy.deepcopy(A) is A


def test_is_experimental_reports_the_flag() -> None:
    assert A.is_experimental is False
    assert B.is_experimental is False
    with experimental_enabled():
        instance = A()
        assert A.is_experimental is True
        assert instance.is_experimental is True
    assert instance.is_experimental is False


def test_attributes_can_be_set_and_deleted() -> None:
    A.extra = 9
    with experimental_enabled():
        assert A.extra == 9
        assert A().extra == 9
    del A.extra
    with experimental_enabled():
        assert not hasattr(A, "extra")


def test_attribute_can_be_patched_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    with experimental_enabled():
        with monkeypatch.context() as patch:
            patch.setattr(A, "some_static_method", staticmethod(lambda: "patched"))
            patch.setattr(A, "x", 50)
            assert (A.some_static_method(), A().x) == ("patched", 50)
        assert (A.some_static_method(), A().x) == ("static", 5)


def test_instance_that_was_made_while_enabled_stays_usable() -> None:
    with experimental_enabled():
        instance = B(4)
    instance.value += 1
    assert instance.some_method() == "BA"
    assert (instance.value, instance.x, instance.class_method()) == (5, 5, "B")
    assert copy.copy(instance) == instance
    assert pickle.loads(pickle.dumps(instance)) == instance


# Flag on


@pytest.mark.usefixtures("enabled")
def test_instances_are_real() -> None:
    instance = A(3)
    assert type(instance) is A
    assert type(A()) is type(A())
    assert isinstance(instance, A)
    assert (A.x, A.class_method(), A.some_static_method()) == (5, "A", "static")
    assert instance == A(3)
    assert instance != A(4)
    for again in (pickle.loads(pickle.dumps(instance)), copy.deepcopy(instance)):
        assert type(again) is A
        assert again == instance


@pytest.mark.usefixtures("enabled")
def test_subclass_overrides() -> None:
    class C(A):
        def some_method(self) -> str:
            return "B"

    assert C().some_method() == "B"
    assert type(C()) is C
    assert B().some_method() == "BA"


def test_flag_decides_also_without_a_block() -> None:
    set_experimental_flag(True)
    assert A().value == 1
    assert A(2).value == 2
    with experimental_enabled(False), pytest.raises(ExperimentalNotEnabledError):
        A()
    set_experimental_flag(False)
    with pytest.raises(ExperimentalNotEnabledError):
        A()


@pytest.mark.usefixtures("enabled")
def test_dataclass() -> None:
    @experimental_cls("0.1.0")
    @dataclasses.dataclass
    class Point:
        x: int
        y: int = 2

    assert Point(1) == Point(1, 2)
    assert dataclasses.replace(Point(1), y=3) == Point(1, 3)
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 2}
    assert str(inspect.signature(Point)) == "(x: int, y: int = 2) -> None"


def test_dataclass_that_derives_from_a_gated_one_is_defined_while_off() -> None:
    @experimental_cls("0.1.0")
    @dataclasses.dataclass
    class Point:
        x: int = 1

    @dataclasses.dataclass
    class Point3(Point):
        z: int = 3
        w: float = dataclasses.field(default=0.5)

    with experimental_enabled():
        assert Point3(7) == Point3(7, 3)
        assert Point3().x == 1


@pytest.mark.usefixtures("enabled")
def test_slots() -> None:
    @experimental_cls("0.1.0")
    class Slotted:
        __slots__ = ("x",)

        def __init__(self) -> None:
            self.x = 1

    instance = Slotted()
    assert instance.x == 1
    with pytest.raises(AttributeError):
        instance.y = 2


def test_abstract_class() -> None:
    @experimental_cls("0.1.0")
    class Base(abc.ABC):
        @abc.abstractmethod
        def run(self) -> int: ...

    class Runs(Base):
        def run(self) -> int:
            return 1

    @Base.register
    class Virtual: ...

    assert isinstance(Virtual(), Base)
    with experimental_enabled():
        assert Runs().run() == 1
        with pytest.raises(TypeError, match="abstract"):
            Base()
    with pytest.raises(ExperimentalNotEnabledError):
        Runs()


@pytest.mark.usefixtures("enabled")
def test_two_gated_parents_of_which_one_is_abstract() -> None:
    @experimental_cls("0.1.0")
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def some_method(self) -> str: ...

    @experimental_cls("0.1.0")
    class Other:
        def some_method(self) -> str:
            return "other"

    class Both(Other, Abstract): ...

    class Reversed(Abstract, A):
        def some_method(self) -> str:
            return "reversed " + A.some_method(self)

    assert Both().some_method() == "other"
    assert Reversed().some_method() == "reversed A"


@pytest.mark.usefixtures("enabled")
def test_gated_subclass_of_a_gated_class() -> None:
    @experimental_cls("0.2.0")
    class Child(A):
        def some_method(self) -> str:
            return "child of " + super().some_method()

    assert Child().some_method() == "child of A"
    assert (Child._introduced_with_version, A._introduced_with_version) == ("0.2.0", "0.1.0")


@pytest.mark.usefixtures("enabled")
def test_custom_metaclass_keeps_its_behaviour() -> None:
    class Singleton(type):
        instances: typing.ClassVar[dict[type, Any]] = {}

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls not in Singleton.instances:
                Singleton.instances[cls] = super().__call__(*args, **kwargs)
            return Singleton.instances[cls]

    @experimental_cls("0.1.0")
    class Only(metaclass=Singleton):
        def __init__(self, x: int) -> None:
            self.x = x

    assert Only(1) is Only(2)
    assert isinstance(Only, Singleton)
    assert str(inspect.signature(Only)) == "(*args: Any, **kwargs: Any) -> Any"


@pytest.mark.usefixtures("enabled")
def test_metaclass_with_a_parent_that_is_no_metaclass() -> None:
    class Naming:
        def shout(self) -> str:
            return self.__name__.upper()

    class Meta(Naming, type): ...

    @experimental_cls("0.1.0")
    class Quiet(metaclass=Meta): ...

    assert Quiet.shout() == "QUIET"
    assert type(Quiet()) is Quiet


@pytest.mark.usefixtures("enabled")
def test_exception_class() -> None:
    @experimental_cls("0.1.0")
    class CodeError(RuntimeError):
        def __init__(self, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    with pytest.raises(CodeError, match="code 3") as caught:
        raise CodeError(3)
    assert caught.value.code == 3
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.usefixtures("enabled")
def test_generic_class() -> None:
    @experimental_cls("0.1.0")
    class Box(Generic[T]):
        def __init__(self, item: T) -> None:
            self.item = item

    assert Box[int](3).item == 3
    assert Box[int].__args__ == (int,)

    class IntBox(Box[int]): ...

    assert IntBox(4).item == 4
    assert Box.__orig_bases__ == (Generic[T],)


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("base", [int, str, tuple, dict, list, frozenset])
def test_subclasses_of_builtin_types(base: type) -> None:
    @experimental_cls("0.1.0")
    class Special(base): ...

    assert Special() == base()
    assert isinstance(Special(), base)


@pytest.mark.usefixtures("enabled")
def test_named_tuple() -> None:
    @experimental_cls("0.1.0")
    class Pair(NamedTuple):
        a: int
        b: int = 2

    assert Pair(1) == (1, 2)
    assert Pair(1)._replace(a=5) == (5, 2)


def test_hook_of_the_class_does_not_see_the_decorator() -> None:
    seen: list[str] = []

    class Parent:
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__()
            seen.append(f"parent sees {cls.__name__} {kwargs}")

    @experimental_cls("0.1.0")
    class Own(Parent, tag=1):
        registry: typing.ClassVar[list[str]] = []

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.registry.append(cls.__name__)

    @experimental_cls("0.1.0")
    class Plain(Parent): ...

    assert seen == ["parent sees Own {'tag': 1}", "parent sees Plain {}"]

    class Child(Own, tag=2): ...

    class PlainChild(Plain, tag=3): ...

    assert seen[2:] == ["parent sees Child {'tag': 2}", "parent sees PlainChild {'tag': 3}"]
    with experimental_enabled():
        assert Own.registry == ["Child"]


def test_gate_is_closed_again_after_a_class_could_not_be_made() -> None:
    class Refusing:
        def __init_subclass__(cls) -> None:
            if cls.__name__ == "Child":
                raise RuntimeError("no children")

    @experimental_cls("0.1.0")
    class Own(Refusing): ...

    with pytest.raises(RuntimeError, match="no children"):

        class Child(Own): ...

    with pytest.raises(ExperimentalNotEnabledError):
        Own()


def test_metadata_is_on_the_class_itself() -> None:
    assert vars(A)["_experimental_api"] is True
    assert vars(A)["_introduced_with_version"] == "0.1.0"
    assert is_experimental_api(A)
    assert not is_experimental_api(B)


@pytest.mark.usefixtures("enabled")
def test_deprecation_and_internal_marker_survive_in_both_orders() -> None:
    @experimental_cls("0.1.0")
    @internal_api
    @deprecated("1.0.0")
    class Inner:
        def __init__(self, x: int) -> None:
            self.x = x

    @deprecated("1.0.0")
    @internal_api
    @experimental_cls("0.1.0")
    class Outer:
        def __init__(self, x: int) -> None:
            self.x = x

    for cls in (Inner, Outer):
        assert get_deprecation(cls).version == "1.0.0"
        assert is_internal_api(cls)
        assert is_experimental_api(cls)
        assert str(inspect.signature(cls)) == "(x: int) -> None"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert cls(3).x == 3

            class Child(cls): ...

            Child(4)
        assert [warning.filename for warning in caught] == [__file__] * 2


@pytest.mark.usefixtures("enabled")
def test_first_use_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")

    @experimental_cls("0.1.0")
    class Fresh:
        x = 1

    class Child(Fresh): ...

    Child()
    Fresh()
    Fresh.x  # noqa: B018
    records = [r.getMessage() for r in caplog.records]
    assert len(records) == 1
    assert records[0].startswith(RECORD)
    assert "Fresh" in records[0]


def test_used_classes_are_not_kept_alive() -> None:
    @experimental_cls("0.1.0")
    class Temporary: ...

    with experimental_enabled():
        Temporary()
    alive = weakref.ref(Temporary)
    del Temporary
    gc.collect()
    assert alive() is None


def test_expired_class_warns_when_decorated_and_works(caplog: pytest.LogCaptureFixture) -> None:
    for lifetime, count in ((3, 1), (9, 1)):
        decorate = experimental_cls("0.1.0", max_lifetime=lifetime, current_version="0.5.0")
        gated = decorate(type("Old", (), {}))
        assert caplog.text.count("has reached end of life") == count
    decorate(type("Old", (), {}), max_lifetime=1)
    assert caplog.text.count("has reached end of life") == 2
    with experimental_enabled():
        assert type(gated()) is gated


def test_bad_input_is_refused_at_decoration() -> None:
    with pytest.raises(InvalidVersion):
        experimental_cls("soon")
    with pytest.raises(ValueError, match="max_lifetime"):
        experimental_cls("0.1.0")(type("Old", (), {}), max_lifetime=-1)
    with pytest.raises(TypeError, match=r'Write @experimental_cls\("0\.1\.0"\)'):

        @experimental_cls
        class Bare: ...

    with pytest.raises(TypeError, match="experimental_fn"):
        experimental_cls("0.1.0")(len)


def test_enum_and_protocol_are_refused_clearly() -> None:
    with pytest.raises(TypeError, match="is an enum"):

        @experimental_cls("0.1.0")
        class Color(enum.Enum):
            RED = 1

    with pytest.raises(TypeError, match="is a protocol"):

        @experimental_cls("0.1.0")
        class Runs(Protocol):
            def run(self) -> None: ...


def test_implementation_of_a_protocol_can_be_gated() -> None:
    class Runs(Protocol):
        def run(self) -> int: ...

    @experimental_cls("0.1.0")
    class Runner(Runs):
        def run(self) -> int:
            return 1

    with experimental_enabled():
        assert Runner().run() == 1


# Signatures


def _with_new() -> type:
    class New:
        def __new__(cls, a: int, *rest: str) -> "New":
            return super().__new__(cls)

    return New


def _with_both() -> type:
    class Both:
        def __new__(cls, a: int) -> "Both":
            return super().__new__(cls)

        def __init__(self, b: int) -> None: ...

    return Both


def _with_inherited() -> type:
    class Parent:
        def __init__(self, p: int) -> None: ...

    class Child(Parent): ...

    return Child


def _with_explicit() -> type:
    class Explicit:
        __signature__ = inspect.Signature([])

        def __init__(self, hidden: int) -> None: ...

    return Explicit


def _from_tuple() -> type:
    class Pair(tuple):
        __slots__ = ()

    return Pair


def _empty() -> type:
    class Empty: ...

    return Empty


@pytest.mark.parametrize(
    "make", [_with_new, _with_both, _with_inherited, _with_explicit, _from_tuple, _empty]
)
def test_signature_equals_that_of_the_undecorated_class(make: Callable[[], type]) -> None:
    assert inspect.signature(experimental_cls("0.1.0")(make())) == inspect.signature(make())


def test_subclasses_have_signatures_of_their_own() -> None:
    class Child(A):
        def __init__(self, other: float) -> None: ...

    class Grandchild(Child): ...

    assert str(inspect.signature(Child)) == "(other: float) -> None"
    assert str(inspect.signature(Grandchild)) == "(other: float) -> None"


def test_class_without_a_signature_falls_back_to_any_arguments() -> None:
    class Number(int): ...

    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(Number)
    gated = experimental_cls("0.1.0")(Number)
    kinds = [parameter.kind for parameter in inspect.signature(gated).parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
