"""Norms of a model split in every way against the norm of the whole model."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mcore.observe import calc_dtensor_params_l2_norm, calc_params_l2_norm, report_l2_norm_grad
from mcore.parallel.groups import get_pg_rank, get_pg_size
from mcore.parallel.process_groups import ProcessGroups
from rank_testing import run_ranks

HIDDEN, VOCAB, LAYERS, EXPERTS = 8, 12, 2, 4
# What each kind of parameter is split along by tensor parallelism; None is whole on every rank.
SPLIT_DIM = {"embedding": 0, "norm": None, "column": 0, "row": 1, "bias": None, "expert": 0}

LAYOUTS = {
    2: [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {"ep": 2, "pp": 1, "expt_tp": 1}, {}],
    4: [
        {"tp": 4},
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2},
        {"cp": 2, "pp": 2},
        {"tp": 2},
        {"ep": 4},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "expt_tp": 1},
        {"ep": 2, "pp": 2},
        {"cp": 2},
    ],
}
MAIN = 1.25  # main parameters are that many times the others, to tell them apart
FP32 = SimpleNamespace(bf16=False, fp16=False)
BF16 = SimpleNamespace(bf16=True, fp16=False)
FP16 = SimpleNamespace(bf16=False, fp16=True)


def whole_model():
    """Every parameter of the model once, by name."""
    torch.manual_seed(0)
    model = {"embedding": torch.randn(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        model |= {
            f"{layer}.norm": torch.randn(HIDDEN),
            f"{layer}.column": torch.randn(2 * HIDDEN, HIDDEN),
            f"{layer}.row": torch.randn(HIDDEN, 2 * HIDDEN),
            f"{layer}.bias": torch.randn(HIDDEN),
        }
        for expert in range(EXPERTS):
            model[f"{layer}.expert{expert}"] = torch.randn(2 * HIDDEN, HIDDEN)
    return model


def norm_of(tensors):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def kind_of(name):
    return name.split(".")[-1].rstrip("0123456789")


def local_model(groups, dtype):
    """The part of the model that this rank holds, marked as Megatron-LM marks it."""
    pp, pp_rank = get_pg_size(groups.pp), get_pg_rank(groups.pp)
    ep, ep_rank = get_pg_size(groups.ep), get_pg_rank(groups.ep)
    module = torch.nn.Module()
    for name, value in whole_model().items():
        kind = kind_of(name)
        is_expert = kind == "expert"
        copies = [False]  # whether a copy on this rank is one of another rank's parameter
        if kind == "embedding":
            first, last = pp_rank == 0, pp_rank == pp - 1
            copies = [False] * first + [True] * (last and pp > 1)
        elif int(name[0]) * pp // LAYERS != pp_rank:
            continue
        if is_expert and int(name[-1]) * ep // EXPERTS != ep_rank:
            continue
        tp_group = groups.expt_tp if is_expert else groups.tp
        dim = SPLIT_DIM[kind]
        for is_copy in copies:
            parameter = torch.nn.Parameter(part_of(value, dim, tp_group).to(dtype))
            parameter.whole_fp32 = part_of(value, dim, tp_group)
            parameter.tensor_model_parallel = dim is not None
            if is_copy:
                parameter.shared = True
            if is_expert:
                parameter.allreduce = False
            label = name.replace(".", "_") + ("_copy" if is_copy else "")
            module.register_parameter(label, parameter)
    return module


def part_of(value, dim, group):
    if dim is None:
        return value.clone()
    return value.chunk(get_pg_size(group), dim)[get_pg_rank(group)].clone()


def keep_main_parameters(module, groups, *, sharded):
    """Give each parameter a main one, whole or cut over the ranks that have a copy."""
    for parameter in module.parameters():
        main = MAIN * parameter.whole_fp32
        if sharded:
            group = groups.expt_dp if hasattr(parameter, "allreduce") else groups.dp_cp
            size, rank = get_pg_size(group), get_pg_rank(group)
            shards = main.flatten().split(-(-main.numel() // size))
            main = shards[rank].clone() if rank < len(shards) else None
            parameter.main_param_sharded = True
        parameter.main_param = main


def norms_of_layout(layout):
    groups = ProcessGroups.from_sizes(**layout)
    norms = {}
    for name, dtype, config in (
        ("fp32", torch.float32, FP32),
        ("bf16", torch.bfloat16, BF16),
        ("fp16", torch.float16, FP16),
    ):
        module = local_model(groups, dtype)
        norms[f"{name} values"] = calc_params_l2_norm(module, config, pg_collection=groups)
        if config is FP32:
            continue
        for kind in ("whole", "sharded"):
            module = local_model(groups, dtype)
            keep_main_parameters(module, groups, sharded=kind == "sharded")
            norm = calc_params_l2_norm(module, config, pg_collection=groups)
            norms[f"{name} {kind} main"] = norm
            forced = calc_params_l2_norm(
                module, config, force_create_fp32_copy=True, pg_collection=groups
            )
            norms[f"{name} {kind} forced"] = forced
    # Two chunks: what a rank holds, cut between two modules.
    module = local_model(groups, torch.float32)
    chunks = [torch.nn.Module(), torch.nn.Module()]
    for index, (name, parameter) in enumerate(module.named_parameters()):
        chunks[index % 2].register_parameter(name, parameter)
    norms["fp32 two chunks"] = calc_params_l2_norm(chunks, FP32, pg_collection=groups)
    if get_pg_size(groups.tp) == dist.get_world_size():
        for parameter in module.parameters():
            parameter.grad = parameter.whole_fp32
        norms["gradients"] = report_l2_norm_grad(module, group=groups.tp)["l2_norm/grad/global"]
    return norms


def norms_of_layouts():
    return [norms_of_layout(layout) for layout in LAYOUTS[dist.get_world_size()]]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_has_the_norm_of_the_whole_model(world_size):
    values = whole_model().values()
    exact = norm_of(values)
    bf16, fp16 = (norm_of(v.to(d) for v in values) for d in (torch.bfloat16, torch.float16))
    expected = {"fp32 values": exact, "fp32 two chunks": exact}
    for name, rounded in (("bf16", bf16), ("fp16", fp16)):
        expected |= {
            f"{name} values": rounded,
            f"{name} whole main": MAIN * exact,
            f"{name} sharded main": MAIN * exact,
            f"{name} whole forced": rounded,
            f"{name} sharded forced": rounded,
        }
    for rank, found in enumerate(run_ranks(norms_of_layouts, world_size)):
        for layout, norms in zip(LAYOUTS[world_size], found, strict=True):
            gradients = norms.pop("gradients", exact)
            assert norms == {n: pytest.approx(v, rel=2e-6) for n, v in expected.items()}, (
                rank,
                layout,
            )
            assert gradients == pytest.approx(exact, rel=2e-6)


def fully_sharded_norms():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world_size = dist.get_world_size()
    meshes = {"flat": init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        meshes["hybrid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    norms = {}
    for name, mesh in meshes.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = plain_model().to(dtype)
            fully_shard(model, mesh=mesh)
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
            kind = f"{name} {dtype}"
            norms[f"{kind} fsdp"] = calc_params_l2_norm(model, BF16, use_megatron_fsdp=True)
            norms[f"{kind} plain"] = calc_params_l2_norm(model, BF16)
            norms[f"{kind} dtensors"] = calc_dtensor_params_l2_norm(model.parameters())
            norms[f"{kind} gradients"] = report_l2_norm_grad(model)["l2_norm/grad/global"]
    return norms


def plain_model():
    torch.manual_seed(1)
    # Sizes that no number of ranks divides.
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.GELU(), torch.nn.Linear(13, 3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_fully_sharded_models_have_the_norm_of_the_whole_model(world_size):
    expected = {
        str(dtype): norm_of(p.detach().to(dtype) for p in plain_model().parameters())
        for dtype in (torch.float32, torch.bfloat16)
    }
    found = run_ranks(fully_sharded_norms, world_size)
    assert len(found[0]) == (8 if world_size == 2 else 16)
    for norms in found:
        for name, norm in norms.items():
            assert norm == pytest.approx(expected[name.split()[1]], rel=2e-6), name
