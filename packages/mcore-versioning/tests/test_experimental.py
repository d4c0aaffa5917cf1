"""Tests of functions that run only while experimental code is switched on."""

import asyncio
import functools
import inspect
import logging
import pickle
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import InvalidVersion

from mcore.versioning import (
    ExperimentalNotEnabledError,
    deprecated,
    experimental_enabled,
    experimental_fn,
    internal_api,
    is_experimental_api,
    is_internal_api,
    set_experimental_flag,
)
from mcore.versioning.experimental import _make_gate

RECORD = "ENABLE_EXPERIMENTAL is True, running experimental code."


@experimental_fn("0.1.0")
def double(x: int, *, times: int = 1) -> int:
    """Double it."""
    return 2 * x * times


def _info(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]


def test_gate_is_closed_by_default() -> None:
    ran = []

    @experimental_fn("0.1.0")
    def body() -> None:
        ran.append(True)

    with pytest.raises(ExperimentalNotEnabledError):
        body()
    assert ran == []


@pytest.mark.parametrize(("task", "may_repeat"), [(-1, False), (0, True), (7, True)])
def test_only_a_backward_pass_may_repeat_what_ran(
    task: int, may_repeat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    c_library = types.SimpleNamespace(_current_graph_task_id=lambda: task)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(_C=c_library))
    gated = experimental_fn("0.1.0")(abs)
    with pytest.raises(ExperimentalNotEnabledError):
        gated(-1)  # it has not run before
    with experimental_enabled():
        gated(-1)
    if may_repeat:
        assert gated(-2) == 2
    else:
        with pytest.raises(ExperimentalNotEnabledError):
            gated(-2)


def test_error_says_what_was_gated_and_how_to_enable_it() -> None:
    with pytest.raises(ExperimentalNotEnabledError) as caught:
        double(1)
    text = str(caught.value)
    assert "ENABLE_EXPERIMENTAL" in text
    assert double.__qualname__ in text
    assert "set_experimental_flag(True)" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_gate_opens_by_flag_and_by_block() -> None:
    set_experimental_flag(True)
    assert double(3, times=2) == 12
    with experimental_enabled(False), pytest.raises(ExperimentalNotEnabledError):
        double(3)
    assert double(3) == 6
    set_experimental_flag(False)
    with pytest.raises(ExperimentalNotEnabledError):
        double(3)
    with experimental_enabled():
        assert double(3) == 6


@pytest.mark.parametrize("flag", ["true", 1])
def test_flag_that_is_not_true_keeps_the_gate_closed(
    flag: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore.versioning.config.ENABLE_EXPERIMENTAL", flag)
    with pytest.raises(ExperimentalNotEnabledError):
        double(1)


class Kinds:
    @experimental_fn("0.1.0")
    def method(self, x: int) -> tuple[Any, int]:
        return self, x

    @experimental_fn("0.1.0")
    @classmethod
    def outer_class_method(cls, x: int) -> tuple[Any, int]:
        return cls, x

    @classmethod
    @experimental_fn("0.1.0")
    def inner_class_method(cls, x: int) -> tuple[Any, int]:
        return cls, x

    @experimental_fn("0.1.0")
    @staticmethod
    def outer_static_method(x: int) -> int:
        return x

    @staticmethod
    @experimental_fn("0.1.0")
    def inner_static_method(x: int) -> int:
        return x

    @experimental_fn("0.1.0")
    @property
    def size(self) -> int:
        """How large."""
        return 7


def test_methods_of_all_kinds() -> None:
    kinds = Kinds()
    calls = {
        "method": lambda: kinds.method(1),
        "outer_class_method": lambda: Kinds.outer_class_method(1),
        "inner_class_method": lambda: kinds.inner_class_method(1),
        "outer_static_method": lambda: Kinds.outer_static_method(1),
        "inner_static_method": lambda: kinds.inner_static_method(1),
        "size": lambda: kinds.size,
    }
    for name, call in calls.items():
        with pytest.raises(ExperimentalNotEnabledError, match=rf"Kinds\.{name}"):
            call()
    with experimental_enabled():
        assert {name: call() for name, call in calls.items()} == {
            "method": (kinds, 1),
            "outer_class_method": (Kinds, 1),
            "inner_class_method": (Kinds, 1),
            "outer_static_method": 1,
            "inner_static_method": 1,
            "size": 7,
        }
    for name in ("outer_class_method", "outer_static_method"):
        descriptor = vars(Kinds)[name]
        assert isinstance(descriptor, (classmethod, staticmethod))
        assert descriptor._experimental_api is True
    assert Kinds.size.__doc__ == "How large."


def test_coroutine_function_is_gated_when_called_and_stays_one() -> None:
    @experimental_fn("0.1.0")
    async def fetch(x: int) -> int:
        await asyncio.sleep(0)
        return x

    with pytest.raises(ExperimentalNotEnabledError):
        fetch(1)
    assert asyncio.iscoroutinefunction(fetch)
    if sys.version_info >= (3, 12):
        assert inspect.iscoroutinefunction(fetch)
    with experimental_enabled():
        assert asyncio.run(fetch(5)) == 5


def test_generators_are_gated_when_called() -> None:
    @experimental_fn("0.1.0")
    def count() -> Iterator[int]:
        yield 1

    @experimental_fn("0.1.0")
    async def stream() -> AsyncIterator[int]:
        yield 2

    for function in (count, stream):
        with pytest.raises(ExperimentalNotEnabledError):
            function()

    async def collect() -> list[int]:
        return [item async for item in stream()]

    with experimental_enabled():
        assert list(count()) == [1]
        assert asyncio.run(collect()) == [2]


def test_introspection_survives() -> None:
    assert str(inspect.signature(double)) == "(x: int, *, times: int = 1) -> int"
    assert (double.__name__, double.__qualname__, double.__doc__) == (
        "double",
        "double",
        "Double it.",
    )
    assert double.__module__ == __name__
    assert double._experimental_api is True
    assert double._introduced_with_version == "0.1.0"
    assert is_experimental_api(double)


def test_module_level_function_pickles_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules.get(__name__) or inspect.getmodule(double)
    monkeypatch.setitem(sys.modules, __name__, module)
    assert pickle.loads(pickle.dumps(double)) is double


def test_callable_objects_can_be_gated() -> None:
    gated = experimental_fn("0.1.0")(functools.partial(pow, 2))
    with pytest.raises(ExperimentalNotEnabledError, match="pow"):
        gated(3)
    with experimental_enabled():
        assert gated(3) == 8


def test_first_use_is_logged_once_for_each_function(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")

    @experimental_fn("0.1.0")
    def first() -> None: ...

    @experimental_fn("0.1.0")
    def second() -> None: ...

    with pytest.raises(ExperimentalNotEnabledError):
        first()
    assert _info(caplog) == []
    with experimental_enabled():
        first()
        first()
        second()
    set_experimental_flag(True)
    first()
    assert [text.startswith(RECORD) for text in _info(caplog)] == [True, True]
    assert "first" in _info(caplog)[0]
    assert "second" in _info(caplog)[1]


def test_first_use_is_logged_before_the_body_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")

    @experimental_fn("0.1.0")
    def fails() -> int:
        return len(_info(caplog))

    with experimental_enabled():
        assert fails() == 1


def test_first_use_is_logged_once_by_many_threads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")
    set_experimental_flag(True)
    for _ in range(20):
        function = experimental_fn("0.1.0")(lambda: None)
        barrier = threading.Barrier(4)

        def use(function: Any = function, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            function()

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    assert len(_info(caplog)) == 20


def test_record_that_another_thread_took_is_not_written_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="mcore.versioning")
    check = inspect.getclosurevars(_make_gate("a.b")).nonlocals["check"]
    announce = inspect.getclosurevars(check).nonlocals["announce"]
    announce()
    announce()
    assert len(_info(caplog)) == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_rank_zero_of_two_processes_writes_the_record(rank: str) -> None:
    code = (
        "import logging, mcore.versioning as v\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "v.set_experimental_flag(True)\n"
        "@v.experimental_fn('0.1.0')\n"
        "def f(): return 5\n"
        "print(f())\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={"RANK": rank, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == "5\n"
    assert finished.stderr.count(RECORD) == (1 if rank == "0" else 0)


def test_expired_function_warns_when_decorated_and_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    function = experimental_fn("0.1.0", current_version="0.5.0")(lambda: 5)
    assert "has reached end of life" in caplog.text
    with experimental_enabled():
        assert function() == 5


@pytest.mark.parametrize("expired", [True, False])
def test_lifetime_can_be_given_in_both_places(
    expired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lifetime = 1 if expired else 9
    experimental_fn("0.1.0", max_lifetime=lifetime, current_version="0.4.0")(lambda: None)
    experimental_fn("0.1.0", current_version="0.4.0")(lambda: None, lifetime)
    experimental_fn("0.1.0", current_version="0.4.0")(lambda: None, max_lifetime=lifetime)
    assert caplog.text.count("has reached end of life") == (3 if expired else 0)


def test_bad_input_is_refused_at_decoration() -> None:
    with pytest.raises(InvalidVersion):
        experimental_fn("soon")
    with pytest.raises(InvalidVersion):
        experimental_fn("0.1.0", current_version="now")
    assert issubclass(InvalidVersion, ValueError)
    with pytest.raises(ValueError, match="max_lifetime"):
        experimental_fn("0.1.0", max_lifetime=-1)
    with pytest.raises(ValueError, match="max_lifetime"):
        experimental_fn("0.1.0")(len, max_lifetime=-1)
    unusable: Any
    for unusable in ("3", 2.5, None, True):
        with pytest.raises(TypeError, match=f"max_lifetime .*, not {unusable!r}"):
            experimental_fn("0.1.0", max_lifetime=unusable)
        with pytest.raises(TypeError, match=f"max_lifetime .*, not {unusable!r}"):
            experimental_fn("0.1.0")(len, unusable)
    with pytest.raises(TypeError, match="can't be decorated"):
        experimental_fn("0.1.0")(5)


def test_bare_use_is_refused() -> None:
    with pytest.raises(TypeError, match=r'Write @experimental_fn\("0\.1\.0"\)'):

        @experimental_fn
        def bare() -> None: ...


def test_class_is_sent_to_the_other_decorator() -> None:
    with pytest.raises(TypeError, match="experimental_cls"):

        @experimental_fn("0.1.0")
        class Wrong: ...


def test_other_decorators_keep_working_in_both_orders() -> None:
    @experimental_fn("0.1.0")
    @internal_api
    @deprecated("1.0.0")
    def inner() -> int:
        return 1

    @deprecated("1.0.0")
    @internal_api
    @experimental_fn("0.1.0")
    def outer() -> int:
        return 1

    for function in (inner, outer):
        assert is_experimental_api(function)
        assert is_internal_api(function)
        assert function._deprecated is True
        with experimental_enabled(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()  # deprecated call
        assert [(warning.category, warning.filename) for warning in caught] == [
            (DeprecationWarning, __file__)
        ]
        line = Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
        assert "# deprecated call" in line
