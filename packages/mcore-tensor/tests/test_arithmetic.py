from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.tensor import (
    DivisibilityError,
    divide,
    ensure_divisibility,
    maybe_cat,
    round_up_to_nearest_multiple,
)

integers = st.integers(-(2**70), 2**70)


@pytest.mark.parametrize(
    ("numerator", "denominator", "quotient"),
    [(8, 2, 4), (-4, 2, -2), (0, 3, 0), (2**60, 2**30, 2**30), (6, -3, -2)],
)
def test_divide_gives_the_exact_quotient(numerator, denominator, quotient):
    assert divide(numerator, denominator) == quotient
    assert ensure_divisibility(numerator, denominator) is None


@pytest.mark.parametrize("caught_as", [ValueError, AssertionError, DivisibilityError])
@pytest.mark.parametrize("function", [divide, ensure_divisibility])
def test_a_remainder_is_caught_as_either_error(function, caught_as):
    with pytest.raises(caught_as, match=r"^4 is not divisible by 5$"):
        function(4, 5)


@pytest.mark.parametrize("function", [divide, ensure_divisibility])
def test_division_by_zero(function):
    with pytest.raises(ZeroDivisionError):
        function(4, 0)


@pytest.mark.parametrize("function", [divide, ensure_divisibility])
@pytest.mark.parametrize(("numerator", "denominator"), [(4.0, 2), (4, 2.0), ("4", 2), (None, 2)])
def test_what_is_no_integer_is_refused(function, numerator, denominator):
    with pytest.raises(TypeError, match="must be an integer"):
        function(numerator, denominator)


def test_a_tensor_is_refused_since_it_would_have_to_be_read():
    with pytest.raises(TypeError, match="numerator must be an integer, got Tensor"):
        divide(torch.tensor(4), 2)


def test_numpy_integers_are_integers():
    quotient = divide(np.int64(12), np.int32(4))
    assert quotient == 3
    assert type(quotient) is int


@settings(deadline=None)
@given(integers, integers.filter(bool))
def test_divide_agrees_with_fractions(numerator, denominator):
    exact = Fraction(numerator, denominator)
    if exact.denominator == 1:
        assert divide(numerator, denominator) == exact
    else:
        with pytest.raises(DivisibilityError):
            divide(numerator, denominator)


@pytest.mark.parametrize(
    ("value", "multiple", "expected"),
    [
        (2**53 + 1, 1, 2**53 + 1),
        (2**53 + 1, 2, 2**53 + 2),
        (0, 8, 0),
        (1, 8, 8),
        (8, 8, 8),
        (-9, 8, -8),
    ],
)
def test_round_up(value, multiple, expected):
    assert round_up_to_nearest_multiple(value, multiple) == expected


@settings(deadline=None)
@given(integers, st.integers(1, 2**70))
def test_round_up_is_the_smallest_multiple_not_below(value, multiple):
    rounded = round_up_to_nearest_multiple(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


@pytest.mark.parametrize("multiple", [0, -2])
def test_round_up_needs_a_positive_multiple(multiple):
    with pytest.raises(ValueError, match="multiple must be positive"):
        round_up_to_nearest_multiple(3, multiple)


def test_round_up_refuses_floats():
    with pytest.raises(TypeError, match="value must be an integer, got float"):
        round_up_to_nearest_multiple(3.0, 2)


def test_maybe_cat_of_two():
    first, second = torch.ones(2, 3), torch.zeros(2, 1)
    assert torch.equal(maybe_cat(first, second, dim=1), torch.cat((first, second), 1))
    assert torch.equal(maybe_cat(torch.ones(1), torch.zeros(2)), torch.tensor([1.0, 0.0, 0.0]))


def test_maybe_cat_of_one_is_that_very_tensor():
    tensor = torch.ones(3)
    assert maybe_cat(None, tensor) is tensor
    assert maybe_cat(tensor, None) is tensor
    assert maybe_cat(tensor, None, required=True) is tensor


def test_maybe_cat_of_none():
    assert maybe_cat(None, None) is None
    with pytest.raises(ValueError, match="both None"):
        maybe_cat(None, None, required=True)


def test_maybe_cat_counts_an_empty_tensor_as_given():
    empty = torch.empty(0)
    assert maybe_cat(empty, None) is empty
    joined = maybe_cat(empty, torch.ones(2))
    assert joined.tolist() == [1.0, 1.0]
    assert joined is not empty


def test_maybe_cat_promotes_and_fails_like_cat():
    assert maybe_cat(torch.ones(1, dtype=torch.half), torch.ones(1)).dtype == torch.float32
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        maybe_cat(torch.ones(2, 3), torch.ones(3, 3), dim=1)


def test_small_helpers_compile_with_symbolic_sizes():
    def cut(x, y):
        half = divide(x.shape[0], 2)
        padded = round_up_to_nearest_multiple(x.shape[0], 8)
        return maybe_cat(x[:half], y), padded

    compiled = torch.compile(cut, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (6, 10, 12):
        x, y = torch.arange(float(size)), torch.ones(2)
        expected, expected_padded = cut(x, y)
        result, padded = compiled(x, y)
        assert torch.equal(result, expected)
        assert padded == expected_padded


def test_a_symbolic_size_stays_symbolic():
    from torch.fx.experimental.proxy_tensor import make_fx

    def halves(x):
        return x.new_zeros(divide(x.shape[0], 2))

    graph = make_fx(halves, tracing_mode="symbolic")(torch.ones(6))
    assert graph(torch.ones(10)).shape == (5,)
