"""ProcessGroups: rank lists written down by hand, values on real ranks, thousands of fake ranks."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mcore.parallel import ProcessGroupCollection, ProcessGroups
from rank_testing import run_ranks

EXAMPLE = {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "expt_tp": 1}
# world 16 with these sizes: field, list with rank 0, list with rank 5
EXAMPLE_LISTS = [
    ("tp", [0, 1], [4, 5]),
    ("cp", [0, 2], [5, 7]),
    ("dp", [0, 4], [1, 5]),
    ("pp", [0, 8], [5, 13]),
    ("dp_cp", [0, 2, 4, 6], [1, 3, 5, 7]),
    ("tp_cp", [0, 1, 2, 3], [4, 5, 6, 7]),
    ("mp", [0, 1, 8, 9], [4, 5, 12, 13]),
    ("tp_dp_cp", list(range(8)), list(range(8))),
    ("ep", [0, 1, 2, 3], [4, 5, 6, 7]),
    ("expt_dp", [0, 4], [1, 5]),
    ("expt_tp", [0], [5]),
    ("tp_ep", [0, 1, 2, 3], [4, 5, 6, 7]),
    ("tp_ep_pp", [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    ("embd", [0, 8], [5, 13]),
    ("pos_embd", [0], [5]),
    ("intra_dp_cp", [0, 2, 4, 6], [1, 3, 5, 7]),
    ("intra_expt_dp", [0, 4], [1, 5]),
]
GROUP_NAMES = [name for name, _, _ in EXAMPLE_LISTS]


def all_ranks(pgs: ProcessGroups) -> dict[str, list[int] | None]:
    return {n: None if getattr(pgs, n) is None else pgs.ranks(n) for n in GROUP_NAMES}


@pytest.mark.parametrize("rank", [0, 5])
def test_example_of_sixteen_ranks(fake_world, rank: int) -> None:
    fake_world(rank, 16)
    pgs = ProcessGroups.from_sizes(**EXAMPLE)
    for name, of_0, of_5 in EXAMPLE_LISTS:
        expected = of_0 if rank == 0 else of_5
        assert pgs.ranks(name) == expected, name
        assert pgs.size(name) == len(expected)
        assert pgs.rank(name) == expected.index(rank)
    assert pgs.inter_dist_opt is None
    assert pgs.hcp is None


def test_the_last_stage_has_no_position_embedding(fake_world) -> None:
    fake_world(13, 16)
    pgs = ProcessGroups.from_sizes(**EXAMPLE)
    assert pgs.ranks("embd") == [5, 13]
    assert pgs.pos_embd is None
    assert (pgs.size("pos_embd"), pgs.rank("pos_embd"), pgs.ranks("pos_embd")) == (1, 0, [13])


def test_every_rank_agrees_on_every_group(fake_world) -> None:
    lists: dict[str, set[tuple[int, ...]]] = {name: set() for name in GROUP_NAMES}
    for rank in range(16):
        fake_world(rank, 16)
        for name, ranks in all_ranks(ProcessGroups.from_sizes(**EXAMPLE)).items():
            assert ranks is None or rank in ranks
            lists[name] |= set() if ranks is None else {tuple(ranks)}
    for name, found in lists.items():
        members = sorted(rank for ranks in found for rank in ranks)
        expected = range(8) if name == "pos_embd" else range(16)
        assert members == list(expected), name


def test_fields_with_the_same_ranks_share_one_group(fake_world) -> None:
    fake_world(2, 4)
    pgs = ProcessGroups.from_sizes(tp=4)
    assert pgs.dp_cp is pgs.dp
    assert pgs.size("dp") == 1
    assert pgs.tp is pgs.mp is pgs.tp_cp is dist.group.WORLD
    assert pgs.tp_cp is not pgs.dp
    assert pgs.pp is pgs.cp is pgs.embd


def test_meshes_are_made_of_the_groups_that_exist(fake_world, monkeypatch) -> None:
    fake_world(3, 4)
    make, made = DeviceMesh.from_group, []

    def watched(*args, **kwargs):  # type: ignore[no-untyped-def]
        with monkeypatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "new_group", lambda **kw: made.append(kw))
            return make(*args, **kwargs)

    monkeypatch.setattr(DeviceMesh, "from_group", watched)
    pgs = ProcessGroups.from_sizes(tp=2)
    assert not made
    assert pgs.dense_mesh is not None
    assert pgs.dense_mesh["tp"].get_group() is pgs.tp
    assert pgs.dense_mesh["dp"].get_group() is pgs.dp
    assert list(pgs.dense_mesh.get_coordinate() or ()) == [0, 1, 0, 1]


def test_only_the_wanted_groups_are_created(fake_world, monkeypatch) -> None:
    fake_world(3, 8)
    created = []
    new_group = dist.new_group

    def record(ranks, **kwargs):  # type: ignore[no-untyped-def]
        created.append(ranks)
        return new_group(ranks, **kwargs)

    monkeypatch.setattr(dist, "new_group", record)
    pgs = ProcessGroups.from_sizes(tp=2, cp=2, groups=("cp", "tp"))
    assert created == [[2, 3], [1, 3]]  # torch's counter has the groups of other ranks
    assert repr(pgs) == "ProcessGroups(tp=2, cp=2)"
    assert pgs.dense_mesh is None
    created.clear()
    ProcessGroups.from_sizes(tp=8, groups=("tp", "mp", "tp_cp"))
    assert created == []  # the world group serves


@pytest.mark.parametrize("barrier", ["0", "1"])
def test_groups_of_others_are_counted_where_torch_only_counts_them(
    fake_world, monkeypatch, barrier: str
) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_store_based_barrier", lambda *args: None)
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", barrier)
    fake_world(3, 8)
    called, new_group = [], dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda *args, **kw: called.append(1) or new_group(*args, **kw)
    )
    pgs = ProcessGroups.from_sizes(tp=2, cp=2, groups=("cp", "tp"))
    assert len(called) == (8 if barrier == "1" else 2)
    # By new_group alone: tp has the names 1 to 4, cp 5 to 8.
    made = (pgs.tp, pgs.cp, new_group([3]))
    assert [group and group.group_name for group in made] == ["2", "6", "9"]


def test_meshes_use_the_groups_of_the_fields(fake_world) -> None:
    fake_world(5, 16)
    pgs = ProcessGroups.from_sizes(**EXAMPLE)
    assert pgs.dense_mesh is not None
    assert pgs.expert_mesh is not None
    assert pgs.dense_mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    assert pgs.expert_mesh.mesh_dim_names == ("pp", "expt_dp", "ep", "expt_tp")
    assert pgs.dense_mesh.device_type == "cpu"
    for mesh in (pgs.dense_mesh, pgs.expert_mesh):
        assert mesh.mesh.flatten().tolist() == list(range(16))
        for name in mesh.mesh_dim_names or ():
            assert mesh[name].get_group() is getattr(pgs, name)
    assert list(pgs.dense_mesh.get_coordinate() or ()) == [0, 1, 0, 1]


def test_mesh_device_type_can_be_given(fake_world) -> None:
    fake_world(0, 2)
    mesh = ProcessGroups.from_sizes(tp=2, device_type="meta").dense_mesh
    assert mesh is not None
    assert mesh.device_type == "meta"


def test_own_choice_of_embedding_ranks(fake_world) -> None:
    for rank, embd, pos_embd in ((2, [2, 4], None), (4, [2, 4], [4]), (0, None, None)):
        fake_world(rank, 8)
        pgs = ProcessGroups.from_sizes(
            pp=4,
            embedding_ranks=lambda ranks: ranks[1:3],
            position_embedding_ranks=lambda ranks: [ranks[2]],
        )
        found = all_ranks(pgs)
        assert (found["embd"], found["pos_embd"]) == (embd, pos_embd)


def test_hierarchical_context_parallelism(fake_world) -> None:
    fake_world(5, 32)
    pgs = ProcessGroups.from_sizes(tp=2, cp=16, hcp_sizes=[2, 2, 4])
    assert pgs.hcp is not None
    # cp group of rank 5: 1, 3, ..., 31; rank 5 is its third member
    assert [dist.get_process_group_ranks(group) for group in pgs.hcp] == [
        [5, 7],
        [1, 5],
        [5, 13, 21, 29],
    ]
    assert "hcp=[2, 2, 4]" in repr(pgs)


@pytest.mark.parametrize("rank", [0, 4097, 8191])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 8, "cp": 2, "pp": 16, "ep": 8, "expt_tp": 1},
        {"tp": 4, "cp": 8, "pp": 8, "ep": 64, "expt_tp": 2},
        {"tp": 1, "cp": 1, "pp": 1, "ep": 1},
    ],
    ids=str,
)
def test_eight_thousand_ranks(fake_world, rank: int, sizes: dict[str, int]) -> None:
    world = 8192
    fake_world(rank, world)
    pgs = ProcessGroups.from_sizes(**sizes)
    tp, cp, pp = sizes["tp"], sizes["cp"], sizes["pp"]
    dp = world // (tp * cp * pp)
    in_stage = rank % (tp * cp * dp)
    first_of_stage, first_of_tp = rank - in_stage, rank - rank % tp
    assert pgs.ranks("tp") == list(range(first_of_tp, first_of_tp + tp))
    assert pgs.ranks("pp") == list(range(in_stage, world, tp * cp * dp))
    assert pgs.ranks("dp_cp") == list(
        range(first_of_stage + rank % tp, first_of_stage + tp * cp * dp, tp)
    )
    assert pgs.ranks("tp_dp_cp") == list(range(first_of_stage, first_of_stage + tp * cp * dp))
    expt_tp = sizes.get("expt_tp", tp)
    assert pgs.size("tp_ep_pp") == expt_tp * sizes["ep"] * pp
    assert pgs.size("expt_dp") * pgs.size("tp_ep_pp") == world
    assert pgs.size("dp") * pgs.size("tp_cp") * pgs.size("pp") == world


def sum_over_each_group() -> dict[str, object]:
    pgs = ProcessGroups.from_sizes(tp=2, pp=2, ep=2, expt_tp=1)
    found: dict[str, object] = {"ranks": all_ranks(pgs)}
    for name in GROUP_NAMES:
        group = getattr(pgs, name)
        if group is not None:
            total = torch.tensor(float(2 ** dist.get_rank()))
            dist.all_reduce(total, group=group)
            found[name] = total.item()
    return found


def test_groups_reduce_over_their_ranks_on_real_ranks() -> None:
    for rank, found in enumerate(run_ranks(sum_over_each_group, 4)):
        ranks = found.pop("ranks")
        assert ranks["tp"] == [rank - rank % 2, rank - rank % 2 + 1]
        assert ranks["ep"] == ranks["tp"]
        assert ranks["pp"] == ranks["embd"] == [rank % 2, rank % 2 + 2]
        assert ranks["pos_embd"] == ([rank] if rank < 2 else None)
        assert ranks["mp"] == ranks["tp_ep_pp"] == [0, 1, 2, 3]
        assert found == {
            name: sum(2.0**member for member in members)
            for name, members in ranks.items()
            if members is not None
        }


def build_with_uneven_memberships() -> list[object]:
    pgs = ProcessGroups.from_sizes(pp=4)  # the middle stages are in fewer groups
    later = ProcessGroups.from_sizes(tp=2)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=later.tp)
    return [pgs.embd is not None, pgs.pos_embd is not None, total.item()]


def test_ranks_in_different_numbers_of_groups_can_build_again() -> None:
    assert run_ranks(build_with_uneven_memberships, 4) == [
        [True, True, 1.0],
        [False, False, 1.0],
        [False, False, 5.0],
        [True, False, 5.0],
    ]


def wrong_size() -> str:
    try:
        ProcessGroups.from_sizes(tp=3)
    except ValueError as error:
        return str(error)
    return "built"


def test_wrong_sizes_raise_on_all_ranks() -> None:
    first, second = run_ranks(wrong_size, 2)
    assert first == second
    assert "world size 2" in first
    assert "3" in first


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tp": 3}, r"8 is not divisible .*= 3"),
        ({"tp": 2, "ep": 3}, r"8 is not divisible .*2 \* 3 \* 1 = 6"),
        ({"cp": 0}, "cp must be at least 1, got 0"),
        ({"expt_tp": 0}, "expt_tp must be at least 1, got 0"),
        ({"order": "tp-zp"}, "'zp'"),
        ({"order": "tp-tp-dp"}, "twice"),
        ({"tp": 2, "order": "dp-pp"}, "lacks 'tp', whose size is 2"),
        ({"tp": 2, "cp": 2, "pp": 2, "order": "cp-pp-tp-dp"}, r"pp groups .*\[0, 2\] and \[0, 1\]"),
        ({"cp": 4, "hcp_sizes": [2, 3]}, r"\[2, 3\] is 6, but cp is 4"),
        ({"cp": 4, "hcp_sizes": []}, "is 1, but cp is 4"),
        ({"groups": ("tp", "qp")}, "'qp', which cannot be created"),
        ({"groups": ("dense_mesh",)}, "'dense_mesh', which cannot be created"),
        ({"groups": ("hcp",)}, "needs hcp_sizes"),
    ],
    ids=str,
)
def test_refused_arguments_name_the_numbers(fake_world, arguments, text: str) -> None:
    fake_world(1, 8)
    with pytest.raises(ValueError, match=text):
        ProcessGroups.from_sizes(**arguments)


def test_embedding_ranks_outside_of_their_group_are_refused(fake_world) -> None:
    fake_world(1, 8)
    with pytest.raises(ValueError, match=r"\[99\]"):
        ProcessGroups.from_sizes(embedding_ranks=lambda ranks: [99])


def test_a_single_string_is_no_collection_of_names() -> None:
    with pytest.raises(TypeError, match="the string 'tp'"):
        ProcessGroups.from_sizes(groups="tp")


def test_without_distributed_all_fields_are_none() -> None:
    pgs = ProcessGroups.from_sizes(hcp_sizes=[1, 1])
    assert all(getattr(pgs, field.name) is None for field in fields(pgs))
    assert (pgs.size("tp"), pgs.rank("tp"), pgs.ranks("tp")) == (1, 0, [0])


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "ep", "expt_tp"])
def test_without_distributed_sizes_above_one_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}=2.* needs torch.distributed"):
        ProcessGroups.from_sizes(**{name: 2})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"order": "xp"}, "'xp'"), ({"hcp_sizes": [2]}, "cp is 1"), ({"tp": 0}, "got 0")],
)
def test_without_distributed_arguments_are_checked_too(arguments, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ProcessGroups.from_sizes(**arguments)


def test_partial_construction_and_unknown_names(fake_world) -> None:
    fake_world(0, 2)
    pgs = ProcessGroups(tp=dist.group.WORLD)
    assert pgs.dp is None
    with pytest.raises(AttributeError):
        pgs.tensor_parallel  # noqa: B018
    with pytest.raises(AttributeError):
        pgs.tensor_parallel = None  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="tensor_parallel"):
        ProcessGroups(tensor_parallel=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ProcessGroups(dist.group.WORLD)  # type: ignore[misc]
    for ask in (pgs.size, pgs.rank, pgs.ranks):
        with pytest.raises(AttributeError, match="no field 'size'"):
            ask("size")
    pgs.dp = pgs.tp
    assert pgs.ranks("dp") == [0, 1]
    assert ProcessGroupCollection is ProcessGroups


def test_repr_shows_sizes_of_what_is_set(fake_world) -> None:
    assert repr(ProcessGroups()) == "ProcessGroups(empty)"
    fake_world(0, 8)
    pair, four = dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])
    pgs = ProcessGroups(pp=pair, tp=pair, hcp=[pair, four])
    assert repr(pgs) == "ProcessGroups(tp=2, pp=2, hcp=[2, 4])"
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert repr(ProcessGroups(dense_mesh=mesh)) == "ProcessGroups(dense_mesh=(2, 4))"
    assert repr(ProcessGroups(tp=-100)) == "ProcessGroups(tp=-100)"  # type: ignore[arg-type]
    dist.destroy_process_group()
    assert repr(pgs) == "ProcessGroups(tp=2, pp=2, hcp=[2, 4])"


def test_a_field_that_is_no_single_group_has_no_size(fake_world) -> None:
    fake_world(0, 8)
    pgs = ProcessGroups.from_sizes(cp=8, hcp_sizes=[2, 4])
    with pytest.raises(TypeError, match=r"hcp is not one process group but \[2, 4\]"):
        pgs.size("hcp")
    with pytest.raises(TypeError, match="dense_mesh is not one process group"):
        pgs.ranks("dense_mesh")
    empty = ProcessGroups()
    assert (empty.size("hcp"), empty.rank("hcp"), empty.ranks("dense_mesh")) == (1, 0, [0])


def test_a_non_member_in_a_field_is_an_error(fake_world) -> None:
    fake_world(3, 4)
    pgs = ProcessGroups(tp=dist.new_group([0, 1]))
    for ask in (pgs.size, pgs.rank, pgs.ranks):
        with pytest.raises(ValueError, match="rank 3 is not a member"):
            ask("tp")


def example_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    dense = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", "dp", "cp", "tp"))
    expert = init_device_mesh(
        "cpu", (2, 2, 4, 1), mesh_dim_names=("pp", "expt_dp", "ep", "expt_tp")
    )
    return dense, expert


@pytest.mark.parametrize("rank", [0, 5, 13])
def test_meshes_give_the_same_groups_as_sizes(fake_world, rank: int) -> None:
    fake_world(rank, 16)
    dense, expert = example_meshes()
    pgs = ProcessGroups.from_mesh(dense, expert)
    assert all_ranks(pgs) == all_ranks(ProcessGroups.from_sizes(**EXAMPLE))
    assert pgs.dense_mesh is dense
    assert pgs.expert_mesh is expert
    assert pgs.tp is dense["tp"].get_group()
    assert pgs.ep is expert["ep"].get_group()
    assert pgs.pp is dense["pp"].get_group()


def test_composites_are_flattened_in_the_mesh(fake_world) -> None:
    fake_world(5, 16)
    dense, _ = example_meshes()
    pgs = ProcessGroups.from_mesh(dense)
    assert pgs.dp_cp is dense["dp", "cp"]._flatten("dp_cp").get_group()
    assert pgs.mp is dense["pp", "tp"]._flatten("mp").get_group()
    assert pgs.intra_dp_cp is pgs.dp_cp


@pytest.mark.parametrize("reason", ["no flatten", "name taken"])
def test_composites_without_flatten_are_created(fake_world, monkeypatch, reason: str) -> None:
    fake_world(5, 16)
    dense, expert = example_meshes()
    if reason == "no flatten":
        monkeypatch.delattr(DeviceMesh, "_flatten")
    else:
        dense["pp", "dp"]._flatten("dp_cp")
    pgs = ProcessGroups.from_mesh(dense, expert)
    assert {name: pgs.ranks(name) for name in GROUP_NAMES} == {
        name: of_5 for name, _, of_5 in EXAMPLE_LISTS
    }


def test_missing_dimensions_stay_none(fake_world) -> None:
    fake_world(5, 8)
    pgs = ProcessGroups.from_mesh(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")))
    assert repr(pgs) == (
        "ProcessGroups(tp=2, mp=2, tp_cp=2, dp=4, dp_cp=4, tp_dp_cp=8, intra_dp_cp=4, "
        "dense_mesh=(4, 2))"
    )
    assert pgs.mp is pgs.tp_cp is pgs.tp
    assert pgs.dp_cp is pgs.dp
    assert pgs.tp_dp_cp is dist.group.WORLD


def test_dimensions_under_other_names(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    names = {"dp": ("replicate", "shard"), "intra_dp_cp": "shard", "inter_dist_opt": "replicate"}
    wanted = ("dp", "tp_dp_cp", "intra_dp_cp")
    pgs = ProcessGroups.from_mesh(mesh, names=names, groups=wanted)
    assert repr(pgs) == (
        "ProcessGroups(dp=4, tp_dp_cp=8, intra_dp_cp=2, inter_dist_opt=2, dense_mesh=(2, 2, 2))"
    )
    assert pgs.ranks("dp") == [1, 3, 5, 7]
    assert pgs.ranks("tp_dp_cp") == list(range(8))
    assert (pgs.ranks("intra_dp_cp"), pgs.ranks("inter_dist_opt")) == ([5, 7], [1, 5])


def test_experts_in_the_one_mesh(fake_world) -> None:
    fake_world(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("expt_dp", "ep", "expt_tp"))
    pgs = ProcessGroups.from_mesh(mesh)
    assert (pgs.ranks("ep"), pgs.ranks("tp_ep")) == ([5, 7], [4, 5, 6, 7])
    assert pgs.tp is None


def test_unflattened_meshes_of_one_world(fake_world) -> None:
    fake_world(5, 16)
    world = init_device_mesh("cpu", (16,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2, 2, 2), ("pp", "dp", "cp", "tp"))
    expert = world._unflatten(0, (2, 2, 4, 1), ("pp", "expt_dp", "ep", "expt_tp"))
    pgs = ProcessGroups.from_mesh(dense, expert)
    for name, _, of_5 in EXAMPLE_LISTS:
        assert pgs.ranks(name) == of_5, name


def test_slice_of_a_mesh_gives_what_torch_can_flatten(fake_world) -> None:
    fake_world(5, 16)
    dense, _ = example_meshes()
    pgs = ProcessGroups.from_mesh(dense["dp", "cp", "tp"])
    assert pgs.ranks("tp_dp_cp") == list(range(8))
    assert pgs.ranks("dp_cp") == [1, 3, 5, 7]
    with pytest.raises(ValueError, match=r"cannot create pos_embd .* 4 of 16 ranks"):
        ProcessGroups.from_mesh(dense["pp", "tp"])


def test_a_mesh_needs_distributed() -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    with pytest.raises(RuntimeError, match=r"from_mesh needs torch\.distributed"):
        ProcessGroups.from_mesh(mesh)


def part_of_the_world() -> list[object]:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    try:
        pgs = ProcessGroups.from_mesh(mesh)
    except ValueError as error:
        return [str(error)]
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=pgs.tp_dp_cp)
    backends = [g._get_backend(torch.device("cpu")) for g in (pgs.tp_dp_cp, dist.group.WORLD)]
    timeout, of_the_job = [backend.options._timeout for backend in backends]
    return [pgs.ranks("tp_dp_cp"), pgs.ranks("tp"), total.item(), timeout == of_the_job]


def test_rank_outside_the_mesh_takes_part_and_then_raises() -> None:
    *members, outside = run_ranks(part_of_the_world, 5)
    for rank, found in enumerate(members):
        pair = rank - rank % 2
        assert found == [[0, 1, 2, 3], [pair, pair + 1], 15.0, True]
    assert "rank 4 is not in the mesh" in outside[0]


def test_refused_meshes(fake_world) -> None:
    fake_world(5, 16)
    dense, expert = example_meshes()
    other = init_device_mesh("cpu", (4, 4), mesh_dim_names=("pp", "ep"))
    mixed = init_device_mesh("cpu", (4, 2, 2), mesh_dim_names=("pp", "dp", "ep"))
    for arguments, text in (
        (
            {"mesh": dense, "expert_mesh": other},
            r"different pp groups \(from the meshes\): \[0, 8\] and \[0, 4, 8, 12\]",
        ),
        ({"mesh": dense, "names": {"mb": "tp"}}, "unknown field 'mb'"),
        ({"mesh": dense, "names": {"dp": "data"}}, r"dp to 'data', which mesh does not have"),
        ({"mesh": dense, "names": {"dp": "tp"}}, "'tp' of mesh stands for tp and for dp"),
        ({"mesh": dense, "names": {"dp": ("dp", "dp")}}, "in which a dimension appears twice"),
        ({"mesh": mixed}, r"'ep' \(2 ranks\)\. .* names=\{'dp': \('dp', 'ep'\)\}"),
        ({"mesh": DeviceMesh("cpu", list(range(16)))}, "no dimension names"),
        ({"mesh": dense, "groups": ("hcp",)}, "levels are not known"),
        ({"mesh": dense, "groups": ("xp",)}, "'xp'"),
    ):
        with pytest.raises(ValueError, match=text):
            ProcessGroups.from_mesh(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a DeviceMesh, got list"):
        ProcessGroups.from_mesh([0, 1])  # type: ignore[arg-type]
    assert expert.ndim == 4
