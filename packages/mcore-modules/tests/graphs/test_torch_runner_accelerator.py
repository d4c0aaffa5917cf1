"""Graphs of TorchGraphRunner on the stand-in accelerator, whose captures have the rules of CUDA."""

import pytest
import torch

from mcore.modules.graphs import GraphSpec, TorchGraphRunner


@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_is_captured_on_its_device_whichever_is_current(accelerator, index):
    if torch.accelerator.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    device = torch.device(accelerator.type, index)
    layer = torch.nn.Linear(4, 4).to(device)
    sample = torch.ones(2, 4, device=device, requires_grad=True)
    with torch.accelerator.device_index(1 - index):
        [graph] = TorchGraphRunner().capture([GraphSpec(layer, layer.forward, (sample,))])
    for value in (2.0, 5.0):
        inputs = [torch.full((2, 4), value, device=device, requires_grad=True) for _ in range(2)]
        layer.zero_grad()
        graph(inputs[0]).square().sum().backward()
        weight_grad = layer.weight.grad.clone()
        layer.zero_grad()
        layer(inputs[1]).square().sum().backward()
        assert torch.equal(inputs[0].grad.cpu(), inputs[1].grad.cpu())
        assert torch.equal(weight_grad.cpu(), layer.weight.grad.cpu())
