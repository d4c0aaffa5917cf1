"""Private torch names mean what checkpoints assume; bytes of tensors."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from mcore.parallel.tensor_memory import bytes_of
from mcore.parallel.torch_compat import METADATA_FILE, group_timeout
from rank_testing import run_ranks


def test_name_of_the_index_is_torchs() -> None:
    from torch.distributed.checkpoint import filesystem

    assert filesystem._metadata_fn == METADATA_FILE


def chunk_of_a_dtensor() -> tuple[object, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    long = datetime.timedelta(seconds=777)  # no other group has it
    assert group_timeout(dist.new_group(timeout=long)) == long
    placements = (Shard(0), Replicate(), _StridedShard(0, split_factor=2))
    factors = [getattr(placement, "split_factor", None) for placement in placements]
    [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return dist.get_rank(), (tuple(chunk.offsets), tuple(chunk.sizes)), factors


def test_chunk_and_split_factor_of_dtensors() -> None:
    assert run_ranks(chunk_of_a_dtensor, 2) == [
        (0, ((0, 0), (2, 2)), [None, None, 2]),
        (1, ((2, 0), (1, 2)), [None, None, 2]),
    ]


def test_bytes_of_tensors_equal_those_of_numpy() -> None:
    for tensor in (torch.arange(6).reshape(2, 3).T, torch.zeros(0), torch.tensor(1.5)):
        assert bytes_of(tensor) == tensor.contiguous().numpy().tobytes()
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert bytes_of(lazy) == lazy.resolve_conj().numpy().tobytes()
    assert bytes_of(lazy.imag) == lazy.imag.resolve_neg().numpy().tobytes()
