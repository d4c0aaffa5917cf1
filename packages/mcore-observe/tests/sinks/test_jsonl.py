import contextlib
import copy
import json
import math
import os
import pickle
import re
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.observe import JsonlSink, MetricSink
from mcore.observe.rank_logging import warn_once
from mcore.observe.sinks import GuardedSink, records_of
from rank_testing.scripts import Script


def lines_of(path):
    return list(records_of(path))


def test_one_line_for_each_step_in_a_new_folder(tmp_path):
    path, before_s = tmp_path / "new" / "metrics.jsonl", time.time()
    sink = JsonlSink(path)
    sink.log({"lm loss": 2.5, "batch-size": 64}, 1)
    sink.log({"lm loss": math.nan, "grad-norm": math.inf}, 2)
    times = re.findall(r'"time": ([0-9.]+)', path.read_text())
    assert before_s - 0.001 <= float(times[0]) <= float(times[1]) <= time.time() + 0.001
    assert path.read_text() == (
        f'{{"step": 1, "time": {times[0]}, "lm loss": 2.5, "batch-size": 64}}\n'
        f'{{"step": 2, "time": {times[1]}, "lm loss": null, "grad-norm": null}}\n'
    )
    assert isinstance(sink, MetricSink)


def test_threads_share_a_file(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads switch between any two instructions
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda step: sink.log({"loss": step}, step), range(2000)))
    finally:
        sys.setswitchinterval(interval)
    sink.close()
    assert sorted(line["step"] for line in lines_of(sink.path)) == list(range(2000))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sink: pickle.loads(pickle.dumps(sink))])
def test_a_sink_that_has_written_nothing_can_be_copied(copied, tmp_path):
    sink = copied(JsonlSink(tmp_path / "metrics.jsonl"))
    sink.log({"loss": 2.0}, 1)
    assert lines_of(sink.path) == [{"step": 1, "loss": 2.0}]


def test_a_second_run_continues_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonlSink(path)
        sink.log({"a": 0.5}, step)
        sink.close()
        sink.close()
    assert [line["step"] for line in lines_of(path)] == [1, 2]


@pytest.mark.parametrize("torn", ['{"step": 2, "a', "{", '"a"', "12", "\0" * 10, "\u00e9"[:1]])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 0.5}\n' + torn, encoding="utf-8")
    JsonlSink(path).log({"a": 0.25}, 2)
    assert lines_of(path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.25}]


def test_a_whole_last_line_only_gets_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 0.5}')
    JsonlSink(path).log({"a": 0.25}, 2)
    assert lines_of(path) == [{"step": 1, "a": 0.5}, {"step": 2, "a": 0.25}]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 140_000), big=st.booleans())
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, cut, big):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    names = [f"metric {i}" for i in range(4000 if big else 3)]  # one line longer than a block
    sink = JsonlSink(path)
    for step in (1, 2):
        sink.log(dict.fromkeys(names, 0.5), step)
    sink.close()
    whole = path.read_bytes()
    kept = whole[: min(cut, len(whole))]
    path.write_bytes(kept)
    JsonlSink(path).log({"a": 1.0}, 3)
    ends = [whole.index(b"\n"), len(whole) - 1]
    expected = [step for step, end in zip((1, 2), ends, strict=True) if len(kept) >= end]
    assert [line["step"] for line in lines_of(path)] == [*expected, 3]


def test_a_killed_process_keeps_what_it_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys, time; from mcore.observe import JsonlSink;"
        "sink = JsonlSink(sys.argv[1]);"
        "[sink.log({'a': 0.5}, step) for step in range(100)];"
        "print('logged', flush=True); time.sleep(60)"
    )
    script = Script(code, str(path))
    script.wait_until_printed("logged\n")
    script.send(signal.SIGKILL)
    assert script.wait().returncode == -9
    assert [line["step"] for line in lines_of(path)] == list(range(100))


def test_metrics_with_reserved_names_do_not_replace_them(tmp_path, caplog):
    warn_once.cache_clear()
    path = tmp_path / "metrics.jsonl"
    JsonlSink(path).log({"step": 7.0, "a": 1.0, "time": 0.25}, 1)
    assert lines_of(path) == [{"step": 1, "a": 1.0}]
    assert json.loads(path.read_text())["time"] > 1e9
    assert sorted(record.getMessage()[:23] for record in caplog.records) == [
        "a metric is called 'ste", "a metric is called 'tim",
    ]  # fmt: skip


def test_a_resumed_run_drops_later_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(1, 6):
        first.log({"a": step / 2}, step)
    first.close()
    with path.open("a") as file:  # an old line, without its time
        file.write('{"step": 2, "a": 1.0}\n')
    times = [record.get("time") for record in records_of(path, with_time=True)]
    JsonlSink(path, resume_step=3)  # on a rank that never writes
    assert len(lines_of(path)) == 6
    again = JsonlSink(path, resume_step=3)
    again.log({"a": 7.0}, 4)
    again.log({"a": 8.0}, 5)
    assert [(line["step"], line["a"]) for line in lines_of(path)] == [
        (1, 0.5), (2, 1.0), (3, 1.5), (2, 1.0), (4, 7.0), (5, 8.0),
    ]  # fmt: skip
    kept = [record.get("time") for record in records_of(path, with_time=True)][:4]
    assert kept == [*times[:3], None]
    assert None not in kept[:3]


@pytest.mark.parametrize("resume_step", [None, 1])
def test_a_process_that_was_frozen_before_its_first_line_leaves_a_later_file_alone(
    resume_step, tmp_path
):
    path = tmp_path / "run" / "metrics.jsonl"
    before = JsonlSink(path)
    before.log({"a": 1.0}, 1)
    before.close()
    frozen = JsonlSink(path, resume_step=resume_step)
    if resume_step is None:  # a start without a checkpoint moves the folder away
        path.parent.rename(tmp_path / "moved")
        path.parent.mkdir()
        with pytest.raises(FileNotFoundError):
            frozen.log({"a": 3.0}, 2)
        assert not path.exists()
    later = JsonlSink(path, resume_step=resume_step)
    for step in (2, 3):
        later.log({"a": 2.0}, step)
    expected = path.read_bytes()
    with contextlib.suppress(OSError):  # the first line that waits raises
        frozen.log({"a": 3.0}, 2)
    with pytest.raises(FileExistsError, match=r"a later run has made .* anew"):
        frozen.flush()
    assert path.read_bytes() == expected
    later.close()


def test_flush_reaches_the_disk_and_is_fine_after_close(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.flush()
    sink.log({"a": 1.0}, 1)
    sink.flush()
    sink.close()
    sink.flush()
    assert len(synced) == 1


def test_a_line_is_one_write_and_waits_for_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: pytest.fail("waits for the disk"))
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log({"a": 1.0}, 0)
    writes = []

    def write(line):
        writes.append(bytes(line))
        return len(line)

    monkeypatch.setattr(sink, "_file", mock.Mock(wraps=sink._file, write=write))
    metrics = {f"metric {i}": i / 3 for i in range(30)}
    for step in range(200):
        sink.log(metrics, step)
    assert [json.loads(line)["step"] for line in writes] == list(range(200))


def test_a_full_disk_loses_no_line_and_does_not_switch_the_sink_off(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    guarded = GuardedSink("the file", JsonlSink(path))
    guarded.log({"a": 0.0}, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        for step in range(1, 25):
            guarded.log({"a": step / 2}, step)
        assert path.read_bytes().endswith(b'{"step": 1')  # the part that the disk accepted
        with pytest.raises(OSError, match="too large"):
            guarded.sink.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caplog.records) == 1
    guarded.log({"a": 12.5}, 25)
    guarded.close()
    assert [(line["step"], line["a"]) for line in lines_of(path)] == [
        (step, step / 2) for step in range(26)
    ]


def test_a_resumed_run_that_finds_the_disk_full_keeps_its_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(3):
        first.log({"a": 1.0}, step)
    first.close()
    resumed = JsonlSink(path, resume_step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
        with pytest.raises(OSError, match="too large"):
            resumed.log({"a": 2.0}, 2)
        resumed.log({"a": 2.0}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resumed.close()
    assert [(line["step"], line["a"]) for line in lines_of(path)] == [
        (0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0),
    ]  # fmt: skip
