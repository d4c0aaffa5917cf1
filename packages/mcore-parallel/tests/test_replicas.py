"""The check of replicas: verdicts, errors and log lines of every rank, with real messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mcore.parallel import ProcessGroups, use_process_groups
from mcore.parallel import check_param_hashes_across_dp_replicas as check
from rank_testing import run_ranks

BOTH = (False, True)


def module_of(*tensors: torch.Tensor, **named: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in {**{f"w{i}": t for i, t in enumerate(tensors)}, **named}.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def expert(tensor: torch.Tensor) -> nn.Module:
    module = module_of(e=tensor)
    module.e.allreduce = False  # type: ignore[union-attr]
    return module


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def verdicts(model: Any, **kwargs: Any) -> tuple[bool, bool]:
    """The verdicts of the check without and with cross_check."""
    plain, cross = (check(model, cross, **{"dp_group": world(), **kwargs}) for cross in BOTH)
    return plain, cross


def failure(*args: Any, **kwargs: Any) -> str:
    try:
        return str(check(*args, **kwargs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def logged(call: Callable[[], object]) -> list[str]:
    logger, handler = logging.getLogger("mcore.parallel.replicas"), Lines()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    call()
    logger.removeHandler(handler)
    logger.setLevel(before)
    return handler.lines


def compare_values() -> dict[str, tuple[bool, bool]]:
    rank, nan = dist.get_rank(), float("nan")
    double = torch.tensor([1.0, 1 + 1e-12], dtype=torch.float64)
    same = torch.arange(6.0)
    changed = same + (rank == 0)
    return {
        "equal": verdicts([module_of(same)]),
        "a single module": verdicts(module_of(same)),
        "rank 0 changed": verdicts([module_of(changed)]),
        "second chunk changed": verdicts([module_of(same), module_of(same, changed)]),
        "no params": verdicts([]),
        "empty params": verdicts(module_of(torch.empty(0), torch.empty(2, 0))),
        "signed zero": verdicts(module_of(torch.tensor([0.0, [0.0, -0.0][rank]]))),
        "NaN": verdicts(module_of(torch.tensor([nan, 1.0]))),
        "float64": verdicts(module_of(double[rank : rank + 1])),
        "float64 as float32": verdicts(module_of(double[rank : rank + 1]), bit_exact=False),
        "int64": verdicts(module_of(torch.tensor([2**24 + rank]))),
        "strides": verdicts(module_of(torch.arange(4.0).reshape(2, 2) if rank else transposed())),
        "bfloat16": verdicts(module_of(same.bfloat16(), changed.bfloat16())),
        "bfloat16, equal": verdicts(module_of(same.bfloat16()), num_threads=3),
        "dtypes as float32": verdicts(
            module_of(same.to([torch.bfloat16, torch.float32][rank])), bit_exact=False
        ),
        "fp8": verdicts(module_of(same.to(torch.float8_e4m3fn))),
        "fp8, changed": verdicts(module_of(changed.to(torch.float8_e4m3fn))),
        "frozen and trained": verdicts(nn.Sequential(module_of(same), ones_layer())),
    }


def transposed() -> torch.Tensor:
    return torch.tensor([[0.0, 2.0], [1.0, 3.0]]).t()


def ones_layer() -> nn.Linear:
    layer = nn.Linear(3, 2)
    for param in layer.parameters():
        nn.init.ones_(param)
    return layer


def test_values_on_two_ranks() -> None:
    first, second = run_ranks(compare_values, 2)
    differs = {
        "rank 0 changed",
        "second chunk changed",
        "signed zero",
        "float64",
        "int64",
        "bfloat16",
        "fp8, changed",
    }
    for case in first:
        assert first[case] == (True, case not in differs), case
        assert second[case] == (case not in differs, case not in differs), case


def count_collectives() -> list[list[str]]:
    calls: list[str] = []
    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "reduce", "gather"):
        real = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
            calls.append(f"{_name} {args[0].nbytes}")
            return _real(*args, **kwargs)

        setattr(dist, name, counted)
    found = []
    for model in ([ones_layer()], [module_of(torch.tensor([float(dist.get_rank())]))]):
        for cross_check in BOTH:
            calls.clear()
            check(model, cross_check, dp_group=world())
            found.append(list(calls))
    return found


def test_one_reduction_compares_all_hashes() -> None:
    structure = f"all_reduce {512}"
    for plain, cross, plain_differs, cross_differs in run_ranks(count_collectives, 2):
        assert plain == [structure, f"broadcast {16 * 2}"]
        assert cross == [structure, f"all_reduce {32 * 2}"]
        assert plain_differs == [structure, "broadcast 16"]
        assert cross_differs == [structure, "all_reduce 32", "broadcast 16"]  # who differs


def log_mismatches() -> list[list[str]]:
    rank = dist.get_rank()
    chunks = [module_of(torch.zeros(1)), module_of(torch.tensor([float(rank)]), torch.ones(2))]
    many = module_of(*(torch.full((1,), float(rank + i)) for i in range(25)))
    many_equal = module_of(*(torch.full((1,), float(i)) for i in range(25)))
    return [
        logged(lambda: check(chunks, False, dp_group=world())),
        logged(lambda: check(chunks, True, dp_group=world())),
        logged(lambda: check(many, True, dp_group=world())),
        logged(lambda: check(many_equal, True, dp_group=world())),
    ]


def test_mismatches_are_logged_on_the_rank_that_has_them_and_not_more_than_twenty() -> None:
    first, second = run_ranks(log_mismatches, 2)
    assert first == [[], [], [], []]
    line = "ERROR: [Rank 1] Hash not matching for w0 in model chunk 1"
    assert second[0] == second[1] == [line]
    assert second[2] == [
        *(f"ERROR: [Rank 1] Hash not matching for w{i} in model chunk 0" for i in range(20)),
        "ERROR: [Rank 1] Hash not matching for 5 more parameters",
    ]
    assert second[3] == []


def compare_what_differs_in_structure() -> list[str]:
    rank = dist.get_rank()
    one, two = torch.ones(1), torch.ones(2)
    other = rank == 1
    cases: list[tuple[Any, dict[str, Any]]] = [
        ([module_of(one, two) if other else module_of(one)], {}),
        ([module_of(one, two) if other else module_of(one)], {"cross_check": True}),
        ([module_of(one, two) if other else module_of(one, b=two)], {}),
        ([module_of(two) if other else module_of(one)], {"bit_exact": False}),
        ([module_of(one.half() if other else one)], {}),
        ([module_of(one)] * (1 + other), {}),
        ([module_of(one)], {"cross_check": other}),
        ([module_of(one)], {"bit_exact": other}),
        ([] if other else [module_of(one)], {}),
    ]
    found = [failure(model, **{"dp_group": world(), **kwargs}) for model, kwargs in cases]
    return [*found, failure([module_of(one)], dp_group=world())]


def test_other_parameters_on_one_rank_are_an_error_on_all() -> None:
    results = run_ranks(compare_what_differs_in_structure, 2)
    for rank, found in enumerate(results):
        start = "ValueError: the ranks of the group do not have the same parameters: "
        for text in found[:-1]:
            assert text.startswith(start + f"rank {rank} has "), text
        extra = ["nothing", "'w1' of model chunk 0, shape (2,), torch.float32"][rank]
        for text in found[:2]:
            assert f"has {1 + rank}, the group between 1 and 2. The first difference is" in text
            assert f"number 2, here {extra}. " in text
        second = ["'b'", "'w1'"][rank]
        assert f"number 2, here {second} of model chunk 0" in found[2]
        assert f"number 1, here 'w0' of model chunk 0, shape ({1 + rank},). " in found[3]
        assert ["torch.float32", "torch.float16"][rank] in found[4]
        assert ["nothing", "'w0' of model chunk 1"][rank] in found[5]
        assert f"number 0, here the arguments cross_check={rank == 1}" in found[6]
        assert f"bit_exact={rank == 1}" in found[7]
        assert f"has {1 - rank}, the group between 0 and 1. The first" in found[8]
        assert found[9] == "True"  # the group still works


def compare_what_one_rank_cannot_read() -> list[str]:
    bad = dist.get_rank() == 1
    good = module_of(torch.ones(2))
    return [
        failure([module_of(torch.empty(2, device="meta")) if bad else good], dp_group=world()),
        failure([good], num_threads=0 if bad else 2, dp_group=world()),
        failure([good, None] if bad else [good, good], dp_group=world(), cross_check=True),
        failure([good], dp_group=world()),
    ]


def test_what_one_rank_cannot_read_is_the_same_error_on_all() -> None:
    first, second = run_ranks(compare_what_one_rank_cannot_read, 2)
    assert "'w0' of model chunk 0 cannot be hashed: it is on the meta device" in second[0]
    assert "num_threads is 0" in second[1]
    assert second[2] == "TypeError: model chunk 1 must be a module, got NoneType"
    for here, there in zip(first[:3], second[:3], strict=True):
        kind, _, text = there.partition(": ")
        assert here == f"{kind}: rank 1 of the process group failed: {text}"
    assert first[3] == second[3] == "True"


def compare_as_members() -> list[str]:
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    model = [module_of(torch.ones(2)), expert(torch.full((2,), float(rank == 1)))]
    return [
        failure(model, True, dp_group=pair),
        failure(model, True, dp_group=world(), expert_dp_group=pair),
        failure(model, True, dp_group=world()),
        failure(model[:1], True, dp_group=init_device_mesh("cpu", (3,))),
        failure(model[:1], True, dp_group=3),
    ]


def test_a_rank_outside_the_group_gets_an_error_that_its_other_group_shares() -> None:
    results = run_ranks(compare_as_members, 3)
    outside = "ValueError: rank 2 is not a member of the process group"
    assert results[0][0] == results[1][0] == "True"
    assert results[2][0].startswith(outside)
    assert results[2][1].startswith(outside)
    for found in results[:2]:
        shared = "ValueError: rank 2 of the process group failed: rank 2 is not a member"
        assert found[1].startswith(shared)
    for rank, found in enumerate(results):
        assert found[2:4] == ["True", "True"]
        assert found[4].startswith(f"ValueError: rank {rank} is not a member")


def compare_experts() -> dict[str, Any]:
    rank = dist.get_rank()
    pgs = ProcessGroups.from_sizes(ep=2, groups=("dp", "expt_dp"))
    dense = module_of(torch.ones(3))
    own_experts = expert(torch.full((2,), float(rank % 2)))  # another expert on odd ranks
    broken = expert(torch.full((2,), float(rank % 2 + 10 * (rank == 3))))
    found: dict[str, Any] = {"ranks": [pgs.ranks("dp"), pgs.ranks("expt_dp")]}
    with use_process_groups(pgs):
        found["equal"] = [check([dense, own_experts], cross) for cross in BOTH]
        found["an expert differs"] = [check([dense, broken], cross) for cross in BOTH]
        found["experts on even ranks only"] = [
            check([dense] if rank % 2 else [dense, own_experts], cross) for cross in BOTH
        ]
        found["dense differs"] = [
            check([module_of(torch.tensor([float(rank == 2)])), own_experts], cross)
            for cross in BOTH
        ]
        meta = expert(torch.empty(2, device="meta")) if rank == 2 else own_experts
        found["an expert without values"] = failure([dense, meta])
        extra = expert(torch.ones(3)) if rank == 3 else module_of()
        found["an expert too many"] = failure([dense, own_experts, extra])
        found["equal again"] = check([dense, own_experts], True)
    found["no default"] = logged(lambda: check([dense, broken], True, dp_group=world()))
    return found


def test_experts_have_a_group_of_their_own() -> None:
    for rank, found in enumerate(run_ranks(compare_experts, 4)):
        assert found["ranks"] == [[0, 1, 2, 3], [rank % 2, rank % 2 + 2]]
        assert found["equal"] == [True, True]
        assert found["an expert differs"] == [rank != 3, False]  # on all ranks of dp
        assert found["experts on even ranks only"] == [True, True]
        assert found["dense differs"] == [rank != 2, False]
        assert "rank 2 of the process group failed" in found["an expert without values"] or (
            rank == 2 and "meta device" in found["an expert without values"]
        )
        assert found["an expert without values"].startswith("ValueError: ")
        assert found["an expert too many"].startswith("ValueError: ")
        assert "do not have the same parameters" in found["an expert too many"]
        assert found["equal again"] is True
        assert found["no default"] == [
            "WARNING: 1 parameters are not compared: pass expert_dp_group, or set the default "
            "ProcessGroups"
        ]


def dtensor(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], change: bool
) -> nn.Module:
    """A parameter whose shard on this rank is that of ``whole``, changed if requested."""
    made = DTensor.from_local(
        *_local(whole, mesh, placements), run_check=False, shape=whole.shape, stride=whole.stride()
    )
    if change:
        made._local_tensor.add_(1)
    return module_of(d=made)


def _local(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[torch.Tensor, DeviceMesh, Sequence[Placement]]:
    coordinate = mesh.get_coordinate()
    local = whole if coordinate is not None else whole[:0]
    for dim, placement in enumerate(placements):
        if coordinate is not None and isinstance(placement, Shard):
            parts = list(local.chunk(mesh.size(dim), placement.dim))
            parts += [local[:0]] * (mesh.size(dim) - len(parts))
            local = parts[coordinate[dim]]
    return local.clone(), mesh, placements


def compare_dtensors() -> dict[str, list[Any]]:
    rank = dist.get_rank()
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (4,))
    model_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half_world = DeviceMesh("cpu", [0, 1])
    whole = torch.arange(10.0).reshape(5, 2)
    tp, dp = model_parallel["tp"], model_parallel["dp"].get_group()
    cases: dict[str, tuple[DeviceMesh, list[Placement], Any]] = {
        "hybrid": (hybrid, [Replicate(), Shard(0)], world()),
        "replicated": (flat, [Replicate()], world()),
        "sharded over the whole group": (flat, [Shard(0)], world()),
        "sharded twice": (hybrid, [Shard(0), Shard(1)], world()),
        "tensor parallel": (tp, [Shard(0)], dp),
        "shards of both meshes": (hybrid["shard"], [Shard(0)], world()),
        "on half of the world": (half_world, [Replicate()], world()),
    }
    found: dict[str, list[Any]] = {}
    for name, (mesh, placements, group) in cases.items():
        equal = [dtensor(whole, mesh, placements, change=False), module_of(torch.ones(1))]
        changed = [dtensor(whole, mesh, placements, change=rank == 3), equal[1]]
        found[name] = [
            check(model, cross, dp_group=group) for model in (equal, changed) for cross in BOTH
        ]
    skipped = dtensor(whole, flat, [Shard(0)], change=False)
    found["log"] = logged(lambda: check([skipped], dp_group=world()))
    found["log"] += logged(lambda: check(changed_hybrid(whole, hybrid), dp_group=world()))
    mesh = flat if rank == 0 else hybrid
    placement: list[Placement] = [Replicate()] * mesh.ndim
    found["other meshes"] = [failure([dtensor(whole, mesh, placement, False)], dp_group=world())]
    return found


def changed_hybrid(whole: torch.Tensor, mesh: DeviceMesh) -> nn.Module:
    return dtensor(whole, mesh, [Replicate(), Shard(0)], change=dist.get_rank() == 1)


def test_dtensors_are_compared_between_the_ranks_that_hold_the_same_shard() -> None:
    nobody_has_replicas = {"sharded over the whole group", "sharded twice"}
    for rank, found in enumerate(run_ranks(compare_dtensors, 4)):
        for case in ("hybrid", "replicated", "shards of both meshes"):
            assert found[case] == [True, True, rank != 3, False], (rank, case)
        for case in nobody_has_replicas:
            assert found[case] == [True, True, True, True], (rank, case)
        group_of_3 = rank in (1, 3)
        assert found["tensor parallel"] == [True, True, rank != 3, not group_of_3]
        assert found["on half of the world"] == [True, True, True, True]  # 3 holds nothing
        # rank 1 holds the first copy of the second shard, so rank 3 differs from it
        assert found["log"] == [
            "DEBUG: 1 sharded parameters have no replicas and are not compared",
            *["ERROR: [Rank 3] Hash not matching for d in model chunk 0"] * (rank == 3),
        ]
        assert "do not have the same parameters" in found["other meshes"][0]


class Scaled(torch.Tensor):
    """A quantised tensor: bytes and a scale."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        made.inner, made.scale = inner, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        raise NotImplementedError(str(func))


def compare_wrappers() -> list[Any]:
    rank = dist.get_rank()
    inner = torch.arange(4.0).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    return [
        verdicts(module_of(Scaled(inner, one))),
        verdicts(module_of(Scaled(inner, one + rank))),
        failure(module_of(Scaled(inner, one.double() if rank else one)), dp_group=world()),
        failure(module_of(Scaled(inner, one.repeat(1 + rank))), dp_group=world()),
        failure(module_of(Scaled(inner, one) if rank else torch.ones(4)), dp_group=world()),
    ]


def test_wrappers_are_compared_by_what_is_inside() -> None:
    for rank, found in enumerate(run_ranks(compare_wrappers, 2)):
        assert found[0] == (True, True)
        assert found[1] == (rank == 0, False)
        assert ["scale, shape (1,), torch.float32", "torch.float64"][rank] in found[2]
        assert f"scale, shape ({1 + rank},)" in found[3]
        assert "do not have the same parameters" in found[4]


@pytest.mark.parametrize("situation", ["not distributed", "no group", "one rank"])
def test_alone_the_answer_is_true(fake_world, situation: str) -> None:
    if situation != "not distributed":
        fake_world(1, 2)
    group = dist.new_group([1]) if situation == "one rank" else None
    for cross_check in BOTH:
        assert check([ones_layer()], cross_check, dp_group=group, expert_dp_group=group) is True
    with pytest.raises(TypeError, match="model must be a module"):
        check(None, dp_group=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="meta device"):
        check(nn.Linear(1, 1, device="meta"), dp_group=group)


@pytest.mark.parametrize("cross_check", BOTH)
def test_messages_do_not_grow_with_the_world(fake_world, monkeypatch, cross_check: bool) -> None:
    sent: dict[int, list[int]] = {}
    model = [module_of(*(torch.zeros(1) for _ in range(2000)))]

    def count(tensor: torch.Tensor, **kwargs: Any) -> None:
        sent[dist.get_world_size()].append(tensor.nbytes)

    monkeypatch.setattr(dist, "all_reduce", count)
    monkeypatch.setattr(dist, "broadcast", count)
    for world_size in (2, 4096):
        fake_world(0, world_size)
        sent[world_size] = []
        assert check(model, cross_check, dp_group=world())
    assert sent[2] == sent[4096] == [512, 2000 * 16 * (1 + cross_check)]


@pytest.mark.parametrize("world_size", [1024])
def test_a_model_that_a_large_world_shards_needs_no_table(fake_world, monkeypatch, world_size):
    fake_world(5, world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    parts = [dtensor(torch.arange(2048.0), mesh, [Shard(0)], change=False).d for _ in range(50)]
    sent: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **kwargs: sent.append(tensor.nbytes))
    assert check(module_of(*parts), True, dp_group=world())
    assert sent == [512]
