import math

import pytest
import torch

from mcore.observe import SectionStats
from mcore.observe.straggler.exchange import ENABLED, GatheredRows, encode_row, row_length

NAN = math.nan


def rows_of(world):
    stats = {0: SectionStats(1, 1.0, 1.0, 1.0)}
    row = encode_row(7.0, stats, 2, enabled=True, wanted=True, log_interval=10, total_flops=1e12)
    return row.repeat(world, 1)


def test_row_has_the_documented_places():
    header = {
        "enabled": True,
        "wanted": False,
        "metrics": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
        "log_interval": 10,
        "total_flops": 1e15,
        "dropped": 3,
    }
    stats = {0: SectionStats(2, 9.0, 4.5, 5.0), 2: SectionStats(1, 3.0, 3.0, 3.0)}
    row = encode_row(7.0, stats, 3, **header)
    assert row.dtype == torch.float64
    assert row.numel() == row_length(3) == 16 + 4 * 3
    assert row[:16].tolist() == [1, 7, 1, 0, 0, 1, 2, 3, 4, 5, 6, 8, 10, 1e15, 3, 0]
    assert row[16:20].tolist() == [2, 9.0, 4.5, 5.0]
    assert row[20:22].tolist() == [0, 0.0]
    assert row[22:24].isnan().all()
    assert row[24:].tolist() == [1, 3.0, 3.0, 3.0]
    assert encode_row(7.0, {5: SectionStats(1, 1.0, 1.0, 1.0)}, 2, **header).numel() == 24


def test_row_of_a_rank_without_a_range():
    row = encode_row(7.0, {}, 2, enabled=True, wanted=False)
    assert row[:5].tolist() == [1.0, 7.0, 1.0, 0.0, 1.0]
    assert row[5:12].isnan().all()
    assert row[12:16].tolist() == [0, 0, 0, 0]


def test_metrics_of_the_rows():
    rows = torch.arange(48, dtype=torch.float64).view(2, 24)
    metrics = GatheredRows(rows, (0, 1)).metrics()
    assert metrics.tolist() == [[5.0 + i, 29.0 + i] for i in range(7)]


def test_disagreement_on_the_state_is_found():
    rows = rows_of(3)
    rows[1, 2] = 0.0
    said = GatheredRows(rows, (2, 0, 1))
    assert (said.is_on, said.has_interval) == (False, False)
    assert said.ranks_unlike(ENABLED) == [2, 1]


@pytest.mark.parametrize(("interval", "has_interval"), [(10.0, True), (0.0, False), (NAN, False)])
def test_rank_0_says_whether_there_is_an_interval(interval, has_interval):
    rows = rows_of(2)
    rows[1, 12] = interval
    said = GatheredRows(rows, (1, 0))
    assert (said.is_on, said.has_interval) == (True, has_interval)
    assert said.log_interval == (10 if has_interval else 0)
