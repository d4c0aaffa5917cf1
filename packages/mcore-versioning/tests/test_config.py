"""Tests of the flag for experimental code."""

import asyncio
import contextlib
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mcore.versioning import (
    config,
    experimental_enabled,
    is_experimental_enabled,
    set_experimental_flag,
)


def test_flag_is_off_by_default_and_is_the_module_attribute() -> None:
    assert config.ENABLE_EXPERIMENTAL is False
    set_experimental_flag(True)
    assert config.ENABLE_EXPERIMENTAL is True
    assert is_experimental_enabled() is True
    set_experimental_flag(False)
    assert is_experimental_enabled() is False


@pytest.mark.parametrize("flag", ["false", 1, 0, None])
def test_flag_that_is_no_bool_is_refused(flag: object) -> None:
    with pytest.raises(TypeError, match="True or False"):
        set_experimental_flag(flag)
    with pytest.raises(TypeError, match="True or False"):
        experimental_enabled(flag)
    assert config.ENABLE_EXPERIMENTAL is False


@pytest.mark.parametrize("value", ["true", 1, object()])
def test_anything_but_true_in_the_attribute_means_off(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", value)
    assert is_experimental_enabled() is False


def test_patched_attribute_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", True)
    assert is_experimental_enabled() is True


def test_block_overrides_the_flag_and_restores_it() -> None:
    with experimental_enabled():
        assert is_experimental_enabled() is True
        assert config.ENABLE_EXPERIMENTAL is False
    assert is_experimental_enabled() is False
    set_experimental_flag(True)
    with experimental_enabled(False):
        assert is_experimental_enabled() is False
    assert is_experimental_enabled() is True


def test_blocks_nest() -> None:
    with experimental_enabled():
        with experimental_enabled(False):
            assert is_experimental_enabled() is False
        assert is_experimental_enabled() is True


def test_block_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), experimental_enabled():
        raise KeyError
    assert is_experimental_enabled() is False


def test_block_of_one_thread_is_unseen_by_another() -> None:
    seen: list[bool] = []
    with experimental_enabled():
        thread = threading.Thread(target=lambda: seen.append(is_experimental_enabled()))
        thread.start()
        thread.join(timeout=300)
    assert seen == [False]


def test_block_counts_for_its_own_task_and_the_tasks_that_it_starts() -> None:
    async def look(entered: asyncio.Event, looked: asyncio.Event) -> bool:
        await entered.wait()
        answer = is_experimental_enabled()
        looked.set()
        return answer

    async def main() -> tuple[bool, bool]:
        entered, looked = asyncio.Event(), asyncio.Event()
        outside = asyncio.create_task(look(entered, looked))
        await asyncio.sleep(0)
        with experimental_enabled():
            inside = asyncio.create_task(look(entered, looked))
            entered.set()
            await looked.wait()
        return await outside, await inside

    assert asyncio.run(main()) == (False, True)


def test_block_may_be_left_in_another_context_than_it_was_entered_in() -> None:
    def fixture() -> Iterator[None]:
        with experimental_enabled():
            yield

    steps = fixture()
    contextvars.copy_context().run(next, steps)
    with pytest.raises(StopIteration):
        contextvars.copy_context().run(next, steps)
    assert is_experimental_enabled() is False


def test_block_of_a_context_manager_is_in_force_in_its_caller() -> None:
    @contextlib.contextmanager
    def drafts() -> Iterator[None]:
        with experimental_enabled():
            yield

    with drafts():
        assert is_experimental_enabled()
    assert not is_experimental_enabled()


def _in_a_process(code: str, variable: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: text for k, text in os.environ.items() if k != "MCORE_EXPERIMENTAL"}
    if variable is not None:
        environment["MCORE_EXPERIMENTAL"] = variable
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize(
    ("variable", "is_on", "warns"),
    [
        ("1", True, False),
        (" TRUE ", True, False),
        ("0", False, False),
        ("", False, False),
        (None, False, False),
        ("enabled", False, True),
    ],
)
def test_environment_variable_switches_it_on(
    variable: str | None, is_on: bool, warns: bool
) -> None:
    code = "import mcore.versioning as v; print(v.is_experimental_enabled())"
    finished = _in_a_process(code, variable)
    assert finished.stdout == f"{is_on}\n"
    assert ("RuntimeWarning" in finished.stderr) is warns


def test_code_comes_after_the_environment_and_a_block_after_both() -> None:
    code = (
        "import subprocess, sys, mcore.versioning as v\n"
        "v.set_experimental_flag(False); print(v.is_experimental_enabled())\n"
        "with v.experimental_enabled(): print(v.is_experimental_enabled())\n"
        "child = 'import mcore.versioning as v; print(v.is_experimental_enabled())'\n"
        "print(subprocess.check_output([sys.executable, '-c', child], text=True), end='')\n"
    )
    assert _in_a_process(code, "1").stdout.split() == ["False", "True", "True"]


def test_other_attributes_of_the_module_are_missing() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        config.enabled  # noqa: B018
