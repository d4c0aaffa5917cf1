"""Tests of extended signatures and of which parameters a callable accepts."""

import __future__

import inspect
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.versioning import (
    accepts_parameter,
    create_updated_function_signature,
    deprecate_args,
    deprecated,
    experimental_cls,
    null_decorator,
)


def _a(x, y=1) -> int: ...


def _b(x, **kw): ...


def _c(x, *args): ...


def _d(x, *, w=0, **kw) -> None: ...


class _Layer:
    def forward(self, x, scale=1.0): ...


@pytest.mark.parametrize(
    ("function", "extra", "expected"),
    [
        (_a, {"z": True}, "(x, y=1, *, z: bool = True) -> int"),
        (_b, {"z": True}, "(x, *, z: bool = True, **kw)"),
        (_c, {"z": None}, "(x, *args, z=None)"),
        (_d, {"q": 1, "p": "a"}, "(x, *, w=0, q: int = 1, p: str = 'a', **kw) -> None"),
        (_a, {"z": inspect.Parameter.empty}, "(x, y=1, *, z) -> int"),
        (_Layer().forward, {"z": 2}, "(x, scale=1.0, *, z: int = 2)"),
        (_Layer.forward, {"z": 2}, "(self, x, scale=1.0, *, z: int = 2)"),
    ],
)
def test_extended_signature(function: Any, extra: dict[str, Any], expected: str) -> None:
    assert str(create_updated_function_signature(function, **extra)) == expected


def test_no_extras_give_an_equal_signature() -> None:
    assert create_updated_function_signature(_a) == inspect.signature(_a)


def test_taken_name_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"_a .*already has the parameter y"):
        create_updated_function_signature(_a, y=2)


def test_callable_without_a_signature_is_named() -> None:
    with pytest.raises(ValueError, match="'range'> has no signature"):
        create_updated_function_signature(range, z=1)


def test_signature_can_be_assigned_to_a_wrapper() -> None:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    wrapper.__signature__ = create_updated_function_signature(_a, z=True)  # type: ignore[attr-defined]
    assert list(inspect.signature(wrapper).parameters) == ["x", "y", "z"]


@settings(deadline=None)
@given(
    names=st.lists(st.from_regex(r"[a-w][a-z]{0,5}_", fullmatch=True), unique=True, max_size=5),
    defaults=st.lists(st.one_of(st.none(), st.integers(), st.text(), st.booleans()), min_size=5),
)
def test_extras_come_last_in_order_and_bind(names: list[str], defaults: list[Any]) -> None:
    extra = dict(zip(names, defaults, strict=False))
    signature = create_updated_function_signature(_b, **extra)
    parameters = list(signature.parameters.values())
    assert [p.name for p in parameters] == ["x", *extra, "kw"]
    bound = signature.bind(1, other=2)
    bound.apply_defaults()
    assert bound.arguments == {"x": 1, **extra, "kw": {"other": 2}}


@pytest.mark.parametrize(
    ("function", "name", "expected"),
    [
        (_a, "y", True),
        (_a, "z", False),
        (_b, "anything", True),
        (_b, "kw", True),
        (_c, "args", False),
        (_c, "z", False),
        (_d, "w", True),
        (_Layer().forward, "self", False),
        (len, "obj", True),
    ],
)
def test_accepts_parameter(function: Any, name: str, expected: bool) -> None:
    assert accepts_parameter(function, name) is expected


_UNDEFINED = """
def scale(x: Missing, y: int = 1, **options) -> Missing: ...
class Layer:
    def __init__(self, size: Missing): ...
class Head(Layer): ...
"""


def test_annotations_may_name_what_only_type_checkers_import() -> None:
    """From Python 3.14 on without an import from ``__future__``, before it with one."""
    flags = 0 if sys.version_info >= (3, 14) else __future__.annotations.compiler_flag
    names: dict[str, Any] = {"__name__": "user"}
    exec(compile(_UNDEFINED, "user", "exec", flags, dont_inherit=True), names)
    scale, layer, head = names["scale"], names["Layer"], names["Head"]
    assert accepts_parameter(scale, "x")
    assert not accepts_parameter(layer, "y")
    extended = create_updated_function_signature(scale, verbose=True)
    assert list(extended.parameters) == ["x", "y", "verbose", "options"]
    assert "Missing" in str(extended.parameters["x"].annotation)
    with pytest.raises(TypeError, match="y goes"):
        deprecate_args("y", message="{name} goes")(scale)(1, 2)
    with pytest.warns(DeprecationWarning, match="Head"):
        assert isinstance(deprecated("1.0.0")(head)(3), layer)
    gated = experimental_cls("1.0.0")(layer)
    assert list(inspect.signature(gated).parameters) == ["size"]


def _increment(x: int) -> int:
    return x + 1


def test_decorated_function_is_the_function_itself_and_can_be_called() -> None:
    assert null_decorator(_increment) is _increment
    assert null_decorator(lambda x: x + 1)(1) == 2


def test_class_is_returned_itself() -> None:
    class Kernel:
        pass

    assert null_decorator(Kernel) is Kernel


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((), {"configs": [1], "key": ["n"]}),
        (("message",), {}),
        (("message",), {"color": "red"}),
        ((_increment,), {"warmup": 2}),
        ((_increment, _increment), {}),
    ],
)
def test_arguments_give_an_identity_decorator(args: tuple, kwargs: dict) -> None:
    decorate = null_decorator(*args, **kwargs)
    assert decorate(_increment) is _increment
    assert decorate(int) is int


def test_with_statement_can_be_repeated() -> None:
    annotation = null_decorator("range")
    passes = 0
    for _ in range(2):
        with annotation as entered:
            passes += 1
            assert entered is annotation
    assert passes == 2


def test_with_statement_lets_exceptions_through() -> None:
    with pytest.raises(KeyError, match="lost"), null_decorator("range"):
        raise KeyError("lost")


def test_decorated_functions_do_not_become_context_managers() -> None:
    @null_decorator
    def bare(x: int) -> int:
        return x

    @null_decorator(num_warps=4)
    def configured(x: int) -> int:
        return x

    assert (bare(3), configured(4)) == (3, 4)
