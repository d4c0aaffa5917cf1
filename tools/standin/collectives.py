"""The process group of the stand-in: gloo's collectives under the rules of NCCL.

A collective runs on a separate stream. Its results appear when the program waits for them, until
then other streams read poison. Each rank compares its calls with those of the others through the
store, as NCCL would hang: collectives of a group, and sends and receives between each two ranks.
"""

import functools
import warnings
from collections import Counter, deque
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work
from torch.utils._pytree import tree_leaves, tree_map

from standin import recording
from standin.clocks import Key, clocks, current_stream, run_once
from standin.memory import NAME, to_host

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
# Formats of torch's process group for NCCL: ProcessGroupNCCL.cpp, getNcclDataType
_FORMATS = _FLOAT8 | {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
}  # fmt: skip
_UNEQUAL = {"allgather_", "alltoall_", "alltoall_base_", "gather_", "scatter_", "reduce_scatter_"}
_FIRST_STREAM = 1_000_000


class Communicator(ProcessGroupGloo):
    """A gloo group for tensors of the CPU, and the calls of this rank until now."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(store, rank, size, timeout=timeout)
        self.store, self.number = store, rank
        self.group: Any = ProcessGroup(store, rank, size)
        self.group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self)
        self.device: torch.device | None = None
        self.stream = _FIRST_STREAM + len(_kept)
        self.num_calls: Counter[str] = Counter()
        _kept.append(self)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: called if a rank is not part of a new group, with a bound device."""

    def refuse(self, name: str, tensor: torch.Tensor, bound: torch.device | None) -> None:
        """Raise for another device than the group's, and for what NCCL does not have."""
        self.device = bound or self.device or tensor.device
        dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        is_strided = not tensor.is_contiguous() and name not in ("send", "recv_")
        for is_refused, reason in (
            (tensor.device != self.device,
             f"Tensor found on device {tensor.device} but backend constrained to {self.device}"),
            (is_strided, "Tensors must be contiguous"),
            (dtype not in _FORMATS,
             f"Input tensor data type is not supported for NCCL process group: {dtype}"),
            ("reduce" in name and dtype in _FLOAT8, "Unsupported Float8 type for NCCL reduction"),
            (name == "recv_any_source_", "ProcessGroupNCCL does not support recvAnysource"),
        ):  # fmt: skip
            if is_refused:
                raise dist.DistBackendError(reason)

    def check_order(self, name: str, named: dict[str, Any], tensor: torch.Tensor) -> None:
        """Raise if another rank's call at this place of the order is a different one."""
        place, call = "the group", name
        if name in ("send", "recv_"):
            source, target = named.get("src", self.number), named.get("dst", self.number)
            place, call = "the ranks {} and {}".format(*sorted((source, target))), f"send {source}"
        if name not in _UNEQUAL:
            call += f" of {tensor.numel()} x {tensor.dtype}"
        number = self.num_calls[place]
        self.num_calls[place] += 1
        first = self.store.compare_set(f"order/{place}/{number}", "", call).decode()
        if first != call:
            raise dist.DistBackendError(
                f"call {number} of {place} is {call} on rank {self.number} and {first} on another "
                f"rank, at {recording.find_line()}: with NCCL both would hang"
            )


# An object that torch's C++ alone refers to would lose its methods.
_kept: list[Communicator] = []
_recent: deque[Any] = deque(maxlen=4096)


class DeviceWork(Work):
    """A collective under way. Its results are pairs of a tensor and its value on the host."""

    def __init__(self, work: Any, key: Key, results: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self._work, self._key, self._results = work, key, results
        self._finish_once = run_once(self._finish)  # gloo's receives never end a second time
        clocks.when_host_waits(key, self._finish_once)

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait. The host does not."""
        self._finish_once()
        clocks.wait(current_stream(self._key[0]).key, clocks.views[self._key])
        return True

    def _finish(self) -> None:
        self._work.wait()
        with torch.no_grad():
            for original, host in self._results:
                to_host(original).copy_(host.view(original.dtype))


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one collective on copies in the CPU's memory."""
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    group = ProcessGroup.unbox(named["process_group"])
    communicator: Any = group._get_backend(torch.device(NAME))
    name = op._schema.name.removeprefix("c10d::")
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        communicator.refuse(name, tensor, group.bound_device_id)
    communicator.check_order(name, named, tensors[0])
    recording.note("ops", f"c10d.{name}")
    if name == "barrier":
        recording.note("waits", "barrier")
    copies: dict[int, torch.Tensor] = {}

    def copy_all() -> None:
        for tensor in tensors:
            copied = to_host(tensor).clone(memory_format=torch.contiguous_format)
            is_float8 = tensor.dtype in _FLOAT8
            copies[id(tensor)] = copied.view(torch.uint8) if is_float8 else copied

    def convert(leaf: Any) -> Any:
        if leaf is named["process_group"]:
            return communicator.group.boxed()
        return copies[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

    stream = current_stream(tensors[0].device)
    key = (stream.device.index, communicator.stream)
    clocks.run(stream.key, tensors, [], copy_all)
    clocks.wait(key, stream.view)
    results = [] if name in ("send", "barrier") else tree_leaves(args[0])
    outcome = op(*tree_map(convert, args), **kwargs)
    clocks.run(key, tensors, results, lambda: None)
    work = outcome[-1] if isinstance(outcome, tuple) else outcome
    made = DeviceWork(Work.unbox(work), key, [(one, copies[id(one)]) for one in results])
    _recent.append(made)
    return (args[0], made.boxed()) if isinstance(outcome, tuple) else made.boxed()


def register_collectives() -> list[Any]:
    """Make the group the default one of the device. Returns the library, which must be kept."""
    dist.Backend.register_backend(f"{NAME}_nccl", Communicator, devices=[NAME])
    dist.Backend.backend_capability["gloo"].append(NAME)  # as CUDA: a bound world can make a group
    library: Any = torch.library.Library("c10d", "IMPL", "PrivateUse1")  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():  # torch has kernels for any device, which gloo refuses
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and has(name, "PrivateUse1"):
                op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
                library.impl(name.removeprefix("c10d::"), functools.partial(_run, op))
    return [library]
