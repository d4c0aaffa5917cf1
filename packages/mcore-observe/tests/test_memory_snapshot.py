import pickle

import pytest
import torch

from mcore.observe import ProfilingConfig, memory_snapshot, start_memory_history_recording
from mcore.observe.memory_snapshot import save_snapshot_at_profile_end


@pytest.fixture(autouse=True)
def fresh_process():
    for cached in (memory_snapshot._warn_no_cuda, memory_snapshot._start_recording):
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
    monkeypatch.setattr(memory_snapshot, "process_rank", lambda: rank)


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
    assert "no snapshot in" in caplog.text


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
