import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mcore.observe.shard_sums import squares_of_each, sum_of_squares

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-100, 100), max_size=20), st.sampled_from(range(len(DTYPES)))
        ),
        min_size=1,
        max_size=12,
    )
)
def test_mixed_types_and_sizes_in_any_order(specification):
    tensors = [torch.tensor(values, dtype=DTYPES[kind]) for values, kind in specification]
    expected = [sum(value * value for value in values) for values, _ in specification]
    assert squares_of_each(tensors).tolist() == pytest.approx(expected, rel=1e-5)
    assert sum_of_squares(tensors).item() == pytest.approx(sum(expected), rel=1e-5)


def test_no_tensors():
    assert sum_of_squares([]).item() == 0.0


def test_the_same_tensor_twice_counts_twice():
    tensor = torch.tensor([3.0])
    assert squares_of_each([tensor, tensor]).tolist() == [9.0, 9.0]
    assert sum_of_squares([tensor, tensor]).item() == pytest.approx(18.0)
