"""torch's fully_shard over submeshes of the index trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mcore.parallel import FSDPDistributedIndex, make_sharded_tensor_for_checkpoint
from mcore.parallel.checkpoint import load_sharded_state_dict, save_sharded_state_dict
from mcore.parallel.torch_compat import can_order_ranks
from rank_testing import run_ranks

ROWS, WIDTH, MAX_NORM = 8, 6, 0.05
HYBRID = ("dp_outer", "dp_shard")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = range(1, 5)
Losses = list[tuple[float, float]]


class Net(torch.nn.Module):
    """Two layers in float64; the rows of the second one do not divide by two or four."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 8, dtype=torch.float64)
        self.down = torch.nn.Linear(8, 3, dtype=torch.float64)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(rows)))


class Trainer:
    """Trains on one of several equal parts of each batch."""

    def __init__(self, model: Net, part: int = 0, parts: int = 1) -> None:
        self.model = model
        self.part, self.parts = part, parts
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for parameter in model.parameters():
            zeros = {name: torch.zeros_like(parameter.detach()) for name in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.zeros(()), **zeros}

    def step(self, number: int) -> tuple[torch.Tensor, float]:
        """Return the loss of this part before the update, and the norm of all gradients."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        rows = batch.chunk(self.parts)[self.part].to(self.model.up.weight.device)
        loss = self.model(rows).square().mean()
        loss.backward()
        norm = self.clip(list(self.model.parameters()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), float(norm)

    def clip(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and both moments of each, by name."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"param.{name}"] = parameter.detach()
            for moment in MOMENTS:
                found[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        return found


class WholeGradientTrainer(Trainer):
    """Takes the norm of gathered gradients: of a mesh with tp first, torch cannot reduce it."""

    def clip(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        gradients = [parameter.grad for parameter in parameters]
        whole = [g.full_tensor() for g in gradients if isinstance(g, DTensor)]
        norm = torch.nn.utils.get_total_norm(whole)
        torch.nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)
        return norm


def one_process() -> Losses:
    """Loss and gradient norm of every step in plain PyTorch."""
    trainer = Trainer(Net())
    return [(float(loss), norm) for loss, norm in (trainer.step(number) for number in STEPS)]


def require_equal(found: list[Losses]) -> None:
    """All ranks have the losses and norms of one process, to the rounding of float64."""
    expected = one_process()
    assert len({loss for loss, _ in expected}) == len(STEPS)
    assert min(norm for _, norm in expected) > 2 * MAX_NORM  # clipping takes part
    for losses in found:
        flat = [number for pair in losses for number in pair]
        assert flat == pytest.approx([number for pair in expected for number in pair], rel=1e-12)


def sharded_trainer(
    index: FSDPDistributedIndex, mesh: DeviceMesh, model: Net, kind: type[Trainer] = Trainer
) -> Trainer:
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    group = index.get_dp_group()
    return kind(model, group.rank(), group.size())


def train(trainer: Trainer, group: dist.ProcessGroup, numbers: range = STEPS) -> Losses:
    found = []
    for number in numbers:
        loss, norm = trainer.step(number)
        dist.all_reduce(loss, group=group)
        found.append((float(loss) / group.size(), norm))
    return found


def hybrid_index(sizes: tuple[int, int], **more: Any) -> FSDPDistributedIndex:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, sizes, HYBRID)
    group = mesh._flatten("hsdp").get_group()
    return FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=group, **more)


# Every function below runs on four ranks.


def full_shard() -> Losses:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "tp"))
    index = FSDPDistributedIndex(mesh, "dp_shard", tp_dim="tp")
    trainer = sharded_trainer(index, index.get_submesh("dp_shard"), Net())
    weight = trainer.model.up.weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (2, WIDTH)
    return train(trainer, index.get_dp_group())


def hybrid() -> Losses:
    index = hybrid_index((2, 2))
    trainer = sharded_trainer(index, index.get_submesh(HYBRID), Net())
    weight = trainer.model.up.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.to_local().shape == (4, WIDTH)
    return train(trainer, index.get_dp_group())


def full_shard_hybrid() -> Losses:
    index = hybrid_index((2, 2), hsdp_outer_dp_shard=True)
    inner_major = dist.new_group([0, 2, 1, 3], sort_ranks=False)
    mesh = DeviceMesh.from_group(inner_major, "cpu", mesh_dim_names=("hybrid",))
    trainer = sharded_trainer(index, mesh, Net())
    part = index.get_logical_hybrid_fsdp_rank()
    weight = trainer.model.up.weight
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.to_local(), Net().up.weight.chunk(4)[part])
    return train(trainer, index.get_dp_group())


def flattened_shards() -> Losses:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (2, 2, 1), ("dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    index = FSDPDistributedIndex(mesh, "dp_cp", tp_dim="tp")
    trainer = sharded_trainer(index, index.get_submesh("dp_cp"), Net())
    return train(trainer, index.get_dp_group())


def with_tensor_parallelism(names: tuple[str, str]) -> Losses:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    index = FSDPDistributedIndex(mesh, "dp_shard", tp_dim="tp")
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, index.get_submesh("tp"), plan)
    kind = Trainer if names == ("dp_shard", "tp") else WholeGradientTrainer
    trainer = sharded_trainer(index, index.get_submesh("dp_shard"), model, kind)
    return train(trainer, index.get_dp_group())


def save_after_two_steps(folder: str) -> Losses:
    index = hybrid_index((2, 2))
    trainer = sharded_trainer(index, index.get_submesh(HYBRID), Net())
    losses = train(trainer, index.get_dp_group(), STEPS[:2])
    save_sharded_state_dict(described(trainer), folder)
    return losses


def described(trainer: Trainer) -> dict[str, Any]:
    tensors = trainer.tensors().items()
    return {name: make_sharded_tensor_for_checkpoint(tensor, name) for name, tensor in tensors}


def go_on(trainer: Trainer, folder: str) -> None:
    load_sharded_state_dict(described(trainer), folder)
    for state in trainer.optimizer.state.values():
        state["step"].fill_(len(STEPS[:2]))


WORKERS: dict[str, Callable[[], Losses]] = {
    "full_shard": full_shard,
    "hybrid": hybrid,
    "full_shard_hybrid": full_shard_hybrid,
    "flattened_shards": flattened_shards,
    "dp_shard, tp": lambda: with_tensor_parallelism(("dp_shard", "tp")),
    "tp, dp_shard": lambda: with_tensor_parallelism(("tp", "dp_shard")),
}


def work(names: list[str], folder: str) -> dict[str, Losses]:
    """Save one checkpoint, and return the losses before it and those of each worker."""
    before = {"until the checkpoint": save_after_two_steps(folder)}
    return before | {name: WORKERS[name]() for name in names}


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Losses]], str]:
    """The losses of all ranks, and the folder of their checkpoint."""
    folder = str(tmp_path_factory.mktemp("fsdp2") / "step_2")
    names = [name for name in WORKERS if name != "full_shard_hybrid" or can_order_ranks()]
    return run_ranks(work, 4, names, folder), folder


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(name, marks=[pytest.mark.ordered_ranks] * (name == "full_shard_hybrid"))
        for name in WORKERS
    ],
)
def test_losses_and_norms_are_those_of_one_process(worked, worker: str) -> None:
    require_equal([losses[worker] for losses in worked[0]])


def hybrid_on_one_gpu() -> Losses:
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=HYBRID)
    index = FSDPDistributedIndex(
        mesh, "dp_shard", "dp_outer", hybrid_fsdp_group=mesh._flatten("hsdp")
    )
    model = Net().to("cuda")
    return train(sharded_trainer(index, index.get_submesh(HYBRID), model), index.get_dp_group())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="checks a mesh of nccl groups")
def test_losses_and_norms_on_a_gpu() -> None:
    require_equal(run_ranks(hybrid_on_one_gpu, 1, init="cuda:nccl"))


def load_and_go_on(folder: str, sizes: tuple[int, int]) -> Losses:
    index = hybrid_index(sizes)
    trainer = sharded_trainer(index, index.get_submesh(HYBRID), Net())
    with torch.no_grad():
        for tensor in trainer.tensors().values():
            tensor.fill_(float("nan"))
    go_on(trainer, folder)
    return train(trainer, index.get_dp_group(), STEPS[2:])


def load_in_other_layouts(folder: str) -> list[Losses]:
    return [load_and_go_on(folder, sizes) for sizes in ((1, 4), (4, 1))]


def test_a_hybrid_checkpoint_goes_on_in_other_layouts_and_in_one_process(worked) -> None:
    ranks, folder = worked
    before = [losses["until the checkpoint"] for losses in ranks]
    for after in zip(*run_ranks(load_in_other_layouts, 4, folder), strict=True):
        require_equal([first + second for first, second in zip(before, after, strict=True)])
    alone = Trainer(Net())
    go_on(alone, folder)
    after_alone = [(float(loss), norm) for loss, norm in (alone.step(n) for n in STEPS[2:])]
    require_equal([before[0] + after_alone])
