"""Collectives give gloo's numbers, late, and are refused as NCCL refuses them."""

import math

import pytest
import torch
import torch.distributed as dist

from rank_testing import RankFailure, run_ranks
from standin.clocks import RaceError
from standin.recording import HostWaitError, no_host_waits

GROUP = "standin:standin_nccl"


def here(*values):
    return torch.tensor(values).to("standin")


def all_kinds():
    rank, mine = dist.get_rank(), here(dist.get_rank() + 1.0, 5.0)
    summed, sent, passed, swapped = mine.clone(), mine.clone(), mine * 2, mine.clone()
    gathered, part = mine.new_empty(4), mine.new_empty(1)
    listed = [torch.empty_like(mine) for _ in range(2)]
    with no_host_waits():
        dist.all_reduce(summed)
        dist.broadcast(sent, 1)
        dist.all_gather_into_tensor(gathered, mine)
        dist.all_gather(listed, mine)
        dist.reduce_scatter_tensor(part, mine)
        dist.all_to_all_single(swapped, mine)
        if rank:
            dist.recv(passed, 0)
        else:
            dist.send(passed, 1)
    with pytest.raises(HostWaitError), no_host_waits():
        dist.barrier()
    dist.barrier()
    described = [None, None]
    dist.all_gather_object(described, {"rank": rank})
    assert described == [{"rank": 0}, {"rank": 1}]
    found = (summed, sent, gathered, *listed, part, swapped, passed)
    assert {tensor.device for tensor in found} == {torch.device("standin", rank)}
    return [tensor.tolist() for tensor in found]


def test_collectives_give_the_numbers_of_gloo():
    same = [[3.0, 10.0], [2.0, 5.0], [1.0, 5.0, 2.0, 5.0], [1.0, 5.0], [2.0, 5.0]]
    first, second = run_ranks(all_kinds, 2, init=GROUP)
    assert first == [*same, [3.0], [1.0, 2.0], [2.0, 10.0]]
    assert second == [*same, [10.0], [5.0, 5.0], [2.0, 10.0]]


def too_early():
    tensor = here(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    early = tensor * 1
    work.wait()
    late = tensor * 1
    side = torch.Stream("standin")
    gathered = torch.empty(2, device="standin")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        dist.all_gather_into_tensor(gathered, late, async_op=True).wait()
    elsewhere = gathered + 0
    torch.accelerator.current_stream().wait_stream(side)
    for source in (tensor, late):  # changed by one collective, and read by another
        work = dist.all_reduce(tensor, async_op=True)
        other = dist.all_gather_into_tensor(gathered, late, async_op=True)
        with pytest.raises(RaceError, match=r"is changed at \S*test_collectives.py:\d+"):
            source.fill_(7)
        work.wait()
        other.wait()
        source.fill_(2)
    return early.tolist(), late.tolist(), elsewhere.tolist(), (gathered + 0).tolist()


def test_results_are_poison_and_sources_in_use_until_the_stream_has_waited():
    for early, late, elsewhere, after in run_ranks(too_early, 2, init=GROUP):
        assert all(map(math.isnan, early + elsewhere))
        assert late + after == [2.0] * 3


REFUSED = {
    "No backend type associated with device type cpu": lambda: dist.all_reduce(torch.ones(2)),
    "backend constrained to standin:0": lambda: dist.all_reduce(torch.ones(2, device="standin:1")),
    "supported for NCCL process group: torch.int16": lambda: dist.all_reduce(here(1.0).short()),
    "Tensors must be contiguous": lambda: dist.all_reduce(torch.ones(2, 3, device="standin").t()),
    "Float8": lambda: dist.all_reduce(here(1.0).to(torch.float8_e4m3fn)),
    "recvAnysource": lambda: dist.recv(here(1.0)),
}


def refused():
    dist.all_reduce(here(1.0))
    for text, call in REFUSED.items():
        with pytest.raises(Exception, match=text):
            call()
    dist.all_reduce(here(1.0).int())
    dist.broadcast(here(1.0).to(torch.float8_e4m3fn), 0)


def test_tensors_that_nccl_refuses():
    run_ranks(refused, 1, init=GROUP)


def mixed_order():
    (dist.all_reduce if dist.get_rank() else lambda tensor: dist.broadcast(tensor, 0))(here(1.0))


def both_send_first():
    dist.isend(here(1.0), 1 - dist.get_rank())
    dist.irecv(here(1.0), 1 - dist.get_rank()).wait()


@pytest.mark.parametrize("program", [mixed_order, both_send_first])
def test_calls_in_another_order_are_found(program):
    with pytest.raises(RankFailure, match="with NCCL both would hang"):
        run_ranks(program, 2, init=GROUP)
