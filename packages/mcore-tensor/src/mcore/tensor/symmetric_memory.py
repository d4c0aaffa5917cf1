"""An allocation of symmetric memory that the ranks of a group share, if the hardware can."""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore.tensor.arithmetic import round_up_to_nearest_multiple
from mcore.tensor.buffers import checked_shape
from mcore.tensor.device import current_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_LARGEST = 1 << 50  # bytes: larger than any memory, and exact in the int64 of the agreement


def _compute_num_bytes(size_in_mb: float) -> int | TypeError | ValueError:
    """Return the size in bytes, or an error, which the caller raises after telling all ranks."""
    if not isinstance(size_in_mb, numbers.Real):
        return TypeError(f"size_in_mb must be a number, got {type(size_in_mb).__name__}")
    if not math.isfinite(size_in_mb):
        return ValueError(f"size_in_mb must be a finite number, got {size_in_mb!r}")
    num_bytes = int(size_in_mb * 1024 * 1024)
    if num_bytes <= 0:
        return ValueError(f"size_in_mb must be positive, at least one byte, got {size_in_mb}")
    if num_bytes > _LARGEST:
        return ValueError(f"size_in_mb must be at most {_LARGEST >> 20}, got {size_in_mb}")
    return num_bytes


def _describe_cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _find_usable_group(process_group: ProcessGroup | None) -> ProcessGroup | str:
    """Return the group to share memory in, or the reason why there is none."""
    distributed = torch.distributed
    if not distributed.is_available():
        return "this build of torch has no torch.distributed"
    if not distributed.is_initialized():
        return "torch.distributed is not initialised"
    group = distributed.group.WORLD if process_group is None else process_group
    if group is None or distributed.get_rank(group) < 0:
        return "this rank is not a member of the process group"
    return group


def _allocate_bytes(num_bytes: int) -> Tensor | str:
    """Return symmetric memory on this rank, or the reason for its absence. No communication."""
    device = current_device()
    if device.type == "cpu":
        return "no accelerator is available (no CUDA device), and CPU memory cannot be symmetric"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory
    except ImportError as error:
        return _describe_cause(error)
    try:
        return symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # NotImplementedError and OutOfMemoryError among them
        return _describe_cause(error)


def _all_ranks_agree(succeeded: bool, num_bytes: int, group: ProcessGroup) -> bool:
    """Return whether every rank succeeded, the same on every rank. One all-reduce (MIN)."""
    if torch.distributed.get_world_size(group) == 1:
        return succeeded
    devices = torch.distributed.get_backend_config(group)
    device = torch.device("cpu") if "cpu:" in devices else current_device()
    # The minimum of -num_bytes is minus the largest size: one reduction compares both ends.
    state = torch.tensor([succeeded, num_bytes, -num_bytes], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(state, op=torch.distributed.ReduceOp.MIN, group=group)
    all_succeeded, smallest, minus_largest = state.tolist()
    if smallest <= 0:
        raise ValueError(
            "size_in_mb is invalid on another rank of the group: "
            "pass the same positive number on every rank"
        )
    if smallest != -minus_largest:
        raise ValueError(
            f"size_in_mb differs between the ranks of the group: from {smallest} to "
            f"{-minus_largest} bytes, {num_bytes} on this rank: pass the same size on every rank"
        )
    return bool(all_succeeded)


class GlobalSymmetricMemoryBuffer:
    """A buffer that every rank of a group can access directly, for low-latency collectives.

    Creating it is a collective over the group: two all-reduces of three integers and, if all
    ranks could allocate, a rendezvous. All ranks succeed or none does. If symmetric memory is
    unavailable (no accelerator, no support, torch.distributed not initialised) the object is still
    created: ``available`` is False, ``init_failure_reason`` is the reason, and callers use ordinary
    collectives.

    Every request starts at the beginning of the buffer, so two results overlap by design.

    Args:
        size_in_mb: The size in MiB, an int or float, the same on every rank.
        process_group: The group of ranks that share the memory, None for the default group.

    Attributes:
        symm_buffer: The memory of this rank as a one-dimensional uint8 tensor, or None.
        symm_mem_hdl: The handle of the rendezvous, or None.
        init_failure_reason: Why there is no memory, or None.

    Raises:
        ValueError: On every rank, if the size is not positive and finite or differs between ranks.
        TypeError: The size is not a number. The other ranks raise ValueError.

    Example:
        >>> buffer = GlobalSymmetricMemoryBuffer(1, None)  # torch.distributed is not initialised
        >>> buffer.available, buffer.init_failure_reason
        (False, 'torch.distributed is not initialised')
        >>> buffer.maybe_get_tensor((2, 3), torch.bfloat16)
        {'tensor': None, 'handle': None}
    """

    def __init__(self, size_in_mb: float, process_group: ProcessGroup | None) -> None:
        num_bytes = _compute_num_bytes(size_in_mb)
        self.symm_buffer: Tensor | None = None
        self.symm_mem_hdl: Any = None
        self.init_failure_reason: str | None = None
        group = _find_usable_group(process_group)
        if isinstance(num_bytes, Exception) and not isinstance(group, str):
            # The other ranks wait in the agreement. Taking part in it makes them raise too.
            with contextlib.suppress(ValueError):
                _all_ranks_agree(False, 0, group)
        if isinstance(num_bytes, Exception):
            raise num_bytes
        if isinstance(group, str):
            self.init_failure_reason = group
        else:
            self._share(num_bytes, group)
        if self.init_failure_reason is not None:
            logger.debug("symmetric memory is not available: %s", self.init_failure_reason)

    def _share(self, num_bytes: int, group: ProcessGroup) -> None:
        failed_elsewhere = "another rank of the group has no symmetric memory"
        buffer = _allocate_bytes(num_bytes)
        allocated = isinstance(buffer, Tensor)
        if not _all_ranks_agree(allocated, num_bytes, group) or not isinstance(buffer, Tensor):
            self.init_failure_reason = buffer if isinstance(buffer, str) else failed_elsewhere
            return
        import torch.distributed._symmetric_memory as symmetric_memory

        handle: object
        try:
            handle = symmetric_memory.rendezvous(buffer, group)
        except RuntimeError as error:
            handle = _describe_cause(error)
        # A second agreement: the rendezvous may fail on some ranks only.
        if not _all_ranks_agree(not isinstance(handle, str), num_bytes, group):
            self.init_failure_reason = handle if isinstance(handle, str) else failed_elsewhere
            return
        self.symm_buffer, self.symm_mem_hdl = buffer, handle

    @property
    def available(self) -> bool:
        """Whether the ranks share memory, the same on every rank.

        Example:
            >>> GlobalSymmetricMemoryBuffer(0.5, None).available
            False
        """
        return self.symm_buffer is not None and self.symm_mem_hdl is not None

    def _can_allocate(self, numel: int, dtype: torch.dtype) -> bool:
        """Return whether there is a buffer with room for a number of elements."""
        if numel < 0:
            raise ValueError(f"numel must not be negative, got {numel}")
        if self.symm_buffer is None or self.symm_mem_hdl is None:
            return False
        return numel * dtype.itemsize <= self.symm_buffer.numel()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements of the buffer as a one-dimensional tensor."""
        if self.symm_buffer is None or not self._can_allocate(numel, dtype):
            num_bytes = 0 if self.symm_buffer is None else self.symm_buffer.numel()
            room = f"it has {num_bytes} bytes" if self.available else "none is available"
            raise RuntimeError(
                f"the symmetric buffer cannot hold {numel} elements of {dtype}: {room}. "
                "Call maybe_get_tensor(), and use an ordinary collective if it returns no tensor"
            )
        return self.symm_buffer[: numel * dtype.itemsize].view(dtype)

    def maybe_get_tensor(
        self, tensor_shape: Sequence[int] | int, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return a tensor at the start of the buffer if there is room. No communication.

        Args:
            tensor_shape: The shape, ``()`` for a 0-d tensor.
            dtype: The element type.

        Returns:
            ``{"tensor": the tensor, "handle": the rendezvous handle}``. Both are None if the memory
            is not available or too small.

        Raises:
            ValueError: The shape has a negative entry.
            TypeError: The shape contains something other than integers.

        Example:
            >>> GlobalSymmetricMemoryBuffer(1, None).maybe_get_tensor((4,), torch.float32)
            {'tensor': None, 'handle': None}
        """
        shape = checked_shape(tensor_shape)
        numel = math.prod(shape)
        if not self._can_allocate(numel, dtype):
            return {"tensor": None, "handle": None}
        return {"tensor": self._allocate(numel, dtype).view(shape), "handle": self.symm_mem_hdl}

    def maybe_get_tensors(
        self, requests: Sequence[tuple[int, torch.dtype]], alignment: int = 16
    ) -> dict[str, Any]:
        """Return several pieces of the buffer that do not overlap, if there is room for all.

        Args:
            requests: The number of elements and the element type of each piece.
            alignment: The offset of each piece is a multiple of this number of bytes.

        Returns:
            ``{"handle": the rendezvous handle, "tensors": [(piece, offset), ...]}``. A piece is a
            one-dimensional uint8 tensor and its offset is in bytes. Both values are None if the
            memory is not available or too small.

        Raises:
            ValueError: A negative number of elements, or ``alignment`` is not positive.
            TypeError: ``alignment`` is not an integer.

        Example:
            >>> GlobalSymmetricMemoryBuffer(1, None).maybe_get_tensors([(3, torch.uint8)])
            {'handle': None, 'tensors': None}
        """
        if not isinstance(alignment, numbers.Integral):
            raise TypeError(f"alignment must be an integer, got {type(alignment).__name__}")
        if alignment <= 0:
            raise ValueError(f"alignment must be positive, got {alignment}")
        spans = []
        end = 0
        for numel, dtype in requests:
            if numel < 0:
                raise ValueError(f"numel must not be negative, got {numel}")
            start = round_up_to_nearest_multiple(end, alignment)
            end = start + numel * dtype.itemsize
            spans.append((start, end))
        buffer = self.symm_buffer
        if buffer is None or not self._can_allocate(end, torch.uint8):
            return {"handle": None, "tensors": None}
        pieces = [(buffer[start:end], start) for start, end in spans]
        return {"handle": self.symm_mem_hdl, "tensors": pieces}
