"""Tests of stacking with the decorator that type checkers know (PEP 702), at run time."""

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import typing_extensions

from mcore.versioning import deprecated, get_deprecation

TEXT = "old is deprecated since version 1.0.0. Use new instead."
STANDARD = [typing_extensions.deprecated]
if sys.version_info >= (3, 13):
    STANDARD.append(warnings.deprecated)


def _caught(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("standard", STANDARD)
@pytest.mark.parametrize("ours_outermost", [True, False])
def test_function_with_both_warns_once(standard: Any, ours_outermost: bool) -> None:
    def old(x: int) -> int:
        return x

    decorators = [standard(TEXT, category=None), deprecated("1.0.0", alternative="new")]
    for decorate in decorators if ours_outermost else reversed(decorators):
        old = decorate(old)
    assert _caught(lambda: old(1)) == [TEXT]
    assert old.__deprecated__ == TEXT
    assert get_deprecation(old).message == TEXT
    assert str(inspect.signature(old)) == "(x: int) -> int"


@pytest.mark.parametrize("standard", STANDARD)
@pytest.mark.parametrize("ours_outermost", [True, False])
def test_class_with_both_warns_once(standard: Any, ours_outermost: bool) -> None:
    class old:  # noqa: N801
        def __init__(self, x: int) -> None:
            self.x = x

    decorators = [standard(TEXT, category=None), deprecated("1.0.0", alternative="new")]
    for decorate in decorators if ours_outermost else reversed(decorators):
        old = decorate(old)
    assert _caught(lambda: old(1)) == [TEXT]
    assert _caught(lambda: type("Child", (old,), {})) == [TEXT]
    assert old.__deprecated__ == TEXT
    assert str(inspect.signature(old)) == "(x: int) -> None"


@pytest.mark.parametrize("standard", STANDARD)
def test_another_text_is_reported(standard: Any) -> None:
    def old() -> None: ...

    class Old: ...

    for target in (old, Old):
        with pytest.raises(ValueError, match=r"'use new'.*is deprecated since version 1\.0\.0"):
            deprecated("1.0.0")(standard("use new", category=None)(target))


def test_own_texts_may_differ() -> None:
    def old() -> None: ...

    twice = deprecated("2.0.0")(deprecated("1.0.0")(old))
    assert twice.__deprecated__ == "old is deprecated since version 2.0.0."


@pytest.mark.parametrize("standard", STANDARD)
def test_property_in_the_order_that_type_checkers_accept(standard: Any) -> None:
    class Layer:
        @property
        @deprecated("1.0.0", alternative="new")
        @standard(
            f"{__qualname__}.old is deprecated since version 1.0.0. Use new instead.", category=None
        )
        def old(self) -> int:
            """The old size."""
            return 1

        @property
        def size(self) -> int:
            return self._size

        @size.setter
        @deprecated("2.0.0")
        def size(self, size: int) -> None:
            self._size = size

    layer = Layer()
    assert _caught(lambda: layer.old) == [Layer.old.fget.__deprecated__]
    assert get_deprecation(Layer.old).alternative == "new"
    assert Layer.old.__doc__ == "The old size."
    assert _caught(lambda: setattr(layer, "size", 3)) == [get_deprecation(Layer.size).message]
    assert _caught(lambda: layer.size) == []
    assert layer.size == 3


@pytest.mark.parametrize("standard", STANDARD)
def test_another_text_between_two_of_ours_is_reported(standard: Any) -> None:
    def old() -> None: ...

    marked = standard("Another text.", category=None)(deprecated("1.0.0")(old))
    with pytest.raises(ValueError, match=r"has the text 'Another text\.'"):
        deprecated("1.0.0", alternative="new")(marked)
