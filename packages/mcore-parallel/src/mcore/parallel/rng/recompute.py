"""Activation checkpointing: recomputation from the same random numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore.parallel.agreement import check_tensors
from mcore.parallel.groups import AnyGroup
from mcore.parallel.process_groups.default import group_of_several
from mcore.parallel.rng.shared import existing_tracker
from mcore.parallel.rng.tracker import RngTracker
from mcore.parallel.torch_compat import all_gather_single
from mcore.tensor.dtensor import is_dtensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Context = AbstractContextManager[Any]


def checkpoint_context_fn(
    context_fn: Callable[[], tuple[_Context, _Context]] | None = None,
    *,
    tracker: RngTracker | None = None,
) -> tuple[_Context, _Context]:
    """Let torch's checkpoint draw the same numbers from forks in the recomputation.

    For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...)``, which
    restores only the default numbers. No communication. During recomputation every stream, the
    open forks and the default numbers of the tracker's device are as in the first computation.
    After it they are as before it. ``use_reentrant=True`` accepts no ``context_fn``: use
    :func:`replay_rng_streams`.

    Args:
        context_fn: Another such function, for example of selective checkpointing. Its contexts
            are entered as well. Pass both with ``functools.partial``.
        tracker: The tracker of the streams. Default the shared tracker of the process.

    Returns:
        The contexts of the first computation and of the recomputation. The latter can be entered
        any number of times. Without a tracker and without streams they do nothing.

    Raises:
        RuntimeError: On entry, if the shared tracker was replaced since the first computation.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> from mcore.parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
        >>> model_parallel_cuda_manual_seed(1234, force_reset_rng=True, device="cpu")
        >>> def dropped(hidden):
        ...     with get_cuda_rng_tracker().fork():
        ...         return torch.nn.functional.dropout(hidden, 0.5) ** 2
        >>> hidden = torch.ones(8, requires_grad=True)
        >>> output = checkpoint(
        ...     dropped, hidden, use_reentrant=False, context_fn=checkpoint_context_fn
        ... )
        >>> output.sum().backward()
        >>> torch.equal(hidden.grad, 2 * output.detach())
        True
    """
    forward, recompute = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    return forward, _Repetition(tracker, recompute)


def replay_rng_streams(
    function: Callable[_P, _R], *, tracker: RngTracker | None = None
) -> Callable[_P, _R]:
    """Return a function that draws new numbers in its first call and the same in later calls.

    For ``torch.utils.checkpoint.checkpoint(replay_rng_streams(f), x, use_reentrant=True)`` and
    other code that calls a function a second time. Make a new function for each use, since the
    first call fixes the numbers. No communication.

    Args:
        function: Any function.
        tracker: As for :func:`checkpoint_context_fn`.

    Returns:
        A function of the same arguments. Later calls leave all streams, and the default numbers of
        the tracker's device, unchanged.

    Raises:
        RuntimeError: As for :func:`checkpoint_context_fn`, at a later call.

    Example:
        >>> from mcore.parallel import CudaRNGStatesTracker
        >>> tracker = CudaRNGStatesTracker(device="cpu")
        >>> tracker.add("dropout", 1234)
        >>> draw = replay_rng_streams(tracker.fork("dropout")(torch.rand), tracker=tracker)
        >>> torch.equal(draw(3), draw(3))
        True
    """
    repetition: list[_Repetition] = []

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if repetition:
            with repetition[0]:
                return function(*args, **kwargs)
        repetition.append(_Repetition(tracker))
        return function(*args, **kwargs)

    return run


def checkpoint_activations(
    function: Callable[..., _R],
    distribute_saved_activations: bool,
    *args: Any,
    tp_group: AnyGroup | None = None,
    tracker: RngTracker | None = None,
) -> _R:
    """Run a function without keeping its activations, which backward recomputes.

    The counterpart of Megatron-LM's ``tensor_parallel.checkpoint``, on torch's non-reentrant
    checkpoint. Checkpoints nest with each other and with torch's, under autocast and under
    ``fully_shard``. Outputs, gradients and all random streams are bit for bit those without a
    checkpoint. Default numbers of devices other than the tracker's are restored as in torch.

    Args:
        function: Called with ``args`` now and in backward.
        distribute_saved_activations: Keep only this rank's 1/n of the first argument, a tensor of
            any shape that is equal on all ranks of ``tp_group``. Backward all-gathers it before
            the recomputation, so all ranks must run the same backward pass.
        *args: The arguments. Tensors among them are kept, or distributed as above.
        tp_group: Tensor-parallel group or 1-D DeviceMesh, for distributing. Default ``tp`` of the
            default ``ProcessGroups``. Without a group, and in a group of one rank, nothing is
            distributed.
        tracker: As for :func:`checkpoint_context_fn`.

    Returns:
        The result of the function. If gradients are disabled, the function is only called.

    Raises:
        TypeError: The first argument is to be distributed and is no tensor, or is a DTensor.
        ValueError: This rank is not a member of ``tp_group``.
        RuntimeError: As for :func:`checkpoint_context_fn`, in backward.

    Example:
        >>> hidden = torch.ones(2, 3, requires_grad=True)
        >>> checkpoint_activations(torch.exp, False, hidden).sum().backward()
        >>> torch.equal(hidden.grad, hidden.detach().exp())
        True
    """
    group = group_of_several(tp_group, "tp") if distribute_saved_activations else None
    if not torch.is_grad_enabled():
        return function(*args)
    context_fn = functools.partial(checkpoint_context_fn, tracker=tracker)
    if group is not None:
        function, args = _distribute_first(function, args, group)
    result: _R = checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)
    return result


class _Repetition(AbstractContextManager[None]):
    """A reusable block in which a tracker's streams are as they were when this object was made."""

    def __init__(self, tracker: RngTracker | None, inner: _Context | None = None) -> None:
        self._is_shared = tracker is None
        self._tracker = existing_tracker() if tracker is None else tracker
        self._streams = nullcontext() if self._tracker is None else self._tracker.snapshot()
        self._inner = nullcontext() if inner is None else inner
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        if self._is_shared and self._tracker is not None and existing_tracker() != self._tracker:
            raise RuntimeError(
                "the shared random streams were replaced between a forward pass and the "
                "recomputation of its activations, which would draw other numbers: run backward "
                "before seeding with force_reset_rng=True"
            )
        with ExitStack() as stack:
            stack.enter_context(self._streams)
            stack.enter_context(self._inner)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


def _distribute_first(
    function: Callable[..., _R], args: tuple[Any, ...], group: dist.ProcessGroup
) -> tuple[Callable[..., _R], tuple[Any, ...]]:
    """Return function and arguments, with this rank's part of the first argument in its place."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or is_dtensor(first):
        raise TypeError(
            "distribute_saved_activations needs a plain tensor as the first argument, got "
            f"{type(first).__name__}: pass its local tensor, or False"
        )
    check_tensors("distributed activations", first, group)
    # Each rank keeps an equal part of the bytes in their order in memory, padded with zeros.
    slowest_first = sorted(range(first.dim()), key=first.stride, reverse=True)
    shape, dtype, requires_grad = first.shape, first.dtype, first.requires_grad
    part_bytes = math.ceil(int(first.nbytes) / group.size())
    every = first.detach().permute(slowest_first).reshape(-1).view(torch.uint8)
    part = every[part_bytes * group.rank() :][:part_bytes]
    padded = part.new_zeros(part_bytes)
    padded[: part.numel()] = part
    unused = [first]  # the first call empties this list, so only the caller keeps the whole tensor

    def gather(own: Tensor) -> Tensor:
        received = own.new_empty(group.size() * part_bytes)
        all_gather_single(received, own, group)
        values = received[: shape.numel() * dtype.itemsize].view(dtype)
        in_memory = values.view([shape[dim] for dim in slowest_first])
        order = sorted(range(len(shape)), key=slowest_first.__getitem__)
        return in_memory.permute(order).requires_grad_(requires_grad)

    def run(own: Tensor, *rest: Any) -> _R:
        return function(unused.pop() if unused else gather(own), *rest)

    return run, (padded, *args[1:])
