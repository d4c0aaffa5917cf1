import math
import random
import statistics

import pytest
import torch

from mcore.observe.straggler.outliers import (
    relative_scores,
    row_extremes,
)
from mcore.observe.straggler.verdict import row_medians

NAN = math.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def median(*values):
    [of_row] = row_medians(tensor(*values).view(1, -1))
    return of_row


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 100, 101])
def test_median_is_that_of_the_statistics_module(num):
    random.seed(num)
    for values in ([random.random() for _ in range(num)], [float(i // 3) for i in range(num)]):
        assert median(*values) == statistics.median(values)


def test_medians_of_the_finite_values_of_each_row():
    rows = [(3.0, NAN, 1.0, 8.0), (math.inf, 4.0, 2.0, -math.inf), (NAN,) * 4, (5.0, 5.0, 5.0, 1.0)]
    medians = row_medians(tensor(*rows))
    assert medians[:2] == [3.0, 3.0]
    assert math.isnan(medians[2])
    assert medians[3] == 5.0
    assert math.isnan(median(NAN))


def test_medians_of_many_values_are_those_of_few():
    """Short rows are sorted by Python, long ones by torch."""
    rows = [(3.0, NAN, 1.0, 8.0), (math.inf, 4.0, 2.0, -math.inf), (5.0, 5.0, 5.0, 1.0)]
    wide = tensor(*rows).repeat(1, 40)
    known = [[value for value in row if math.isfinite(value)] * 40 for row in rows]
    assert row_medians(wide) == [statistics.median(row) for row in known]
    assert math.isnan(median(*[NAN] * 160))


def test_extremes_of_several_rows():
    rows = torch.tensor([[3.0, NAN, 1.0], [NAN, NAN, NAN], [2.0, 2.0, 2.0]])
    (three, nothing, equal) = row_extremes(rows)
    assert three == ((1.0, 2), (3.0, 0))
    assert [place for _, place in nothing] == [-1, -1]
    assert equal == ((2.0, 0), (2.0, 0))


def test_extremes_leave_out_the_infinite():
    rows = tensor((3.0, 1.0, 3.0, NAN, math.inf), (-math.inf,) * 5)
    known, nothing = row_extremes(rows)
    assert known == ((1.0, 1), (3.0, 0))
    assert [place for _, place in nothing] == [-1, -1]


def test_relative_scores_of_one_section_and_of_several():
    scores = relative_scores(tensor(10.0, 16.0, NAN))
    assert scores[:2].tolist() == [1.0, 0.625]
    assert scores[2].isnan()
    both = relative_scores(torch.tensor([[10.0, 16.0], [NAN, 3.0]], dtype=torch.float64))
    assert both[0].tolist() == [1.0, 0.625]
    assert both[1, 0].isnan()
    assert both[1, 1] == 1.0
    assert relative_scores(tensor(NAN, NAN)).isnan().all()
