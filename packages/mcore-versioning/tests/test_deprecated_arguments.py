"""Tests of arguments that a function no longer takes."""

import asyncio
import inspect
import warnings
from typing import Any

import pytest

from mcore.versioning import deprecate_args, deprecated


@deprecate_args("eps", "momentum")
def step(lr: float, eps: float = 0.0, *, momentum: float = 0.0) -> float:
    """Do a step."""
    return lr


def test_call_without_them_works() -> None:
    assert step(0.1) == 0.1
    assert step(lr=0.2) == 0.2


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((0.1,), {"eps": 1.0}, "eps"),
        ((0.1, 1.0), {}, "eps"),
        ((0.1,), {"momentum": 1.0}, "momentum"),
        ((0.1,), {"momentum": 1.0, "eps": 1.0}, "eps"),
        ((0.1, 1.0), {"momentum": 1.0}, "eps"),
    ],
)
def test_first_declared_name_is_reported(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> None:
    with pytest.raises(TypeError, match=f"'{name}'"):
        step(*args, **kwargs)


def test_message_is_a_template() -> None:
    @deprecate_args("a", "b", message="{name} is gone, see {{docs}}")
    def f(a: int = 0, b: int = 0) -> None: ...

    with pytest.raises(TypeError, match=r"^b is gone, see \{docs\}$"):
        f(b=1)


def test_signature_survives() -> None:
    assert list(inspect.signature(step).parameters) == ["lr", "eps", "momentum"]
    assert step.__doc__ == "Do a step."


def test_names_that_can_be_given_are_accepted() -> None:
    @deprecate_args("anything")
    def options(x: int, **kwargs: Any) -> int:
        return x

    @deprecate_args("x")
    def positional(x: int = 0, /) -> int:
        return x

    assert options(1, other=2) == 1
    with pytest.raises(TypeError, match="anything"):
        options(1, anything=2)
    assert positional() == 0
    with pytest.raises(TypeError, match="'x'"):
        positional(1)


@pytest.mark.parametrize("name", ["typo", "args"])
def test_unknown_names_are_refused_at_decoration(name: str) -> None:
    with pytest.raises(ValueError, match=rf"f has no parameter {name}"):

        @deprecate_args(name)
        def f(x: int, *args: int) -> None: ...


def test_other_bad_input_is_refused_at_decoration() -> None:
    with pytest.raises(ValueError, match="needs the names"):
        deprecate_args()
    with pytest.raises(TypeError, match="names in quotes"):

        @deprecate_args
        def f() -> None: ...


class Layer:
    @deprecate_args("mask")
    def forward(self, x: int, mask: int | None = None) -> int:
        return x

    @deprecate_args("mask")
    @classmethod
    def build(cls, x: int, mask: int | None = None) -> int:
        return x


def test_methods() -> None:
    assert (Layer().forward(1), Layer.build(2)) == (1, 2)
    for call in (lambda: Layer().forward(1, 2), lambda: Layer.build(1, mask=2)):
        with pytest.raises(TypeError, match="'mask'"):
            call()


def test_coroutine_function_refuses_at_the_call() -> None:
    @deprecate_args("mask")
    async def fetch(x: int, mask: int | None = None) -> int:
        return x

    with pytest.raises(TypeError, match="'mask'"):
        fetch(1, mask=2)
    assert asyncio.iscoroutinefunction(fetch)
    assert asyncio.run(fetch(3)) == 3


def test_deprecated_function_below_is_blamed_on_the_user() -> None:
    @deprecate_args("eps")
    @deprecated("1.0.0")
    def old(lr: float, eps: float = 0.0) -> float:
        return lr

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert old(0.1) == 0.1
    assert [warning.filename for warning in caught] == [__file__]
