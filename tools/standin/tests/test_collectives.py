"""Collectives give gloo's numbers, late, and are refused as NCCL refuses them."""

import math

import pytest
import torch
import torch.distributed as dist

from rank_testing import RankFailure, run_ranks
from standin.clocks import RaceError
from standin.recording import HostWaitError, no_host_waits

GROUP = "standin:standin_nccl"


def here(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).to("standin")


def all_kinds():
    rank, results = dist.get_rank(), {}
    device = torch.device("standin", rank)
    with no_host_waits():
        summed = torch.full((2,), rank + 1.0, device=device)
        dist.all_reduce(summed)
        sent = torch.full((2,), rank + 1.0, device=device)
        dist.broadcast(sent, 1)
        gathered = torch.empty(4, device=device)
        dist.all_gather_into_tensor(gathered, torch.full((2,), rank + 1.0, device=device))
        listed = [torch.empty(2, device=device) for _ in range(2)]
        dist.all_gather(listed, torch.full((2,), rank + 1.0, device=device))
        part = torch.empty(1, device=device)
        dist.reduce_scatter_tensor(part, torch.arange(2.0, device=device) + rank)
        swapped = torch.empty(2, device=device)
        dist.all_to_all_single(swapped, torch.arange(2.0, device=device) + 10 * rank)
        passed = torch.full((2,), 5.0, device=device)
        if rank:
            dist.recv(passed, 0)
        else:
            dist.send(passed * 2, 1)
    dist.barrier()
    for name, value in [*locals().items()]:
        if isinstance(value, torch.Tensor):
            assert value.device == device
            results[name] = value.tolist()
    assert [one.tolist() for one in listed] == [[1.0, 1.0], [2.0, 2.0]]
    described = [None, None]
    dist.all_gather_object(described, {"rank": rank})
    assert described == [{"rank": 0}, {"rank": 1}]
    return results


def test_collectives_give_the_numbers_of_gloo():
    first, second = run_ranks(all_kinds, 2, init=GROUP, timeout_s=60)
    for one in (first, second):
        assert one["summed"] == [3.0, 3.0]
        assert one["sent"] == [2.0, 2.0]
        assert one["gathered"] == [1.0, 1.0, 2.0, 2.0]
    assert (first["part"], second["part"]) == ([1.0], [3.0])
    assert (first["swapped"], second["swapped"]) == ([0.0, 10.0], [1.0, 11.0])
    assert second["passed"] == [10.0, 10.0]


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
    for source in (tensor, late):  # written in place, and read
        work = dist.all_gather_into_tensor(gathered, late, async_op=True)
        again = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RaceError, match=r"is changed at \S*test_collectives.py:\d+"):
            source.fill_(7)
        work.wait()
        again.wait()
        source.fill_(2)
    with pytest.raises(HostWaitError), no_host_waits():
        dist.barrier()
    dist.barrier()
    return early.tolist(), late.tolist(), elsewhere.tolist(), (gathered + 0).tolist()


def test_results_are_poison_until_the_stream_has_waited():
    for early, late, elsewhere, after in run_ranks(too_early, 2, init=GROUP, timeout_s=60):
        assert math.isnan(early[0])
        assert late == [2.0]
        assert all(map(math.isnan, elsewhere))
        assert after == [2.0, 2.0]


REFUSED = {
    "No backend type associated with device type cpu": lambda: dist.all_reduce(torch.ones(2)),
    "backend constrained to standin:0": lambda: dist.all_reduce(torch.ones(2, device="standin:1")),
    "supported for NCCL process group: torch.int16": lambda: dist.all_reduce(
        here(1, dtype=torch.int16)
    ),
    "Tensors must be contiguous": lambda: dist.all_reduce(torch.ones(2, 3, device="standin").t()),
    "Float8": lambda: dist.all_reduce(here(1.0).to(torch.float8_e4m3fn)),
}


def refused():
    dist.all_reduce(here(1.0))
    for text, call in REFUSED.items():
        with pytest.raises(Exception, match=text):
            call()
    dist.all_reduce(here(1, dtype=torch.int32))
    dist.broadcast(here(1.0).to(torch.float8_e4m3fn), 0)


def test_tensors_that_nccl_refuses():
    run_ranks(refused, 1, init=GROUP, timeout_s=60)


def mixed_order():
    tensor = here(1.0)
    if dist.get_rank():
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)


def both_send_first():
    tensor, peer = here(1.0), 1 - dist.get_rank()
    dist.isend(tensor, peer)
    dist.irecv(torch.empty_like(tensor), peer).wait()


def in_turn():
    tensor, peer = here(float(dist.get_rank())), 1 - dist.get_rank()
    received = torch.empty_like(tensor)
    works = [lambda: dist.isend(tensor, peer), lambda: dist.irecv(received, peer)]
    for work in [start() for start in (works if peer else works[::-1])]:
        work.wait()
    return received.tolist()


@pytest.mark.parametrize("program", [mixed_order, both_send_first])
def test_calls_in_another_order_are_found(program):
    with pytest.raises(RankFailure, match="with NCCL both would hang"):
        run_ranks(program, 2, init=GROUP, timeout_s=60)


def test_sends_and_receives_in_one_order():
    assert run_ranks(in_turn, 2, init=GROUP, timeout_s=60) == [[1.0], [0.0]]
