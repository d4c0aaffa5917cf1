import math
import random
import statistics

import pytest
import torch

from mcore.observe.straggler.statistics import (
    center_and_spread,
    extremes,
    finite_part,
    median,
    relative_scores,
    robust_spread,
)

NAN = math.nan


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_z_of_the_documented_examples():
    def z_of(*values):
        values = tensor(*values)
        center = median(values)
        spread = robust_spread(values, center)
        return center, [round(float(value - center) / spread, 2) for value in values]

    assert z_of(100, 101, 99, 100, 150) == (100.0, [0.0, 0.67, -0.67, 0.0, 33.72])
    assert z_of(10, 10, 10, 10) == (10.0, [0.0] * 4)
    assert z_of(10, 10, 10, 10.5) == (10.0, [0.0, 0.0, 0.0, 5.0])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 100, 101])
def test_median_is_that_of_the_statistics_module(num):
    random.seed(num)
    for values in ([random.random() for _ in range(num)], [float(i // 3) for i in range(num)]):
        assert median(tensor(*values)) == statistics.median(values)


def test_median_of_nothing():
    assert math.isnan(median(torch.empty(0)))
    assert finite_part(torch.tensor([NAN, math.inf, 1.0])).tolist() == [1.0]


def test_spread_is_known_where_a_value_may_stand_out():
    values = tensor(100.0, 101.0, 99.0, 100.0, 150.0)
    assert center_and_spread(values, side=1, min_z=3.5) == (100.0, 1.4826)
    assert center_and_spread(values, side=-1, min_z=3.5) == (100.0, 0.0)
    center, spread = center_and_spread(tensor(NAN, NAN), side=1, min_z=3.5)
    assert math.isnan(center)
    assert spread == 0.0


def test_extremes_of_several_rows():
    rows = torch.tensor([[3.0, NAN, 1.0], [NAN, NAN, NAN], [2.0, 2.0, 2.0]])
    (three, nothing, equal) = extremes(rows, torch.tensor([0, 1, 2]))
    assert three == ((1.0, 2), (3.0, 0))
    assert [rank for _, rank in nothing] == [-1, -1]
    assert equal == ((2.0, 0), (2.0, 0))


def test_extremes_without_the_infinite_and_in_any_order_of_ranks():
    [known] = extremes(
        tensor(3.0, 1.0, 3.0, NAN, math.inf).view(1, 5), torch.tensor([4, 3, 2, 1, 0])
    )
    assert known == ((1.0, 3), (3.0, 2))
    assert extremes(tensor(math.inf).view(1, 1), torch.tensor([0]))[0][0][1] == -1


def test_relative_scores_of_one_section_and_of_several():
    scores = relative_scores(tensor(10.0, 16.0, NAN))
    assert scores[:2].tolist() == [1.0, 0.625]
    assert scores[2].isnan()
    both = relative_scores(torch.tensor([[10.0, 16.0], [NAN, 3.0]], dtype=torch.float64))
    assert both[0].tolist() == [1.0, 0.625]
    assert both[1, 0].isnan()
    assert both[1, 1] == 1.0
    assert relative_scores(tensor(NAN, NAN)).isnan().all()
