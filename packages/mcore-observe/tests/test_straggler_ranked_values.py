import math
from dataclasses import fields

import pytest

from mcore.observe import _StragglerData, _ValueWithRank


def test_text_and_call():
    value = _ValueWithRank(48.126, 3, "ms")
    assert str(value) == "48.13ms/3"
    assert value() == (48.126, 3, "ms")
    assert str(_ValueWithRank(math.nan, -1, "W")) == "nanW/-1"
    assert _ValueWithRank(1.0, 2)() == (1.0, 2, "")


def test_order_looks_at_values_alone():
    low, high = _ValueWithRank(1.0, 9, "W"), _ValueWithRank(2.0, 0, "C")
    assert low < high
    assert high > low
    assert low <= _ValueWithRank(1.0, 0)
    assert low >= _ValueWithRank(1.0, 0)
    assert not low > _ValueWithRank(1.0, 0)
    assert sorted([high, low]) == [low, high]


def test_equality_looks_at_all_three():
    value = _ValueWithRank(1.0, 2, "ms")
    assert value == _ValueWithRank(1.0, 2, "ms")
    assert hash(value) == hash(_ValueWithRank(1.0, 2, "ms"))
    for other in (_ValueWithRank(1.5, 2, "ms"), _ValueWithRank(1.0, 3, "ms"), 1.0):
        assert value != other
    assert value != _ValueWithRank(1.0, 2, "W")


@pytest.mark.parametrize(
    ("name", "unit"),
    [("elapsed", "ms"), ("btime", "ms"), ("temp", "C"), ("power", "W"), ("util", "%"),
     ("clock", "MHz")],
)  # fmt: skip
def test_extremes_start_as_nobody(name, unit):
    for side in ("min", "max"):
        assert str(getattr(_StragglerData(), f"{side}_{name}")) == f"nan{unit}/-1"


def test_extremes_belong_to_the_instance():
    one, other = _StragglerData(), _StragglerData()
    one.min_temp = _ValueWithRank(50.0, 1, "C")
    assert math.isnan(other.min_temp()[0])
    assert len(fields(_StragglerData)) == 13
    assert one.aflops is None
