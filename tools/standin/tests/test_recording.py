"""Host waits and launches are counted as on CUDA, with the line of the source."""

import contextlib
import re

import pytest
import torch

from mcore.tensor import calc_norm
from standin.recording import HostWaitError, TooManyLaunchesError, launches, no_host_waits, recorded

WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "to the CPU": lambda x: x.cpu(),
    "to pageable memory": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "from the CPU": lambda x: x.copy_(torch.ones(4)),
    "tensor of numbers": lambda x: torch.tensor([1, 2], device=x.device),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "index of the CPU": lambda x: x[torch.tensor([1])],
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: torch.accelerator.synchronize(),
    "stream": lambda x: torch.accelerator.current_stream().synchronize(),
    "event": lambda x: torch.accelerator.current_stream().record_event().synchronize(),
    "number of repeats": lambda x: torch.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_waits_are_found(accelerator, wait):
    tensor = torch.arange(4.0, device=accelerator)
    wait(tensor)  # permitted outside
    line = wait.__code__.co_firstlineno
    with (
        pytest.raises(HostWaitError, match=rf"tests/test_recording.py:{line}$"),
        no_host_waits(),
    ):
        wait(tensor)


NO_WAITS = {
    "kernels": lambda x: (x * 2).sum().add_(1),
    "pinned to the device": lambda x: x.copy_(torch.ones(4).pin_memory(), non_blocking=True),
    "pageable to the device": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "on the device": lambda x: x.clone().copy_(x),
    "index": lambda x: x[x.long()],
    "fill by a mask": lambda x: x.masked_fill_(x > 1, 0),
    "number by a mask": lambda x: x.__setitem__(x > 1, 0),
    "event": lambda x: torch.accelerator.current_stream().record_event(),
    "waiting stream": lambda x: torch.Stream(x.device).wait_stream(
        torch.accelerator.current_stream()
    ),
    "fill": lambda x: torch.full((3,), 2.0, device=x.device),
    "repeats of a known number": lambda x: torch.repeat_interleave(x.long(), output_size=6),
}


@pytest.mark.parametrize("work", NO_WAITS.values(), ids=NO_WAITS)
def test_work_without_waits_is_permitted(accelerator, work):
    tensor = torch.arange(4.0, device=accelerator)
    with no_host_waits():
        work(tensor)


def test_a_swallowed_wait_is_raised_at_the_end(accelerator):
    tensor = torch.ones(1, device=accelerator)

    def swallow():
        with no_host_waits(), contextlib.suppress(AssertionError):
            tensor.item()

    with pytest.raises(HostWaitError):
        swallow()


def test_waits_of_the_packages_name_their_line(accelerator):
    norm = calc_norm([torch.ones(3, device=accelerator)])
    with recorded() as record:
        float(norm)
        calc_norm([torch.ones(3, device=accelerator)])
    [(what, line)] = record.waits
    assert (what, line.split(":")[0]) == (
        "_local_scalar_dense",
        "tools/standin/tests/test_recording.py",
    )
    assert all(re.match(r"packages/mcore-tensor/src/.*\.py:\d+$", line) for name, line in record.ops
               if name == "_foreach_norm")  # fmt: skip


def test_launches_and_allocations_have_a_limit(accelerator):
    tensor = torch.ones(4, device=accelerator)
    with launches(at_most=2, allocations=1):
        tensor.view(2, 2).t()[0].add_(1)
        torch.empty(2, device=accelerator).zero_()
    with (
        pytest.raises(TooManyLaunchesError, match=r"2 x add at .*test_recording.py:\d+"),
        launches(at_most=1),
    ):
        [tensor.add_(number) for number in range(2)]
    with (
        pytest.raises(TooManyLaunchesError, match="1 x allocation at"),
        launches(at_most=9, allocations=0),
    ):
        tensor + 1


def test_lists_of_one_format_are_one_launch(accelerator):
    tensors = [torch.ones(n, device=accelerator) for n in (2, 3, 4)]
    with launches(at_most=1):
        torch._foreach_mul_(tensors, 2.0)
    with recorded() as record:
        torch._foreach_add_(tensors, [t.bfloat16() for t in tensors])
    assert record.ops["_foreach_add_", next(reversed(record.ops))[1]] == 3


def test_backward_runs_on_the_device(accelerator):
    tensor = torch.ones(4, device=accelerator, requires_grad=True)
    loss = (tensor * 3).sum()
    with no_host_waits(), recorded() as record:
        loss.backward()
    assert sum(record.ops.values()) > 0
    assert tensor.grad.tolist() == [3.0] * 4
