"""Weight gradients of the embedding, computed after the last pipeline flush.

The last pipeline stage defers the weight-gradient GEMMs of the output layer to the end of the step,
when it would otherwise be idle.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mcore.parallel.agreement import require_equal
from mcore.parallel.groups import AnyGroup, as_process_group, take_group
from mcore.parallel.torch_compat import all_gather_single
from mcore.tensor.buffers import get_global_memory_buffer

__all__ = [
    "defers_embedding_wgrad",
    "drain_embedding_wgrad_compute",
    "prepare_input_tensors_for_wgrad_compute",
    "validate_wgrad_deferral",
]

_SLOT_NAMES = ("wgrad_drain_0", "wgrad_drain_1")
_FUSED_EXTENSION = "fused_weight_gradient_mlp_cuda"
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_MAIN_GRAD_DTYPES = (*_HALF_DTYPES, torch.float32, torch.float64)
_CAST_BYTES = 128 << 20  # of converted rows


def validate_wgrad_deferral(config: object) -> None:
    """Raise ValueError if a configuration cannot defer the embedding's weight gradients.

    Args:
        config: Any object. The fields ``defer_embedding_wgrad_compute``, ``wgrad_deferral_limit``
            and ``pipeline_model_parallel_size`` default to False, 0 and 1 if it lacks them.

    Raises:
        ValueError: Weight gradients are deferred without pipeline parallelism, or the limit is
            negative.

    Example:
        >>> from types import SimpleNamespace
        >>> validate_wgrad_deferral(SimpleNamespace(pipeline_model_parallel_size=2))
    """
    limit = getattr(config, "wgrad_deferral_limit", 0)
    if limit < 0:
        raise ValueError(
            f"wgrad_deferral_limit is {limit}: use 0 to defer all micro-batches, or the number "
            "of micro-batches to defer"
        )
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    if _is_deferring(config) and stages <= 1:
        raise ValueError(
            f"defer_embedding_wgrad_compute is set with pipeline_model_parallel_size {stages}: "
            "it needs 2 or more, because without a pipeline there is no idle time to fill"
        )


def defers_embedding_wgrad(config: object, num_deferred: int) -> bool:
    """Return whether a layer must defer the weight gradient of its next micro-batch.

    If True, the layer appends its activation and its output gradient to its buffers. If False, it
    computes the weight gradient at once.

    Args:
        config: Any object, as for :func:`validate_wgrad_deferral`.
        num_deferred: The number of micro-batches in the layer's buffers.

    Returns:
        False unless ``defer_embedding_wgrad_compute`` is set. Then True while the buffers hold
        fewer than ``wgrad_deferral_limit`` micro-batches, or always for a limit of 0.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=2)
        >>> [defers_embedding_wgrad(config, held) for held in range(3)]
        [True, True, False]
    """
    limit: int = getattr(config, "wgrad_deferral_limit", 0)
    return _is_deferring(config) and (limit == 0 or num_deferred < limit)


def _is_deferring(config: object) -> bool:
    return bool(getattr(config, "defer_embedding_wgrad_compute", False))


def prepare_input_tensors_for_wgrad_compute(
    grad_output: torch.Tensor, all_gathered_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as contiguous matrices with one row for each token.

    No communication.

    Args:
        grad_output: ``[..., v]`` with two dimensions or more, such as ``[s, b, v]``.
        all_gathered_input: ``[..., h]`` with as many rows.

    Returns:
        ``[n, v]`` and ``[n, h]`` with n the product of the leading dimensions. A contiguous
        matrix is returned as it is, another contiguous tensor as a view, any other tensor as a
        copy.

    Raises:
        ValueError: A tensor has fewer than two dimensions, or the numbers of rows differ.

    Example:
        >>> grad, full = torch.zeros(4, 2, 5), torch.zeros(4, 2, 3)
        >>> [tuple(t.shape) for t in prepare_input_tensors_for_wgrad_compute(grad, full)]
        [(8, 5), (8, 3)]
    """
    grad, full = _flatten_rows(grad_output), _flatten_rows(all_gathered_input)
    if grad.shape[0] != full.shape[0]:
        raise ValueError(
            f"a gradient of shape {tuple(grad_output.shape)} has {grad.shape[0]} rows and an input "
            f"of shape {tuple(all_gathered_input.shape)} has {full.shape[0]}: both need one row "
            "for each token"
        )
    return grad, full


def _flatten_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        raise ValueError(f"expected two dimensions or more, got shape {tuple(tensor.shape)}")
    plain = tensor.contiguous()
    return plain if plain.dim() == 2 else plain.view(math.prod(plain.shape[:-1]), plain.shape[-1])


@torch.no_grad()
def drain_embedding_wgrad_compute(
    config: object,
    embedding_activation_buffer: list[torch.Tensor],
    grad_output_buffer: list[torch.Tensor],
    weight: torch.Tensor,
    tp_group: AnyGroup | None,
) -> None:
    """Compute all deferred weight gradients: ``main_grad += grad^T @ input`` for every pair.

    With ``config.sequence_parallel`` and a group of several ranks each input is one rank's slice of
    the sequence and is all-gathered over ``tp_group``. The gather of the next input runs during the
    GEMM. Every rank of the group then calls this with inputs of the same shapes, which one
    all-reduce (MAX of 64 int64) checks. It waits for the device once. Otherwise there is no
    communication. The gathered inputs use two buffers of the process-wide memory buffer,
    ``"wgrad_drain_0"`` and ``"wgrad_drain_1"``, which are kept for the next step.

    Args:
        config: Any object. The fields ``sequence_parallel`` and ``gradient_accumulation_fusion``
            default to False if it lacks them. The latter allows the CUDA extension
            ``fused_weight_gradient_mlp_cuda``, if that is installed.
        embedding_activation_buffer: The inputs, ``[s / n, b, h]`` when they are gathered over n
            ranks, else ``[s, b, h]``. Emptied in place, pair by pair.
        grad_output_buffer: The gradients, ``[s, b, v]``. The sequence length may differ between
            pairs. Emptied in place, pair by pair.
        weight: The weight ``[v, h]``. Its ``main_grad`` of the same shape (float16, bfloat16,
            float32 or float64) gets the sum in the precision of ``main_grad``. For a weight with an
            attribute ``__fsdp_param__``, ``get_main_grad()`` returns it before every pair. An
            attribute ``grad_added_to_main_grad`` is set to True if present.
        tp_group: The tensor-parallel group, or None for no communication.

    Raises:
        ValueError: The lists differ in length, a gradient does not fit its input, or this rank is
            not a member of the group.
        RuntimeError: The weight has no ``main_grad``, or its dtype is not supported.
        Exception: If inputs are gathered, an error of one rank before the first pair is raised on
            all ranks of the group. After any error the pairs that were not added stay in the lists.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.main_grad = torch.zeros(2, 3)
        >>> inputs, grads = [torch.ones(4, 1, 3)], [torch.ones(4, 1, 2)]
        >>> drain_embedding_wgrad_compute(None, inputs, grads, weight, None)
        >>> weight.main_grad.tolist(), inputs, grads
        ([[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]], [], [])
    """
    inputs, grads = embedding_activation_buffer, grad_output_buffer
    group = as_process_group(take_group(tp_group, "tp"))
    is_split = getattr(config, "sequence_parallel", False)
    gather_group = group if group is not None and group.size() > 1 and is_split else None
    num_ranks = 1 if gather_group is None else gather_group.size()
    failed: list[Exception] = []
    try:
        _check_pairs(inputs, grads, weight, num_ranks)
        for index, input_ in enumerate(inputs if num_ranks > 1 else ()):
            size, slot = num_ranks * input_.numel(), _SLOT_NAMES[index % 2]
            get_global_memory_buffer().reserve(size, input_.dtype, slot, device=input_.device)
    except Exception as error:
        if gather_group is None:
            raise
        failed.append(error)
    if gather_group is not None:  # all ranks raise if any rank fails
        shapes = [(tuple(input_.shape), str(input_.dtype)) for input_ in inputs]
        require_equal({"embedding_activation_buffer": shapes}, failed, gather_group)
    use_fused = bool(getattr(config, "gradient_accumulation_fusion", False))
    pending = _start_gather(inputs[0], 0, gather_group) if inputs else None
    count = 0
    try:
        while pending is not None:
            count += 1
            following = None
            if len(inputs) > 1:
                following = _start_gather(inputs[1], count % 2, gather_group)
            full = pending.result()
            pending = following
            _add_pair(weight, grads[0], full, use_fused=use_fused)
            # Only now, so pairs that were not added stay in the lists.
            del full, inputs[0], grads[0]
    finally:
        if pending is not None:
            pending.result()  # a later user of the buffer must not see this gather write to it


class _Gather(NamedTuple):
    """An input that is being gathered or needs no gathering."""

    full: torch.Tensor
    part: torch.Tensor | None = None  # read until the work is done
    work: dist.Work | None = None

    def result(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.full


def _start_gather(input_: torch.Tensor, slot: int, group: dist.ProcessGroup | None) -> _Gather:
    if group is None:
        return _Gather(input_)
    part = input_.contiguous()
    full = get_global_memory_buffer().get_tensor(
        (group.size() * part.shape[0], *part.shape[1:]),
        part.dtype,
        _SLOT_NAMES[slot],
        device=part.device,
    )
    return _Gather(full, part, all_gather_single(full, part, group, async_op=True))


def _add_pair(
    weight: torch.Tensor, grad_output: torch.Tensor, full_input: torch.Tensor, *, use_fused: bool
) -> None:
    holder: Any = weight
    if hasattr(holder, "__fsdp_param__"):
        holder.main_grad = holder.get_main_grad()
    main_grad = check_main_grad(getattr(holder, "main_grad", None))
    grad, full = prepare_input_tensors_for_wgrad_compute(grad_output, full_input)
    accumulate_wgrad(main_grad, grad, full, use_fused=use_fused)
    if hasattr(holder, "grad_added_to_main_grad"):
        holder.grad_added_to_main_grad = True


def _check_pairs(
    inputs: list[torch.Tensor], grads: list[torch.Tensor], weight: torch.Tensor, num_ranks: int
) -> None:
    """Raise the errors of later steps before anything is sent or added."""
    if len(inputs) != len(grads):
        raise ValueError(
            f"there are {len(inputs)} activations and {len(grads)} gradients: every deferred "
            "micro-batch needs one of each"
        )
    if not inputs:
        return
    shape = None
    if not hasattr(weight, "__fsdp_param__"):
        shape = tuple(check_main_grad(getattr(weight, "main_grad", None)).shape)
    for index, (input_, grad) in enumerate(zip(inputs, grads, strict=True)):
        rows = [math.prod(tensor.shape[:-1]) for tensor in (input_, grad)]
        if min(input_.dim(), grad.dim()) < 2 or rows[0] * num_ranks != rows[1]:
            raise ValueError(
                f"micro-batch {index}: an activation of shape {tuple(input_.shape)} on each of "
                f"{num_ranks} ranks and a gradient of shape {tuple(grad.shape)} do not have the "
                "same rows: both need two dimensions or more and one row for each token"
            )
        if shape not in (None, (grad.shape[-1], input_.shape[-1])):
            raise ValueError(
                f"micro-batch {index}: a gradient of shape {tuple(grad.shape)} and an activation "
                f"of shape {tuple(input_.shape)} do not fit main_grad of shape {shape}: pass "
                "tensors whose last dimensions are those of main_grad"
            )


def check_main_grad(main_grad: object) -> torch.Tensor:
    """Return a weight's accumulator if gradients can be added to it, else raise RuntimeError."""
    if not isinstance(main_grad, torch.Tensor):
        raise RuntimeError(
            f"the weight's main_grad is {main_grad!r}: allocate it, with the shape of the weight, "
            "before weight gradients are deferred"
        )
    if main_grad.dtype not in _MAIN_GRAD_DTYPES:
        raise RuntimeError(
            f"Unsupported gradient type {main_grad.dtype} of main_grad: use one of "
            f"{', '.join(str(dtype) for dtype in _MAIN_GRAD_DTYPES)}"
        )
    return main_grad


def accumulate_wgrad(
    main_grad: torch.Tensor, grad_output: torch.Tensor, input_: torch.Tensor, *, use_fused: bool
) -> None:
    """Add ``grad_output^T @ input_`` to ``main_grad`` in place, in the precision of the latter."""
    expected = (grad_output.shape[1], input_.shape[1])
    if tuple(main_grad.shape) != expected or grad_output.shape[0] != input_.shape[0]:
        raise ValueError(
            f"the product of a gradient {tuple(grad_output.shape)} and an input "
            f"{tuple(input_.shape)} has shape {expected}, which does not fit main_grad of shape "
            f"{tuple(main_grad.shape)}"
        )
    if use_fused and _add_by_extension(main_grad, grad_output, input_):
        torch.autograd.graph.increment_version(main_grad)  # autograd has not seen the change
    elif main_grad.dtype == grad_output.dtype == input_.dtype:
        main_grad.addmm_(grad_output.t(), input_)
    elif (
        main_grad.is_cuda
        and main_grad.dtype == torch.float32
        and grad_output.dtype == input_.dtype
        and input_.dtype in _HALF_DTYPES
    ):  # the device multiplies half-precision matrices into a float32 sum
        torch.addmm(main_grad, grad_output.t(), input_, out_dtype=torch.float32, out=main_grad)
    else:  # a bounded number of converted rows at a time
        dtype = main_grad.dtype
        length = max(1, _CAST_BYTES // max(1, sum(main_grad.shape) * dtype.itemsize))
        for start in range(0, input_.shape[0], length):
            rows = slice(start, start + length)
            main_grad.addmm_(grad_output[rows].to(dtype).t(), input_[rows].to(dtype))


def _add_by_extension(
    main_grad: torch.Tensor, grad_output: torch.Tensor, input_: torch.Tensor
) -> bool:
    """Add by the extension's kernel. False if it is absent or not for these tensors."""
    is_on_cuda = main_grad.is_cuda and grad_output.is_cuda and input_.is_cuda
    if not is_on_cuda or grad_output.dtype != input_.dtype or main_grad.dtype == torch.float64:
        return False
    try:
        extension = importlib.import_module(_FUSED_EXTENSION)
    except ImportError:
        return False
    bits = 32 if main_grad.dtype == torch.float32 else 16
    getattr(extension, f"wgrad_gemm_accum_fp{bits}")(input_, grad_output, main_grad)
    return True
