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
    with pytest.raises(HostWaitError, match=rf"test_recording.py:{line}$"), no_host_waits():
        wait(tensor)
    with pytest.raises(HostWaitError), no_host_waits(), contextlib.suppress(AssertionError):
        wait(tensor)  # swallowed


NO_WAITS = {
    "kernels": lambda x: (x * 2).sum().add_(1),
    "pinned to the device": lambda x: x.copy_(torch.ones(4).pin_memory(), non_blocking=True),
    "pageable to the device": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "on the device": lambda x: x.clone().copy_(x),
    "index": lambda x: x[x.long()],
    "fill by a mask": lambda x: x.masked_fill_(x > 1, 0),
    "number by a mask": lambda x: x.__setitem__(x > 1, 0),
    "stream": lambda x: torch.Stream(x.device).wait_stream(torch.accelerator.current_stream()),
    "repeats of a known number": lambda x: torch.repeat_interleave(x.long(), output_size=6),
}


@pytest.mark.parametrize("work", NO_WAITS.values(), ids=NO_WAITS)
def test_work_without_waits_is_permitted(accelerator, work):
    tensor = torch.arange(4.0, device=accelerator)
    with no_host_waits():
        work(tensor)


def test_waits_of_the_packages_name_their_line(accelerator):
    installed = "/venv/site-packages/mcore/tensor/made.py"
    with recorded() as record:
        norm = calc_norm([torch.ones(3, device=accelerator)])
        float(norm)
        exec(compile("value.item()", installed, "exec"), {"value": norm})
    [(what, line), (_, made)] = record.waits
    assert what == "_local_scalar_dense"
    assert line.startswith("tools/standin/tests/test_recording.py:")
    assert made == "packages/mcore/tensor/made.py:1"
    [line] = [line for name, line in record.ops if name == "_foreach_norm"]
    assert re.match(r"packages/mcore-tensor/src/.*\.py:\d+$", line)


def test_launches_and_allocations_have_a_limit(accelerator):
    tensor = torch.ones(4, device=accelerator)
    with launches(at_most=2, allocations=1):
        tensor.view(2, 2).t()[0].add_(1)
        torch.empty(2, device=accelerator).zero_()
    too_many = r"2 x add at .*test_recording.py:\d+(.|\n)*2 x allocation at"
    for limits in ({"at_most": 1}, {"at_most": 2, "allocations": 1}):
        with pytest.raises(TooManyLaunchesError, match=too_many), launches(**limits):
            [tensor + number for number in range(2)]


def test_lists_of_one_format_are_one_launch(accelerator):
    tensors = [torch.ones(n, device=accelerator) for n in (2, 3, 4)]
    with launches(at_most=1):
        torch._foreach_mul_(tensors, 2.0)
    narrow = [tensor.bfloat16() for tensor in tensors]
    with pytest.raises(TooManyLaunchesError, match="3 x _foreach_add_"), launches(at_most=2):
        torch._foreach_add_(tensors, narrow)
