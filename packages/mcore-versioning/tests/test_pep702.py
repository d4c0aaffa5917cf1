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
