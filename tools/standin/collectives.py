"""The process group of the stand-in: gloo's collectives under the rules of NCCL.

A collective runs on a separate stream. Its results appear when the program waits for them, until
then other streams read poison. Each rank compares its calls with those of the others through the
store, as NCCL would hang: collectives of a group, and sends and receives between each two ranks.
"""

from __future__ import annotations

import ctypes
import datetime
import warnings
from collections import Counter, deque
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Work
from torch.utils._pytree import tree_leaves, tree_map

from standin import recording
from standin.clocks import Key, RaceError, byte_range, clocks, current_stream
from standin.memory import NAME, is_device, to_host

BACKEND = f"{NAME}_nccl"
# Formats of torch's process group for NCCL: ProcessGroupNCCL.cpp, getNcclDataType
_FORMATS = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_EQUAL_SIZES = {"allreduce_", "broadcast_", "reduce_", "_allgather_base_", "_reduce_scatter_base_"}
_FIRST_STREAM = 1_000_000


class Communicator:
    """A gloo group for tensors of the CPU, and the calls of this rank until now."""

    def __init__(self, backend: Any, store: Any, rank: int, size: int) -> None:
        self.backend, self.store, self.rank = backend, store, rank
        self.group: Any = ProcessGroup(store, rank, size)
        self.group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        self.device: torch.device | None = None
        self.stream = _FIRST_STREAM + len(_communicators)
        self._num_calls: Counter[str] = Counter()

    def check_device(self, device: torch.device, bound: torch.device | None) -> None:
        """Raise if a tensor is on another device than the group's."""
        self.device = bound or self.device or device
        if device != self.device:
            raise dist.DistBackendError(
                f"Tensor found on device {device} but backend constrained to {self.device}"
            )

    def check_order(self, place: str, call: str) -> None:
        """Raise if another rank's call at this place of the order is a different one."""
        number = self._num_calls[place]
        self._num_calls[place] += 1
        first = self.store.compare_set(f"order/{place}/{number}", "", call).decode()
        if first != call:
            raise dist.DistBackendError(
                f"call {number} of {place} is {call} on rank {self.rank} and {first} on another "
                f"rank, at {recording.find_line()}: with NCCL both would hang"
            )


_communicators: list[Communicator] = []
# A work that torch's C++ alone refers to would lose its methods.
_recent: deque[Any] = deque(maxlen=4096)


class DeviceWork(Work):
    """A collective under way."""

    def __init__(self, work: Any, key: Key, number: int, results: Any, sources: Any) -> None:
        super().__init__()
        self._work, self._key, self._results = work, key, results
        self._device = torch.device(NAME, key[0])
        self._sources = [(t, _read_bytes(t)) for t in sources]
        self._line, self._is_done = recording.find_line(), False
        clocks.when_host_waits(key, number, self._finish)

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait. The host does not."""
        self._finish()
        clocks.wait(current_stream(self._device).key, clocks.read_view(self._key))
        return True

    def synchronize(self) -> None:
        """Let the current stream wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all ranks have arrived."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """Return the results."""
        return [original for original, _ in self._results]

    def get_future(self) -> Any:
        """Return a future of the results, for which the current stream has waited."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _finish(self) -> None:
        if self._is_done:  # gloo's receives never end a second time
            return
        self._is_done = True
        self._work.wait()
        sources, self._sources = self._sources, []
        if any(_read_bytes(tensor) != content for tensor, content in sources):
            raise RaceError(f"a tensor was changed before its collective had ended, {self._line}")
        with torch.no_grad():
            for original, host in self._results:
                to_host(original).copy_(host.view(original.dtype))


def _read_bytes(tensor: torch.Tensor) -> bytes:
    low, high = byte_range(tensor)
    return ctypes.string_at(low, high - low)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one collective on copies in the CPU's memory."""
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    group = ProcessGroup.unbox(named["process_group"])
    backend = group._get_backend(torch.device(NAME))
    communicator = next(one for one in _communicators if one.backend is backend)
    name = op._schema.name.removeprefix("c10d::")
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        communicator.check_device(tensor.device, group.bound_device_id)
    _check_formats(name, args)
    _check_order(communicator, name, named, tensors)
    recording.note_op(f"c10d.{name}")
    if name == "barrier":
        recording.note_wait("barrier")
    stream = current_stream(tensors[0].device).key
    key = (tensors[0].device.index, communicator.stream)
    clocks.wait(key, clocks.read_view(stream))
    number = clocks.launch(key)
    copies: dict[int, torch.Tensor] = {}

    def copy_to_host(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return communicator.group.boxed() if leaf is named["process_group"] else leaf
        if id(leaf) not in copies:
            with clocks.shown_to(stream, [leaf], []):
                copied = to_host(leaf).clone(memory_format=torch.contiguous_format)
            copies[id(leaf)] = copied.view(torch.uint8) if leaf.dtype in _FLOAT8 else copied
        return copies[id(leaf)]

    outcome = op(*tree_map(copy_to_host, args), **kwargs)
    work = outcome[-1] if isinstance(outcome, tuple) else outcome
    results = (
        []
        if name in ("send", "barrier")
        else [(leaf, copies[id(leaf)]) for leaf in tree_leaves(args[0]) if is_device(leaf)]
    )
    sources = tensors if named.get("async_op", True) and name != "barrier" else []
    made = DeviceWork(Work.unbox(work), key, number, results, sources)
    for original, _ in results:
        clocks.wrote(original, key, number)
    _recent.append(made)
    return (args[0], made.boxed()) if isinstance(outcome, tuple) else made.boxed()


def _check_formats(name: str, args: Any) -> None:
    for value in args:
        flat = value if isinstance(value, list) else [value]
        for tensor in (leaf for leaf in flat if isinstance(leaf, torch.Tensor)):
            if not tensor.is_contiguous() and name not in ("send", "recv_", "recv_any_source_"):
                raise ValueError("Tensors must be contiguous")
            real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
            if real not in _FORMATS:
                raise TypeError(
                    f"Input tensor data type is not supported for NCCL process group: {real}"
                )
            if "reduce" in name and real in _FLOAT8:
                raise TypeError("Unsupported Float8 type for NCCL reduction")


def _check_order(
    communicator: Communicator, name: str, named: dict[str, Any], tensors: list[torch.Tensor]
) -> None:
    size = f"{tensors[0].numel()} x {tensors[0].dtype}"
    if name == "recv_any_source_":
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")
    if name in ("send", "recv_"):
        pair = (
            (communicator.rank, named["dst"])
            if name == "send"
            else (named["src"], communicator.rank)
        )
        place = "the ranks {} and {}".format(*sorted(pair))
        communicator.check_order(place, f"send {pair[0]} to {pair[1]} of {size}")
    else:
        communicator.check_order("the group", f"{name} of {size}" if name in _EQUAL_SIZES else name)


class _Gloo(ProcessGroupGloo):
    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: called if a rank is not part of a new group, with a bound device."""


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    backend = _Gloo(store, rank, size, timeout=timeout)
    _communicators.append(Communicator(backend, store, rank, size))
    return backend


def register_collectives() -> list[Any]:
    """Make the group the default one of the device. Returns the library, which must be kept."""
    dist.Backend.register_backend(BACKEND, _create, devices=[NAME])
    make_library: Any = torch.library.Library
    library = make_library("c10d", "IMPL", "PrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if name.startswith("c10d::") and has(name, "PrivateUse1"):
            op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            with warnings.catch_warnings():  # torch has kernels for any device, which gloo refuses
                warnings.simplefilter("ignore")
                library.impl(name.removeprefix("c10d::"), _bind(op))
    return [library]


def _bind(op: Any) -> Any:
    return lambda *args, **kwargs: _run(op, *args, **kwargs)
