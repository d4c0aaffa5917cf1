"""Tensors of two devices in one op are refused as on CUDA, and their legal counterparts work."""

import gc

import pytest
import torch

from standin import no_host_waits, recorded, switched_on

MIXED = "Expected all tensors to be on the same device"


def two(accelerator):
    return torch.arange(4.0, device=accelerator), torch.arange(4.0)


REFUSED = {
    "add": lambda d, c: d + c,
    "in place": lambda d, c: d.add_(c),
    "other device": lambda d, c: d + c.to("standin:1"),
    "number of the other device": lambda d, c: d + c.sum().to("standin:1"),
    "number of the device": lambda d, c: c + d.sum(),
    "cat": lambda d, c: torch.cat([d, c]),
    "cat with a number": lambda d, c: torch.stack([d.sum(), c.sum()]),
    "result on the CPU": lambda d, c: torch.add(d, d, out=c),
    "where": lambda d, c: torch.where(d > 1, d, c),
    "foreach": lambda d, c: torch._foreach_add_([d], [c]),
    "foreach with a number": lambda d, c: torch._foreach_mul_([d], torch.tensor(2.0)),
    "index of the device": lambda d, c: c[d.long()],
    "values of index_put": lambda d, c: d.index_put_((d.long(),), c),
}


@pytest.mark.parametrize("op", REFUSED.values(), ids=REFUSED)
def test_tensors_of_two_devices_are_refused(accelerator, op):
    device, host = two(accelerator)
    with pytest.raises((RuntimeError, IndexError), match=f"{MIXED}|indices should be either on"):
        op(device, host)


LEGAL = {
    "number": lambda d, c: d * c[3],
    "number first": lambda d, c: c[3] - d,
    "where with a number": lambda d, c: torch.where(d > 1, d, c[3]),
    "masked_fill": lambda d, c: d.masked_fill(d > 1, c[3]),
    "index of the CPU": lambda d, c: d[c.long().flip(0)],
    "mask of the CPU": lambda d, c: d[c > 1],
    "index_put of a number": lambda d, c: d.index_put_((c.long(),), c[3]),
    "copy": lambda d, c: d.copy_(c),
    "foreach copy": lambda d, c: torch._foreach_copy_([d], [c])[0],
    "foreach by places": lambda d, c: torch._foreach_add([d, c], [d, c])[0],
    "to": lambda d, c: c.to(d),
    "other device": lambda d, c: (d.to("standin:1") * 2).to(d.device),
}


@pytest.mark.parametrize("op", LEGAL.values(), ids=LEGAL)
def test_what_cuda_permits_gives_the_numbers_of_the_cpu(accelerator, op):
    device, host = two(accelerator)
    result = op(device, host)
    assert result.device == accelerator
    assert torch.equal(result.cpu(), op(host.clone(), host.clone()).float().cpu())


def test_fused_adamw_refuses_step_counters_on_the_cpu(accelerator):
    weight = torch.ones(3, device=accelerator, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    assert optimizer.state[weight]["step"].device == accelerator
    optimizer.state[weight]["step"] = torch.ones(())
    with pytest.raises(RuntimeError, match=MIXED):
        optimizer.step()


def test_a_hook_of_backward_is_on_the_device_and_may_select_another(accelerator):
    found, weight = [], torch.ones(2, device="standin:1", requires_grad=True)

    def hook(_):
        with torch.accelerator.device_index(0):
            found.append(torch.accelerator.current_device_index())
        found.append(torch.accelerator.current_device_index())

    weight.register_hook(hook)
    weight.sum().backward()
    assert found == [0, 1]


@pytest.mark.parametrize("index", [0, 1])
def test_gradients_are_those_of_the_cpu_on_each_device(accelerator, index):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    inputs, weights = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    (layer(inputs) * weights).sum().backward()
    wanted = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    place = torch.device("standin", index)
    loss = (layer.to(place)(inputs.to(place)) * weights.to(place)).sum()
    with no_host_waits(), recorded() as record:
        loss.backward()
    assert record.ops
    for parameter, grad in zip(layer.parameters(), wanted, strict=True):
        assert parameter.grad.device == place
        assert torch.equal(parameter.grad.cpu(), grad)


def test_each_device_draws_from_its_generator(accelerator):
    host = torch.rand(6, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    named = torch.Generator(accelerator).manual_seed(5)
    places = [{"device": name} for name in ("standin:0", "standin:1")]
    places += [{"device": accelerator, "generator": named}, {}]
    for part in (host[:3], host[3:]):
        for place in places:
            assert torch.equal(torch.rand(3, **place).cpu(), part)
    dropped = torch.nn.functional.dropout(torch.ones(64, device=named.device))
    assert 0 < int((dropped == 0).sum()) < 64


def test_the_accelerator_is_the_stand_in_until_the_end():
    for _ in range(2):
        assert not torch.accelerator.is_available()
        with switched_on() as device:
            assert torch.accelerator.device_count() == 2
            with torch.accelerator.device_index(1):
                assert torch.empty(1, device="standin").device == torch.device("standin", 1)
            assert torch.accelerator.current_device_index() == device.index == 0
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                torch.get_device_module("standin").set_device(7)


def test_memory_is_counted(accelerator):
    gc.collect()
    before = torch.accelerator.memory_stats()["allocated_bytes.all.current"]
    held = [torch.empty(1000, device=accelerator)]
    for num_bytes in (4000, 0):
        after = torch.accelerator.memory_stats()
        assert after["allocated_bytes.all.current"] - before == num_bytes
        assert after["allocated_bytes.all.peak"] >= before + 4000
        held.clear()


def test_resizes_and_results_that_grow(accelerator):
    grown = torch.empty(0, device=accelerator)
    torch.add(torch.ones(3, device=accelerator), 1, out=grown)
    assert grown.device == accelerator
    assert grown.tolist() == [2.0] * 3
    held = torch.arange(2.0, device=accelerator)
    held.resize_(4)
    assert held.shape == (4,)
    assert held[:2].tolist() == [0.0, 1.0]


IN_PLACE = {
    "one": lambda x, y: x.add_(y),
    "list": lambda x, y: torch._foreach_add_([x], [y]),
    "copies": lambda x, y: torch._foreach_copy_([x], [y]),
    "numbers": lambda x, y: torch._foreach_mul_([x], 2.0),
}


@pytest.mark.parametrize("op", IN_PLACE.values(), ids=IN_PLACE)
def test_changes_in_place_are_seen_by_autograd(device, op):
    changed, other = torch.ones(3, device=device), torch.ones(3, device=device)
    weight = torch.ones(3, device=device, requires_grad=True)
    product = (weight * changed).sum()
    op(changed, other)
    assert changed._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
