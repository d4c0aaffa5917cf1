"""The encoding of doubles against their own order and bits."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore.parallel.reductions import decode_double, encode_double, encode_double_tensor

NAN = math.nan
INF = math.inf
DOUBLES = st.floats(width=64, allow_nan=True)


def same(first: float | None, second: float | None) -> bool:
    """Equal bits, where all NaN are one."""
    if first is None or second is None:
        return first is second
    bits = struct.pack("<d", first) == struct.pack("<d", second)
    return bits or (math.isnan(first) and math.isnan(second))


@settings(max_examples=400, deadline=None)
@given(DOUBLES, DOUBLES)
@example(-0.0, 0.0)
@example(INF, NAN)
@example(-INF, -1.7976931348623157e308)
def test_encoding_keeps_the_order_of_doubles(first: float, second: float) -> None:
    low, high = encode_double(first), encode_double(second)
    for code in (low, high):
        assert -(2**63) < code < 2**63
    if first < second:
        assert low < high
    if math.isnan(second) and not math.isnan(first):
        assert low < high
    assert encode_double(None) < low
    assert (low == high) == same(first, second)


@settings(deadline=None)
@given(DOUBLES | st.none())
def test_decoding_gives_back_every_bit(value: float | None) -> None:
    assert same(decode_double(encode_double(value)), value)


@settings(deadline=None)
@given(DOUBLES)
def test_tensors_are_encoded_like_floats(value: float) -> None:
    double = torch.tensor(value, dtype=torch.float64)
    assert encode_double_tensor(double).item() == encode_double(value)
    single = double.float()
    assert encode_double_tensor(single).item() == encode_double(single.item())


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j), torch.zeros(0)], ids=str)
def test_only_one_real_element_can_be_encoded(value: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="one element"):
        encode_double_tensor(value)
