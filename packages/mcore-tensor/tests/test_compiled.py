"""What the README says of ``torch.compile(fullgraph=True)``, beside buffers and views."""

import math

import pytest
import torch

from mcore.tensor import calc_norm, local_multi_tensor_l2_norm, local_multi_tensor_scale


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_any_length(dtype):
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 4097, 40_000)
    tensors = [torch.randn(length, generator=generator).to(dtype) for length in lengths]
    tensors += [torch.full((40_000,), 1.7, dtype=dtype), torch.ones(300, 200, dtype=dtype).t()]
    flag = torch.zeros(1, dtype=torch.int)

    @compiled
    def norms(tensors):
        each = local_multi_tensor_l2_norm(1, flag, [tensors], True)
        return *each, local_multi_tensor_l2_norm(1, flag, [tensors], False)[0], calc_norm(tensors)

    exact = torch.stack([tensor.double().norm() for tensor in tensors])
    for scale in (1, 2):
        norm, each, together, mixed = norms([tensor * scale for tensor in tensors])
        for found in (norm, together, mixed):
            assert found.item() == pytest.approx(exact.norm().item() * scale, rel=2e-6)
        assert ((each / scale - exact) / exact).abs().max() < 2e-6
    assert flag.item() == 0
    norms([*tensors[:-1], tensors[-1] * math.inf])
    assert flag.item() == 1


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 0.3), (torch.bfloat16, torch.tensor(0.3))]
)
def test_scale(dtype, factor):
    flag = torch.zeros(1, dtype=torch.int)

    @compiled
    def scale(source, destination, own):
        lists = [[source, own], [destination, own]]
        local_multi_tensor_scale(1, flag, lists, factor)

    for length in (5, 70_000):
        source, own = torch.randn(length), torch.randn(length)
        expected = (source * factor).to(dtype), own * factor
        destination = torch.empty(length, dtype=dtype)
        scale(source, destination, own)
        assert torch.equal(destination, expected[0])
        assert torch.equal(own, expected[1])
        assert flag.item() == 0
    source[-1] = math.nan
    scale(source, destination, own)
    assert flag.item() == 1


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_scale_accepts_any_two_iterables(kind):
    @compiled
    def scale(sources, destinations):
        local_multi_tensor_scale(1, None, [kind(sources), kind(destinations)], 0.5)

    destinations = [torch.zeros(3), torch.zeros(2)]
    scale([torch.ones(3), torch.ones(2)], destinations)
    assert [tensor.tolist() for tensor in destinations] == [[0.5] * 3, [0.5] * 2]


class HalveBoth(torch.nn.Module):
    def forward(self, x, y):
        halves = [torch.zeros_like(x), torch.zeros_like(y)]
        local_multi_tensor_scale(1, None, [[x, y], halves], 0.5)
        return halves


def test_an_exported_scale_accepts_every_length_that_it_states():
    sizes = {0: torch.export.Dim.AUTO}
    samples = (torch.ones(5), torch.ones(12))
    exported = torch.export.export(HalveBoth(), samples, dynamic_shapes=(sizes, sizes))
    limits = [int(limit.upper) for limit in exported.range_constraints.values()]
    assert len(limits) == 2
    for length in limits:
        halves = exported.module()(torch.ones(length), torch.ones(3))
        assert [bool((half == 0.5).all()) for half in halves] == [True, True]


def test_scale_of_float64_keeps_its_bits():
    flag = torch.zeros(1, dtype=torch.int)
    source = torch.randn(1000, dtype=torch.float64)
    destination = torch.empty_like(source)

    @compiled
    def scale(source, destination):
        local_multi_tensor_scale(1, flag, [[source], [destination]], 1 / 3)

    scale(source, destination)
    assert torch.equal(destination, source * (1 / 3))  # in float32 7 digits would be left
    assert flag.item() == 0
