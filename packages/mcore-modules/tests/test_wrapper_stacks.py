"""Looking into models, and casting, through the wrappers that training puts around them."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mcore.modules import (
    Float16Module,
    ModelType,
    float16_to_fp32,
    fp32_to_float16,
    get_attr_wrapped_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    is_submodule,
    unwrap_model,
)
from rank_testing import run_ranks

CONFIG = SimpleNamespace(bf16=True)


class Trunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = CONFIG
        self.model_type = ModelType.encoder_or_decoder
        self.xattn_needed = True
        self.linear = torch.nn.Linear(4, 4)
        self.seen = None

    def forward(self, x):
        self.seen = x.dtype
        return {"out": self.linear(x).tanh()}


def half(model):
    return Float16Module(CONFIG, model)


def compiled(model):
    return torch.compile(model, backend="eager")


def sharded(model):
    fully_shard(model)
    return model


STACKS = {
    "ddp": (half, DistributedDataParallel),
    "fsdp2": (half, sharded),
    "fsdp2 inside": (sharded, half),
    "compiled": (half, compiled),
    "compiled inside": (compiled, half),
    "compiled, ddp": (half, compiled, DistributedDataParallel),
    "ddp, compiled": (half, DistributedDataParallel, compiled),
    "compiled fsdp2": (half, sharded, compiled),
}


def built(stack):
    torch.manual_seed(0)
    trunk = Trunk()
    model = trunk
    for wrap in STACKS[stack]:
        model = wrap(model)
    return model, trunk


def batch(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def look_and_run(stack):
    """What the wrapped model answers, and one step of it on this rank's batch."""
    model, trunk = built(stack)
    answers = [
        unwrap_model(model) is trunk,
        unwrap_model([model]) == [trunk],
        get_model_config(model) is CONFIG,
        get_model_type(model) is ModelType.encoder_or_decoder,
        get_model_xattn(model) is True,
        get_attr_wrapped_model(model, "linear") is trunk.linear,
        get_attr_wrapped_model(model, "seen", return_model_obj=True) is trunk,
        is_submodule(trunk, model),
        not is_submodule(copy.copy(trunk), model),
    ]
    out = model(batch(dist.get_rank()))["out"]
    out.square().sum().backward()
    grad = whole(trunk.linear.weight.grad)
    return answers, trunk.seen, out.detach(), grad.float()


def look_and_run_all():
    return {stack: look_and_run(stack) for stack in STACKS}


@pytest.fixture(scope="module")
def two_ranks():
    """Return what each rank found, by stack."""
    return run_ranks(look_and_run_all, 2, timeout_s=600)


@pytest.mark.parametrize("stack", STACKS)
def test_two_ranks_find_the_model_and_compute_what_one_process_does(stack, two_ranks):
    results = [rank[stack] for rank in two_ranks]
    torch.manual_seed(0)
    linear = Trunk().linear.bfloat16()
    expected = [linear(batch(rank).bfloat16()).tanh().float() for rank in range(2)]
    for rank, (answers, seen, out, _) in enumerate(results):
        assert all(answers), answers
        assert seen is torch.bfloat16
        assert out.dtype is torch.float32
        assert torch.equal(out, expected[rank])
    is_reduced = "ddp" in stack or "fsdp2" in stack
    for rank, (*_, grad) in enumerate(results):
        losses = expected if is_reduced else expected[rank : rank + 1]
        loss = sum(out.square().sum() for out in losses) / len(losses)
        (reference,) = torch.autograd.grad(loss, linear.weight, retain_graph=True)
        torch.testing.assert_close(grad, reference.float(), rtol=2e-2, atol=2e-2)


def cast_sharded_parameters():
    layer = sharded(torch.nn.Linear(4, 4))
    params = dict(layer.named_parameters())
    low = fp32_to_float16(params, torch.Tensor.bfloat16)
    back = float16_to_fp32(low)
    weight = low["weight"]
    weight.to_local().float().sum().backward()
    return [
        isinstance(weight, DTensor) and weight.dtype is torch.bfloat16,
        weight.placements == layer.weight.placements,
        torch.equal(back["weight"].full_tensor(), whole(layer.weight).bfloat16().float()),
        layer.weight.grad.dtype is torch.float32,
        params["weight"].dtype is torch.float32,
    ]


def test_sharded_parameters_are_cast_where_they_lie():
    assert run_ranks(cast_sharded_parameters, 2, timeout_s=600) == [[True] * 5] * 2
