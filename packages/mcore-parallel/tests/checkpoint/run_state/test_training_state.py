"""Whole training states that travel between layouts, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mcore.parallel.checkpoint import load_training_state, save_training_state
from rank_testing import run_ranks

VOCAB, WIDTH, HIDDEN = 13, 6, 10
Found = dict[str, torch.Tensor]


class Joined(torch.nn.Module):
    """Two projections in one parameter, which its state dict takes apart, 3 rows and 6."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.randn(9, WIDTH))
        self.register_state_dict_post_hook(self.take_apart)
        self.register_load_state_dict_pre_hook(self.join)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        small, large = (hidden @ self.both.T).split([3, WIDTH], dim=-1)
        return large * small.sum(-1, keepdim=True)

    @staticmethod
    def take_apart(module: Any, state: Found, prefix: str, metadata: Any) -> None:
        both = state.pop(prefix + "both")
        state[prefix + "small.weight"], state[prefix + "large.weight"] = both.split([3, WIDTH])

    @staticmethod
    def join(module: Any, state: Found, prefix: str, *others: Any) -> None:
        parts = [state.pop(f"{prefix}{name}.weight") for name in ("small", "large")]
        state[prefix + "both"] = torch.cat(parts)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.gate = Joined()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.norm(hidden)
        return hidden + self.down(F.gelu(self.up(normal))) + self.gate(normal)


class Net(torch.nn.Module):
    """Tied embedding and head, uneven sizes, a frozen parameter and one that gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.drop = torch.nn.Dropout(0.1)
        self.scale = torch.nn.BatchNorm1d(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = torch.nn.Linear(3, 5)
        self.blocks[0].norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.drop(self.scale(hidden)))


def tensor_parallel(mesh: DeviceMesh, seed: int) -> Net:
    """FSDP2 over a tensor-parallel plan that leaves out norms, embedding and head."""
    model = Net(seed)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)  # type: ignore[arg-type]
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def fully_sharded(mesh: DeviceMesh, seed: int) -> Net:
    model = Net(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW with two groups, and SGD with momentum for the rest."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    adam = [value for name, value in named if "norm" not in name]
    options: dict[str, Any] = {"lr": 0.05, "foreach": False}
    return [
        torch.optim.AdamW(
            [{"params": adam[:2]}, {"params": adam[2:], "lr": 0.01, "weight_decay": 0.0}], **options
        ),
        torch.optim.SGD([v for n, v in named if "norm" in n], momentum=0.9, **options),
    ]


def train(model: torch.nn.Module, opts: list[torch.optim.Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (8,), generator=generator)
        loss = F.cross_entropy(model(tokens), tokens.flip(0))
        loss.backward()
        for one in opts:
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: torch.nn.Module, opts: list[torch.optim.Optimizer]) -> Found:
    """Every tensor of model and optimizers, unsharded, by name; options as tensors."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = {value: name for name, value in model.named_parameters()}
    for one in opts:
        for group in one.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                found[f"lr.{name}"] = torch.tensor(group["lr"])
                for field, value in one.state.get(parameter, {}).items():
                    found[f"{field}.{name}"] = value
    return {
        name.replace("module.", ""): (
            value.full_tensor() if isinstance(value, DTensor) else value
        ).clone()
        for name, value in found.items()
    }


def differences(mine: Found, other: Found) -> list[str]:
    names = mine.keys() | other.keys()
    return sorted(
        name
        for name in names
        if name not in mine or name not in other or not torch.equal(mine[name], other[name])
    )


class Scheduler(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 2)


class Loader:
    """Data of this rank alone."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "buffer": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def travel(folder: str) -> dict[str, Any]:
    root, rank = Path(folder), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = mesh.get_group("tp")
    alone, _ = dist.new_subgroups(1)
    found: dict[str, Any] = {}

    model = tensor_parallel(mesh, seed=0)
    opts = optimizers(model)
    torch.manual_seed(100 + rank // 2)  # copies within tp draw alike
    train(model, opts, range(2))
    before = whole(model, opts)
    found["joined"] = sorted(name for name in before if "blocks.1.gate" in name)
    found["steps"] = [before["step.embed.weight"].item(), "step.unused.weight" in before]
    more: dict[str, Any] = {"scheduler": Scheduler(opts[0]), "loader": Loader(rank), "epoch": 3}
    save_training_state(root / "2d", model, opts, step=2, **more)
    found["changed by the save"] = differences(before, whole(model, opts))
    losses = train(model, opts, range(2, 4))
    after = whole(model, opts)

    model = tensor_parallel(mesh, seed=1)
    opts = optimizers(model)
    loader, scheduler = Loader(-1), Scheduler(opts[0])
    state = load_training_state(root / "2d", model, opts, loader=loader, scheduler=scheduler)
    found["values"] = [state["step"], state["epoch"], state["loader"] is loader, loader.place]
    found["scheduler"] = scheduler.state_dict() == more["scheduler"].state_dict()
    found["2d"] = differences(before, whole(model, opts))
    found["2d goes on"] = [train(model, opts, range(2, 4)) == losses]
    found["2d goes on"] += differences(after, whole(model, opts))

    model = fully_sharded(mesh["tp"], seed=2)
    opts = optimizers(model)
    train(model, opts, range(5))
    load_training_state(root / "2d", model, opts, process_group=pair, unexpected="ignore")
    found["fsdp"] = differences(before, whole(model, opts))
    where = root / f"fsdp{rank // 2}"
    with torch.no_grad():  # an evaluation leaves the outermost parameters whole
        model.eval()(torch.arange(8))
    model.train()
    save_training_state(where, model, opts, step=2, process_group=pair)
    losses = train(model, opts, range(2, 4))
    after = whole(model, opts)
    model = fully_sharded(mesh["tp"], seed=3)
    opts = optimizers(model)
    load_training_state(where, model, opts, process_group=pair)
    found["fsdp goes on"] = [train(model, opts, range(2, 4)) == losses]
    found["fsdp goes on"] += differences(after, whole(model, opts))

    model = torch.nn.parallel.DistributedDataParallel(Net(seed=4), process_group=pair)
    opts = optimizers(model)
    load_training_state(where, model, opts, process_group=pair)
    found["ddp"] = differences(before, whole(model, opts))
    where = root / f"ddp{rank // 2}"
    save_training_state(where, model, opts, step=2, process_group=pair)

    model = Net(seed=5)
    opts = optimizers(model)
    load_training_state(where, model, opts, process_group=alone, random_state=False)
    found["plain"] = differences(before, whole(model, opts))
    if rank == 3:
        save_training_state(root / "plain", model, opts, step=2, process_group=alone)
    dist.barrier()

    model = tensor_parallel(mesh, seed=6)
    opts = optimizers(model)
    load_training_state(root / "plain", model, opts)
    found["2d again"] = differences(before, whole(model, opts))
    return found


def test_a_state_travels_between_layouts_to_the_last_bit(tmp_path: Path) -> None:
    results = run_ranks(travel, 4, str(tmp_path), timeout_s=300)
    for rank, found in enumerate(results):
        assert found == {
            "joined": [
                *(f"{field}.blocks.1.gate.both" for field in ("exp_avg", "exp_avg_sq", "lr")),
                *(f"model.blocks.1.gate.{part}.weight" for part in ("large", "small")),
                "step.blocks.1.gate.both",
            ],
            "steps": [2.0, False],
            "changed by the save": [],
            "values": [2, 3, True, rank],
            "scheduler": True,
            "2d": [],
            "2d goes on": [True],
            "fsdp": [],
            "fsdp goes on": [True],
            "ddp": [],
            "plain": [],
            "2d again": [],
        }
