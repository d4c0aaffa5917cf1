"""Errors that may pass are raised as they are: no load takes an older checkpoint for them."""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore.parallel.checkpoint import (
    CheckpointingException,
    CheckpointManager,
    DamagedCheckpointError,
    is_complete_checkpoint,
    list_checkpoints,
    load_sharded_state_dict,
    save_sharded_state_dict,
)
from mcore.parallel.checkpoint.__main__ import main
from mcore.parallel.checkpoint.files import directory, pieces, places
from rank_testing import run_ranks


def three_checkpoints(root: Path) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 4)
    manager = CheckpointManager(root)
    for step in (1, 2, 3):
        manager.save(model, step=step)
    return model


class Interruption(KeyboardInterrupt):
    pass


PASSING: list[BaseException] = [
    *(OSError(getattr(errno, name), name) for name in ("EMFILE", "ENFILE", "ESTALE", "ETIMEDOUT")),
    OSError(errno.EACCES, "EACCES"),
    OSError(errno.EIO, "EIO"),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    TimeoutError("handler of SIGALRM"),
    Interruption(),
]


@contextmanager
def failing(module: Any, name: str, error: BaseException, at: int = 1) -> Iterator[None]:
    """Let one call of a function of the operating system or of a module raise an error."""
    real, calls = getattr(module, name), [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise error
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, call)
        yield


# Reads of the manifest, of files and of their elements.
PLACES: list[tuple[Any, str, int]] = [
    (os, "open", 1),
    (os, "open", 2),
    (os, "open", 4),
    (os, "lstat", 1),
    (os, "stat", 3),
    (pieces, "read_next", 1),
]


def look(root: Path) -> None:
    """Look at checkpoints, then read one, so that each place of a failure is reached."""
    assert [is_complete_checkpoint(root / f"step_{step}") for step in (1, 2, 3)] == [True] * 3
    load_sharded_state_dict({"step": 0}, root / "step_3", unexpected="ignore")


@pytest.mark.parametrize("error", PASSING, ids=lambda error: f"{type(error).__name__} {error}")
def test_the_newest_checkpoint_stays_the_newest(error: BaseException, tmp_path: Path) -> None:
    model = three_checkpoints(tmp_path)
    names = sorted(os.listdir(tmp_path))
    for module, name, at in PLACES:
        manager = CheckpointManager(tmp_path)
        with failing(module, name, error, at), pytest.raises(type(error)) as caught:
            manager.load_latest(model)
        assert caught.value is error, (name, at)
        assert manager.load_latest(model) == {"step": 3}
        with failing(module, name, error, 1), pytest.raises((type(error), CheckpointingException)):
            look(tmp_path)
    manager.save(model, step=4)
    assert sorted(os.listdir(tmp_path)) == [*names, "step_4"]


def test_a_process_without_free_files_goes_back_nowhere(tmp_path: Path) -> None:
    model = three_checkpoints(tmp_path)
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        with pytest.raises(OSError, match="Too many open files"):
            CheckpointManager(tmp_path).load_latest(model)
        with pytest.raises((OSError, CheckpointingException), match="Too many open files"):
            list_checkpoints(tmp_path)
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_sector_that_cannot_be_read_twice_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = three_checkpoints(tmp_path)
    bad = str(tmp_path / "step_3" / "__0_0.distcp")
    real = pieces.read_next

    def read(stream: Any, memory: memoryview) -> None:
        if os.readlink(f"/proc/self/fd/{stream.fileno()}") == bad:
            raise OSError(errno.EIO, "Input/output error")
        real(stream, memory)

    class Bad:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, _: int) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    def open_bad(path: Any, *args: Any, **options: Any) -> Any:
        return Bad() if str(path) == bad else open(path, *args, **options)

    monkeypatch.setattr(pieces, "read_next", read)
    monkeypatch.setattr(places, "open", open_bad, raising=False)
    assert CheckpointManager(tmp_path).load_latest(model) == {"step": 2}
    assert main(["verify", str(tmp_path)]) == 1
    assert "step_3: DAMAGED" in capsys.readouterr().out


def passing_on_one_rank(folder: str) -> tuple[str, str, list[str]]:
    manager = CheckpointManager(folder)
    model = torch.nn.Linear(4, 4)
    for step in (1, 2):
        manager.save(model, step=step)
    error = OSError(errno.EMFILE, "Too many open files")
    patch = (
        failing(pieces, "read_next", error) if dist.get_rank() == 1 else failing(os, "abc", error)
    )
    os.abc = None  # type: ignore[attr-defined]
    with patch, pytest.raises(Exception, match="Too many open files") as caught:
        manager.load_latest(model)
    dist.barrier()
    assert manager.load_latest(model) == {"step": 2}
    return type(caught.value).__name__, str(caught.value), sorted(os.listdir(folder))


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(passing_on_one_rank, 2, str(tmp_path))
    assert first[0] == "CheckpointingException"
    assert first[1].endswith("key 'step' cannot be read (OSError: [Errno 24] Too many open files)")
    assert second[0] == "OSError"
    assert first[2] == second[2] == ["step_1", "step_2"]


def test_objects_that_this_program_cannot_unpickle_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = types.ModuleType("old_program")
    old.Config = type("Config", (), {"__module__": "old_program"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "old_program", old)
    model = torch.nn.Linear(2, 1)
    manager = CheckpointManager(tmp_path)
    manager.save(model, step=1)
    manager.save(model, step=2, weights_only=False, where=Path("/data"))
    with pytest.raises(
        CheckpointingException,
        match=r"'where' cannot be unpickled: it holds a pathlib.*weights_only=False",
    ):
        CheckpointManager(tmp_path).load_latest(model)
    manager.save(model, step=3, weights_only=False, config=old.Config())
    monkeypatch.delitem(sys.modules, "old_program")
    manager = CheckpointManager(tmp_path)
    with pytest.raises(
        CheckpointingException, match=r"lacks its class .*old_program.*importable"
    ) as e:
        manager.load_latest(model, weights_only=False)
    assert not isinstance(e.value, DamagedCheckpointError)
    monkeypatch.setitem(sys.modules, "old_program", old)
    assert manager.load_latest(model, weights_only=False)["step"] == 3
    assert manager.save(model, step=4)
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2", "step_3", "step_4"]


STATE = {"w": torch.ones(3)}


@pytest.mark.parametrize("name", ["EINVAL", "EBADF", "ENOTSUP"])
def test_file_systems_without_a_sync_of_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(getattr(errno, name), name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    save_sharded_state_dict(STATE, tmp_path / "a")
    assert load_sharded_state_dict({"w": None}, tmp_path / "a")["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_folder_that_cannot_be_synced_after_the_rename(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def fail(given: Any, *rest: Any) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{given}") if call == "fsync" else given)
        if path == tmp_path and (path / "a").exists():
            raise OSError(errno.EIO, "Input/output error")
        return real(given, *rest)

    monkeypatch.setattr(os, call, fail)
    text = r"a is there and complete, but .* not yet known to be on the disk.*Input/output error"
    with pytest.raises(CheckpointingException, match=text):
        save_sharded_state_dict(STATE, tmp_path / "a")
    monkeypatch.undo()
    assert is_complete_checkpoint(tmp_path / "a")


def test_the_loser_of_two_saves_to_one_path_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ready = directory.publish, threading.Barrier(2)

    def publish(incomplete: Path, final: Path) -> None:
        ready.wait(300)
        real(incomplete, final)

    monkeypatch.setattr(directory, "publish", publish)
    errors: list[str] = []

    def save() -> None:
        try:
            save_sharded_state_dict(STATE, tmp_path / "a")
        except CheckpointingException as error:
            errors.append(str(error))

    threads = [threading.Thread(target=save) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    [text] = errors
    assert "was made by another program during the save" in text
    assert os.listdir(tmp_path) == ["a"]


def test_paths_of_bytes(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "step_1")
    save_sharded_state_dict(STATE, path)
    assert load_sharded_state_dict({"w": None}, path)["w"].tolist() == [1, 1, 1]
    assert is_complete_checkpoint(path)
    assert list_checkpoints(os.fsencode(tmp_path)) == [tmp_path / "step_1"]
    manager = CheckpointManager(os.fsencode(tmp_path), keep=1)
    assert manager.save(torch.nn.Linear(1, 1), step=2)
    assert os.listdir(tmp_path) == ["step_2"]
