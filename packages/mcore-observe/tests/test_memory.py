import torch

from mcore.observe import MEMORY_KEYS, MEMORY_KEYS_TABLE, report_memory


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


def test_the_process_where_there_is_no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    before = report_memory(None)
    assert list(before) == ["mem-host-rss-gigabytes", "mem-max-host-rss-gigabytes"]
    assert 0 < before["mem-host-rss-gigabytes"] <= before["mem-max-host-rss-gigabytes"]
    held = torch.ones(50_000_000)  # 0.2 GB that are touched
    grown = report_memory(None)["mem-host-rss-gigabytes"] - before["mem-host-rss-gigabytes"]
    assert 0.15 < grown < 0.35
    assert held.numel() == 50_000_000
    assert report_memory({"allocated_bytes.all.current": "a"}) == {}
