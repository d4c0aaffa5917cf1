"""Scalars on the stand-in accelerator: one transfer, few launches."""

import pytest
import torch

from mcore.observe.sinks.scalars import read_scalars
from standin import launches, recorded

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[:1]])
def test_launches_and_transfers_of_thirty_scalars(accelerator, dtypes):
    values = {
        number: torch.full((), number, dtype=dtypes[number % len(dtypes)], device=accelerator)
        for number in range(30)
    }
    with recorded() as record, launches(at_most=6):
        numbers = read_scalars(values)
    assert list(numbers.items()) == [(number, number) for number in range(30)]
    assert [type(number) for number in numbers.values()] == [
        float if value.is_floating_point() else int for value in values.values()
    ]
    assert record.waits.total() == (accelerator.type == "standin")  # a GPU counts none


def test_large_integers_of_a_device_stay_exact(accelerator):
    values = {"a": torch.tensor(2**40 + 1), "b": torch.tensor(0.5), "c": torch.tensor(True)}
    found = read_scalars({name: value.to(accelerator) for name, value in values.items()})
    assert found == {"a": 2**40 + 1, "b": 0.5, "c": 1}
