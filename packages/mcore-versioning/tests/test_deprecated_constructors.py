"""Tests of arguments that the constructor of a class no longer takes."""

import copy
import dataclasses
import inspect
import pickle
import sys
import warnings
from typing import Any, NamedTuple

import pytest

from mcore.versioning import (
    deprecate_args,
    deprecated,
    experimental_cls,
    experimental_enabled,
)


@deprecate_args("eps", message="{name} is gone")
class Optimizer:
    """An optimizer."""

    def __init__(self, lr: float, eps: float = 0.0) -> None:
        self.lr = lr


class Child(Optimizer):
    def __init__(self, lr: float, *rest: float) -> None:
        super().__init__(lr, *rest)


def test_class_stays_a_class() -> None:
    assert isinstance(Optimizer, type)
    assert isinstance(Optimizer(0.1), Optimizer)
    assert issubclass(Child, Optimizer)
    assert Optimizer.__doc__ == "An optimizer."
    assert str(inspect.signature(Optimizer)) == "(lr: float, eps: float = 0.0) -> None"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Optimizer(0.1, 1e-8),
        lambda: Optimizer(0.1, eps=1e-8),
        lambda: Child(0.1, 1e-8),
    ],
)
def test_argument_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"^eps is gone$"):
        make()


def test_instances_are_copied_and_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, __name__, sys.modules.get(__name__) or inspect.getmodule(Child)
    )
    for again in (copy.deepcopy(Child(0.5)), pickle.loads(pickle.dumps(Optimizer(0.5)))):
        assert again.lr == 0.5


def test_dataclass_and_inherited_constructor() -> None:
    @deprecate_args("b")
    @dataclasses.dataclass
    class Point:
        a: int
        b: int = 2

    class Mixin:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.mixed = True
            super().__init__(*args, **kwargs)

    @deprecate_args("a")
    class Inherits(Point): ...

    class Diamond(Inherits, Mixin): ...

    assert Point(1) == Point(1)
    with pytest.raises(TypeError, match="'b'"):
        Point(1, 3)
    with pytest.raises(TypeError, match="'a'"):
        Inherits(1)

    @deprecate_args("anything")
    class Cooperative(Mixin): ...

    with pytest.raises(TypeError, match="'anything'"):
        Cooperative(anything=1)
    assert Cooperative().mixed is True


def test_constructor_that_is_new() -> None:
    calls = []

    @deprecate_args("base")
    class Number(int):
        def __new__(cls, value: int, base: int = 10) -> "Number":
            calls.append(value)
            return super().__new__(cls, value)

        def __init__(self, value: int, base: int = 10) -> None: ...

    @deprecate_args("b")
    class Pair(NamedTuple):
        a: int
        b: int = 2

    assert (Number(3), Pair(1), Pair(1)._replace(b=4)) == (3, (1, 2), (1, 4))
    with pytest.raises(TypeError, match="'base'"):
        Number(3, 2)
    assert calls == [3]
    with pytest.raises(TypeError, match="'b'"):
        Pair(1, b=3)


def test_name_that_the_constructor_does_not_have() -> None:
    with pytest.raises(ValueError, match="Plain has no parameter eps"):

        @deprecate_args("eps")
        class Plain: ...

    with pytest.raises(ValueError, match="Typo has no parameter esp"):

        @deprecate_args("esp")
        class Typo:
            def __init__(self, eps: float) -> None: ...


@pytest.mark.parametrize("is_outermost", [True, False])
def test_together_with_the_other_decorators(is_outermost: bool) -> None:
    class Layer:
        def __init__(self, size: int, mask: Any = None) -> None:
            self.size = size

    decorators = [deprecate_args("mask"), deprecated("1.0.0"), experimental_cls("0.1.0")]
    for decorate in decorators if is_outermost else reversed(decorators):
        Layer = decorate(Layer)  # noqa: N806
    with experimental_enabled(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Layer(3).size == 3
        assert [(warning.filename) for warning in caught] == [__file__]
        with pytest.raises(TypeError, match="'mask'"):
            Layer(3, 4)
    assert str(inspect.signature(Layer)) == "(size: int, mask: Any = None) -> None"
