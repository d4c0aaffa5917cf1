import math
import pickle
from decimal import Decimal

import pytest
import torch

from mcore.modules import (
    init_method_normal,
    mup_scaled_init_method_normal,
    scaled_init_method_normal,
)


@pytest.mark.parametrize(
    ("method", "std"),
    [
        (init_method_normal(0.02), 0.02),
        (scaled_init_method_normal(0.02, 8), 0.005),
        (scaled_init_method_normal(0.02, 4, 1), 0.01),
        (mup_scaled_init_method_normal(0.02, 8, 4.0), 0.0025),
        (mup_scaled_init_method_normal(0.02, 4, 4.0, 1.0), 0.005),
        (init_method_normal(0), 0.0),
    ],
)
def test_standard_deviation(method, std):
    assert method.keywords == {"mean": 0.0, "std": pytest.approx(std)}
    assert pickle.loads(pickle.dumps(method)).keywords == method.keywords


def test_samples_follow_the_distribution():
    torch.manual_seed(0)
    samples = init_method_normal(0.02)(torch.empty(1_000_000))
    assert abs(samples.mean().item()) < 1e-4
    assert samples.std().item() == pytest.approx(0.02, rel=0.01)


def test_tensor_is_filled_in_place_and_returned():
    weight = torch.nn.Parameter(torch.zeros(3))
    assert init_method_normal(1.0)(weight) is weight
    assert (weight != 0).all()


def test_same_seed_gives_the_numbers_of_torch():
    torch.manual_seed(3)
    ours = init_method_normal(0.5)(torch.empty(4))
    torch.manual_seed(3)
    assert torch.equal(ours, torch.nn.init.normal_(torch.empty(4), 0.0, 0.5))


def test_empty_and_meta_tensors():
    assert init_method_normal(1.0)(torch.empty(0, 2)).shape == (0, 2)
    assert init_method_normal(1.0)(torch.empty(2, device="meta")).is_meta


@pytest.mark.parametrize("sigma", [-1, math.nan, math.inf, "0.02", None, True, Decimal("0.1"), 1j])
def test_bad_sigma_is_refused_at_creation(sigma):
    for make in (
        lambda: init_method_normal(sigma),
        lambda: scaled_init_method_normal(sigma, 1),
        lambda: mup_scaled_init_method_normal(sigma, 1, 1.0),
    ):
        with pytest.raises(ValueError, match="sigma"):
            make()


@pytest.mark.parametrize("num_layers", [0, -1, 1.5, True, None])
def test_bad_number_of_layers_is_refused(num_layers):
    with pytest.raises(ValueError, match="num_layers"):
        scaled_init_method_normal(0.02, num_layers)


@pytest.mark.parametrize("number", [0, -1, math.nan, "2"])
def test_bad_factors_are_refused(number):
    with pytest.raises(ValueError, match="multiplier"):
        scaled_init_method_normal(0.02, 1, number)
    with pytest.raises(ValueError, match="width_mult"):
        mup_scaled_init_method_normal(0.02, 1, number)
