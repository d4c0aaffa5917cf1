import math

import pytest
import torch
import torch.distributed as dist

from mcore.tensor import (
    get_data_parallel_group_if_dtensor,
    get_full_tensor_if_necessary,
    is_dtensor,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
    resolve_data_parallel_group,
    to_local_if_dtensor,
)
from rank_testing import run_ranks

OTHERS = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), None, "text", 3]


@pytest.mark.parametrize("value", OTHERS)
def test_anything_else_is_returned_as_it_is(value):
    assert to_local_if_dtensor(value) is value
    assert get_full_tensor_if_necessary(value) is value
    assert get_data_parallel_group_if_dtensor(value) is None
    assert not is_dtensor(value)


def test_nothing_shared_among_plain_tensors():
    assert resolve_data_parallel_group(OTHERS) is None
    assert resolve_data_parallel_group([]) is None


def mesh(*shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def distribute(tensor, device_mesh, *placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, device_mesh, list(placements))


def placements(text):
    """S0 is Shard(0), R is Replicate(), P is Partial()."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    made = {"R": Replicate, "P": Partial}
    return [Shard(int(p[1:])) if p[0] == "S" else made[p]() for p in text.split()]


def full_if_necessary(length, mesh_shape, where):
    from torch.distributed.tensor.debug import CommDebugMode

    tensor = distribute(torch.arange(length), mesh(*mesh_shape), *placements(where))
    with CommDebugMode() as communication:
        result = get_full_tensor_if_necessary(tensor)
    assert type(result) is torch.Tensor
    return result.tolist(), communication.get_total_counts() > 0


FULL = [
    (8, (4,), "S0", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (5, (4,), "S0", [[0, 1, 2, 3, 4]] * 4),
    (3, (4,), "S0", [[0, 1, 2]] * 4),
    (2, (2, 2), "S0 S0", [[0, 1]] * 4),
    (3, (2, 2), "S0 S0", [[0, 1, 2]] * 4),
    (2, (4,), "R", [[0, 1]] * 4),
    (0, (4,), "S0", [[]] * 4),
]


def all_full_if_necessary():
    return [full_if_necessary(*arguments) for *arguments, _ in FULL]


@pytest.fixture(scope="module")
def full():
    """The results of all ranks in each case."""
    return [*zip(*run_ranks(all_full_if_necessary, 4), strict=True)]


@pytest.mark.parametrize("case", range(len(FULL)), ids=lambda case: "-".join(map(str, FULL[case])))
def test_full_where_a_rank_would_be_empty(full, case):
    length, _, where, expected = FULL[case]
    assert [values for values, _ in full[case]] == expected
    communicated = length > 0 and where != "R" and len(expected[0]) == length
    assert [communicates for _, communicates in full[case]] == [communicated] * 4


def always_local():
    results = []
    for length in (0, 1, 5):
        tensor = distribute(torch.arange(length), mesh(1), *placements("S0"))
        results.append(get_full_tensor_if_necessary(tensor).tolist())
    return results


def test_in_a_world_of_one_it_is_always_local():
    assert run_ranks(always_local, 1) == [[[], [0], [0, 1, 2, 3, 4]]]


def aliases():
    world = dist.get_world_size()
    even = distribute(torch.zeros(2 * world), mesh(world), *placements("S0"))
    get_full_tensor_if_necessary(even).fill_(7)
    to_local_if_dtensor(even)[0] = 8
    uneven = distribute(torch.zeros(world - 1), mesh(world), *placements("S0"))
    get_full_tensor_if_necessary(uneven).fill_(7)
    return even.full_tensor().tolist(), uneven.full_tensor().tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_a_local_shard_aliases_and_a_full_tensor_does_not(world):
    assert run_ranks(aliases, world) == [([8.0, 7.0] * world, [0.0] * (world - 1))] * world


def local_of_a_partial():
    from torch.distributed.tensor import DTensor

    value = torch.full((2,), float(dist.get_rank() + 1))
    tensor = DTensor.from_local(value, mesh(2), placements("P"))
    return (
        to_local_if_dtensor(tensor).tolist(),
        get_full_tensor_if_necessary(tensor).tolist(),
        tensor.full_tensor().tolist(),
    )


def test_a_partial_value_is_not_reduced():
    assert run_ranks(local_of_a_partial, 2) == [
        ([1.0, 1.0], [1.0, 1.0], [3.0, 3.0]),
        ([2.0, 2.0], [2.0, 2.0], [3.0, 3.0]),
    ]


def local_of_a_parameter():
    tensor = distribute(torch.arange(4.0), mesh(2), *placements("S0"))
    parameter = torch.nn.Parameter(tensor)
    local = to_local_if_dtensor(parameter)
    full = get_full_tensor_if_necessary(
        torch.nn.Parameter(distribute(torch.arange(1.0), mesh(2), *placements("S0")))
    )
    local.add_(10)
    return (
        to_local_if_dtensor(tensor) is tensor._local_tensor,
        local is parameter._local_tensor,
        local._base is None,
        local.requires_grad == parameter._local_tensor.requires_grad,
        full.requires_grad,
        parameter.full_tensor().tolist(),
    )


def test_the_local_shard_is_the_very_tensor():
    expected = (True, True, True, True, False, [10.0, 11.0, 12.0, 13.0])
    assert run_ranks(local_of_a_parameter, 2) == [expected] * 2


def local_of_a_pending_collective():
    tensor = distribute(torch.arange(4.0), mesh(2), *placements("S0"))
    pending = tensor.redistribute(placements=placements("R"), async_op=True)
    kind = type(pending._local_tensor).__name__
    local = to_local_if_dtensor(pending)
    full = get_full_tensor_if_necessary(
        tensor.redistribute(placements=placements("R"), async_op=True)
    )
    return kind, type(local).__name__, local.tolist(), type(full).__name__, full.tolist()


def test_a_pending_collective_is_waited_for():
    values = [0.0, 1.0, 2.0, 3.0]
    assert (
        run_ranks(local_of_a_pending_collective, 2)
        == [("AsyncCollectiveTensor", "Tensor", values, "Tensor", values)] * 2
    )


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return None


def groups_of_one_mesh_dimension():
    device_mesh = mesh(2)
    tensor = distribute(torch.arange(4.0), device_mesh, *placements("S0"))
    plain = torch.ones(2)
    own = device_mesh.get_group()
    same_ranks = dist.new_group([0, 1])
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return {
        "own": get_data_parallel_group_if_dtensor(tensor) is own,
        "given": get_data_parallel_group_if_dtensor(tensor, own) is own,
        "same ranks": get_data_parallel_group_if_dtensor(tensor, same_ranks) is own,
        "plain": get_data_parallel_group_if_dtensor(plain, own),
        "by name": get_data_parallel_group_if_dtensor(tensor, mesh_dim=0) is own,
        "both orders": {
            resolve_data_parallel_group(order, same_ranks) is own
            for order in ([tensor, plain], [plain, tensor], [plain, tensor, plain, tensor])
        },
        "none": resolve_data_parallel_group([plain, plain], own),
        "other": error_of(get_data_parallel_group_if_dtensor, tensor, alone),
        "others": error_of(resolve_data_parallel_group, [plain, tensor], alone),
    }


def test_the_group_of_a_mesh_with_one_dimension():
    for rank, found in enumerate(run_ranks(groups_of_one_mesh_dimension, 2)):
        for name in ("own", "given", "same ranks", "by name"):
            assert found[name] is True, name
        assert found["both orders"] == {True}
        assert found["plain"] is None
        assert found["none"] is None
        for kind, message in (found["other"], found["others"]):
            assert kind == "ValueError"
            assert "[0, 1]" in message
            assert f"[{rank}]" in message


def groups_of_two_mesh_dimensions():
    device_mesh = mesh(2, 2, names=("dp", "tp"))
    tensor = distribute(torch.arange(4.0), device_mesh, *placements("S0 R"))
    one_dimensional = distribute(torch.arange(4.0), device_mesh["dp"], *placements("S0"))
    other = distribute(torch.arange(4.0), device_mesh["tp"], *placements("S0"))
    group = device_mesh.get_group("dp")
    return (
        error_of(get_data_parallel_group_if_dtensor, tensor),
        get_data_parallel_group_if_dtensor(tensor, mesh_dim="dp") is group,
        get_data_parallel_group_if_dtensor(tensor, mesh_dim=0) is group,
        get_data_parallel_group_if_dtensor(tensor, mesh_dim="tp") is device_mesh.get_group("tp"),
        resolve_data_parallel_group([tensor, torch.ones(1)], mesh_dim="dp") is group,
        resolve_data_parallel_group([one_dimensional, one_dimensional]) is group,
        error_of(resolve_data_parallel_group, [one_dimensional, other]),
        [
            error_of(get_data_parallel_group_if_dtensor, tensor, mesh_dim=wrong)
            for tensor in (tensor, one_dimensional)
            for wrong in ("pp", 2, -3, 1.5)
        ],
    )


def test_a_mesh_with_two_dimensions_needs_a_name():
    for unnamed, *found, conflict, wrong in run_ranks(groups_of_two_mesh_dimensions, 4):
        assert unnamed[0] == "ValueError"
        assert "('dp', 'tp')" in unnamed[1]
        assert "mesh_dim" in unnamed[1]
        assert found == [True] * 5
        assert conflict[0] == "ValueError"
        for kind, message in wrong:
            assert kind == "ValueError"
            assert message.startswith("mesh_dim is ")
            assert "'dp'" in message


def multi_tensor_operations():
    tensor = distribute(torch.arange(4.0), mesh(1), *placements("S0"))
    lists = [[torch.ones(4)], [tensor]]
    return (
        error_of(local_multi_tensor_l2_norm, 1, None, lists, False),
        error_of(local_multi_tensor_scale, 1, None, lists, 2.0),
        tensor.full_tensor().tolist(),
    )


def test_multi_tensor_operations_refuse_dtensors():
    ((*errors, values),) = run_ranks(multi_tensor_operations, 1)
    for kind, message in errors:
        assert kind == "TypeError"
        assert "tensor_lists[1][0] is a DTensor" in message
        assert "to_local_if_dtensor" in message
    assert values == [0.0, 1.0, 2.0, 3.0]


@pytest.fixture
def fake_world(request):
    """A process group of many ranks in this process, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("fake_world", [64, 1024], indirect=True)
@pytest.mark.parametrize(
    ("factor", "is_local"), [(1.0, True), (2.0, True), (1.0 + 1 / 64, False), (0.5, False)]
)
def test_the_decision_in_large_worlds(fake_world, factor, is_local):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.debug import CommDebugMode

    device_mesh = mesh(8, fake_world // 8)
    length = int(fake_world * factor)
    first_of_8 = math.ceil(length / 8)
    local = torch.zeros(math.ceil(first_of_8 / (fake_world // 8)))
    tensor = DTensor.from_local(
        local, device_mesh, placements("S0 S0"), shape=(length,), stride=(1,), run_check=False
    )
    with CommDebugMode() as communication:
        result = get_full_tensor_if_necessary(tensor)
    assert (communication.get_total_counts() == 0) is is_local
    assert result.shape == ((local.numel(),) if is_local else (length,))


@pytest.mark.parametrize("fake_world", [2], indirect=True)
def test_a_tensor_without_elements_is_not_gathered(fake_world):
    from torch.distributed.tensor.debug import CommDebugMode

    tensor = distribute(torch.zeros(0, 3), mesh(fake_world), *placements("S0"))
    with CommDebugMode() as communication:
        assert get_full_tensor_if_necessary(tensor) is tensor._local_tensor
    assert communication.get_total_counts() == 0
