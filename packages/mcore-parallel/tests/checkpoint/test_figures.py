"""The figures of saves and loads: the handle, a log line of each, and a bar on the terminal."""

from __future__ import annotations

import concurrent.futures
import io
import re
import sys
from pathlib import Path

import pytest
import torch

from mcore.parallel.checkpoint import (
    CheckpointingException,
    CheckpointManager,
    SaveHandle,
    SaveStats,
    figures,
    load_sharded_state_dict,
    save_sharded_state_dict,
)

STATE = {"w": torch.zeros(250_000), "v": torch.zeros(1000)}  # 1.004 MB


def test_the_handle_has_the_figures_of_its_save(tmp_path: Path) -> None:
    handle = save_sharded_state_dict(STATE, tmp_path / "a", async_=True)
    handle.result()
    stats = handle.stats
    assert stats is not None
    files = list((tmp_path / "a").iterdir())
    assert stats.num_files == len(files) == 3
    assert stats.num_bytes == sum(file.stat().st_size for file in files)
    assert list(stats.seconds) == ["describe", "decide", "copy", "write", "publish"]
    assert min(stats.seconds.values()) >= 0
    assert stats.waited_s >= stats.seconds["describe"] + stats.seconds["copy"]
    future = concurrent.futures.Future[SaveStats]()
    unfinished = SaveHandle(tmp_path / "b", future)
    assert unfinished.stats is None
    future.set_exception(CheckpointingException("failed"))
    assert unfinished.stats is None


def test_the_figures_by_hand() -> None:
    stats = SaveStats(3 * 10**9, 4, {"describe": 0.5, "write": 1.0}, 0.5)
    assert stats.gb_per_s == 2.0
    assert str(stats) == (
        "3.00 GB in 4 files, 1.5 s (describe 0.5, write 1.0), 2.00 GB/s, training waited 0.5 s"
    )


def test_each_save_and_load_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    model = torch.nn.Linear(3, 2)
    with caplog.at_level("INFO", "mcore.parallel.checkpoint"):
        save_sharded_state_dict(STATE, tmp_path / "a")
        load_sharded_state_dict(STATE, tmp_path / "a")
        manager.save(model, step=1)
        manager.load_latest(model)
    lines = [record.getMessage() for record in caplog.records]
    seconds = r"\d+\.\d s \(.*\), \d+\.\d\d GB/s, training waited \d+\.\d s"
    expected = [
        rf"saved {tmp_path}/a: 0.00 GB in 3 files, {seconds}",
        rf"loaded {tmp_path}/a: 0.00 GB in 1 file, {seconds}",
        rf"saved {tmp_path}/step_1: 0.00 GB in 3 files, {seconds}",
        rf"loaded {tmp_path}/step_1: 0.00 GB in 1 file, {seconds}",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_a_terminal_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_DELAY_S", 0)
    shown = {}
    for name, stream in {"terminal": Terminal(), "file": io.StringIO()}.items():
        monkeypatch.setattr(sys, "stderr", stream)
        save_sharded_state_dict(STATE, tmp_path / name, progress_bar=True)
        load_sharded_state_dict(STATE, tmp_path / name, progress_bar=True)
        shown[name] = stream.getvalue()
    assert "saving terminal: 100%" in shown["terminal"]
    assert "loading terminal: 100%" in shown["terminal"]
    assert "1.00M/1.00M" in shown["terminal"]
    assert shown["file"] == ""
    monkeypatch.setattr(sys, "stderr", unasked := Terminal())
    save_sharded_state_dict(STATE, tmp_path / "unasked")
    assert unasked.getvalue() == ""
