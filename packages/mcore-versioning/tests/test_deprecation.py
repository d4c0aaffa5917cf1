"""Tests of arguments that a function no longer takes, or takes under another name."""

import asyncio
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

from mcore.versioning import deprecate_args, deprecate_inference_params, deprecated


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


def _forward(inference_context: object = None, inference_params: object = None) -> object:
    return deprecate_inference_params(inference_context, inference_params)  # blamed line


@pytest.mark.parametrize(
    ("context", "params", "expected"),
    [(None, None, None), ("c", None, "c"), ([], None, []), (0, None, 0)],
)
def test_present_name_is_returned_without_a_warning(
    context: object, params: object, expected: object
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert deprecate_inference_params(context, params) == expected


@pytest.mark.parametrize("params", ["p", [], 0])
def test_deprecated_name_is_returned_with_a_warning(params: object) -> None:
    with pytest.warns(UserWarning, match="deprecated") as caught:
        assert deprecate_inference_params(None, params) is params
    text = str(caught[0].message)
    assert "inference_params" in text
    assert "inference_context" in text
    assert "ignored" not in text


@pytest.mark.parametrize("context", ["c", [], 0])
def test_both_names_keep_the_present_one_and_say_so(context: object) -> None:
    with pytest.warns(UserWarning, match=r"inference_params.*ignored.*inference_context"):
        assert deprecate_inference_params(context, "p") is context


def test_warning_is_blamed_on_the_function_that_passes_the_arguments() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _forward(None, "p")
        _forward("c", "p")
    assert len(caught) == 2
    source = Path(__file__).read_text().splitlines()
    for warning in caught:
        assert warning.filename == __file__
        assert "# blamed line" in source[warning.lineno - 1]


def test_warning_is_visible_with_the_filters_of_an_ordinary_program() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", hidden)
        _forward(None, "p")
    assert len(caught) == 1
