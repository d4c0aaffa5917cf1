import pickle

import pytest
import torch

from mcore.observe import (
    MEMORY_KEYS,
    MEMORY_KEYS_TABLE,
    ProfilingConfig,
    report_memory,
    reports,
    start_memory_history_recording,
)
from mcore.observe.rank_logging import warn_once
from mcore.observe.reports import save_snapshot_at_profile_end
from rank_testing import run_ranks


def with_stats(monkeypatch, stats):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda: stats)


def test_bytes_become_gigabytes_with_five_digits_and_counts_stay_ints(monkeypatch):
    with_stats(
        monkeypatch,
        {
            "num_alloc_retries": 3,
            "allocated_bytes.all.current": 1_234_567_890,
            "allocated_bytes.all.peak": 2_048_000_000,
            "reserved_bytes.all.current": 0,
            "something else": 1,
        },
    )
    for keys in (None, {}):
        report = report_memory(keys)
        assert list(report.items()) == [
            ("mem-allocated-gigabytes", 1.2346),
            ("mem-reserved-gigabytes", 0.0),
            ("mem-max-allocated-gigabytes", 2.048),
            ("mem-alloc-retires", 3),
        ]
        assert type(report["mem-alloc-retires"]) is int


def test_chosen_keys_in_their_order(monkeypatch):
    with_stats(monkeypatch, dict.fromkeys(MEMORY_KEYS, 5_000_000_000))
    assert report_memory({"num_alloc_retries": "r", "reserved_bytes.all.peak": "peak"}) == {
        "r": 5_000_000_000,
        "peak": 5.0,
    }
    table = report_memory(MEMORY_KEYS_TABLE)
    assert list(table) == list(MEMORY_KEYS_TABLE.values())
    assert set(MEMORY_KEYS_TABLE) <= set(MEMORY_KEYS)


def test_peaks_start_again_only_when_asked(monkeypatch):
    resets = []
    with_stats(monkeypatch, {})
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: resets.append(1))
    report_memory(None)
    assert resets == []
    report_memory(None, reset_peak=True)
    assert resets == [1]


def grown_by_200_megabytes():
    torch.accelerator.is_available = lambda: False
    before = report_memory(None)
    held = torch.ones(50_000_000)  # which are touched
    after = report_memory(None)
    return before, after, held.numel(), report_memory({"allocated_bytes.all.current": "a"})


def test_the_process_where_there_is_no_accelerator():
    [(before, after, _, nothing)] = run_ranks(grown_by_200_megabytes, 1, init=None)  # no threads
    assert list(before) == ["mem-host-rss-gigabytes", "mem-max-host-rss-gigabytes"]
    assert 0 < before["mem-host-rss-gigabytes"] <= before["mem-max-host-rss-gigabytes"]
    assert 0.15 < after["mem-host-rss-gigabytes"] - before["mem-host-rss-gigabytes"] < 0.35
    assert nothing == {}


@pytest.fixture(autouse=True)
def fresh_process():
    for cached in (warn_once, reports._start_recording):
        cached.cache_clear()


@pytest.fixture
def allocator(monkeypatch):
    """Stands for CUDA: takes the calls and hands out a snapshot."""
    calls = {"record": [], "observers": []}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda **o: calls.setdefault("record", []).append(o),
    )
    monkeypatch.setattr(
        torch._C,
        "_cuda_attach_out_of_memory_observer",
        calls["observers"].append,
        raising=False,
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [1]})
    return calls


def profiling(path, **options):
    return ProfilingConfig(
        **{"record_memory_history": True, "memory_snapshot_path": str(path)} | options
    )


def at_rank(monkeypatch, rank):
    monkeypatch.setattr(reports, "process_rank", lambda: rank)


@pytest.mark.parametrize(
    "config",
    [
        None,
        ProfilingConfig(),
        ProfilingConfig(record_memory_history=True, profile_ranks=[1]),
        ProfilingConfig(record_memory_history=True, profile_ranks=[]),
    ],
)
def test_nobody_records(config, allocator):
    start_memory_history_recording(config)
    assert allocator == {"record": [], "observers": []}


def test_recording_starts_once_with_one_observer(allocator, tmp_path):
    for _ in range(2):
        start_memory_history_recording(profiling(tmp_path / "snapshot.pickle"))
    assert allocator["record"] == [
        {"enabled": "all", "context": "all", "stacks": "python", "max_entries": 100_000}
    ]
    assert len(allocator["observers"]) == 1


def test_out_of_memory_saves_a_snapshot_and_never_raises(allocator, tmp_path, monkeypatch, caplog):
    start_memory_history_recording(profiling(tmp_path / "snapshot.pickle"))
    (observer,) = allocator["observers"]
    observer(0, 1024, 2048, 512)
    saved = tmp_path / "snapshot_oom_rank-0.pickle"
    assert pickle.loads(saved.read_bytes()) == {"segments": [1]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: 1 / 0)
    observer(0, 1024, 2048, 512)
    assert "could not save a snapshot to" in caplog.text


def test_one_warning_without_cuda(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _ in range(2):
        start_memory_history_recording(profiling("snapshot.pickle"))
        save_snapshot_at_profile_end(profiling("snapshot.pickle"), 12)
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_snapshot_at_the_profile_end_of_a_rank(allocator, tmp_path, monkeypatch, capsys):
    at_rank(monkeypatch, 7)
    config = profiling(tmp_path / "new" / "x.pkl", profile_ranks=[7])
    for step in (11, 12, 13):
        save_snapshot_at_profile_end(config, step)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x_7.pkl"]
    assert pickle.loads((tmp_path / "new" / "x_7.pkl").read_bytes()) == {"segments": [1]}
    assert capsys.readouterr().out == ""


def test_rank_0_says_where_its_snapshot_is(allocator, tmp_path, capsys):
    save_snapshot_at_profile_end(profiling(tmp_path / "x.pkl"), 12)
    assert capsys.readouterr().out == f"Saved memory snapshot to {tmp_path}/x_0.pkl\n"


def test_a_failure_is_a_warning_and_leaves_no_half_file_under_the_name(
    allocator, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: 1 / 0)
    save_snapshot_at_profile_end(profiling(tmp_path / "x.pkl"), 12)
    assert not (tmp_path / "x_0.pkl").exists()
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_snapshot_has_a_history(tmp_path):
    """The allocator's history holds the allocation that was made after recording started."""
    start_memory_history_recording(profiling(tmp_path / "x.pkl"))
    held = torch.ones(1024, device="cuda")
    save_snapshot_at_profile_end(profiling(tmp_path / "x.pkl"), 12)
    snapshot = pickle.loads((tmp_path / "x_0.pkl").read_bytes())
    assert any(snapshot["device_traces"])
    assert held.numel() == 1024
