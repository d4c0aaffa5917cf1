"""The cross entropy of logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.parallel.agreement import check_on_all_ranks
from mcore.parallel.groups import AnyGroup
from mcore.parallel.process_groups.default import group_of_several
from mcore.parallel.tensor_memory import bytes_of


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: AnyGroup | None = None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the cross entropy of each token, from logits split by columns over the ranks.

    Two all-reduces in the forward pass: of one number for each token, and of two numbers (three
    with smoothing). None in backward. All ranks of the group must call it. With
    ``MCORE_DEBUG_COLLECTIVES=1`` different arguments on one rank are an error on all.

    With smoothing s the wanted probability is 1 - s for the target and s / (v - 1) for every other
    entry, as in Megatron-LM. Megatron-LM averages over each rank's columns, this function over all
    v.

    Args:
        vocab_parallel_logits: ``[..., v / n]``: on rank r the columns from r * v / n, with the same
            number of columns on all ranks. Half precision is computed in float32. Never modified.
        target: ``[...]``, int64 indices into the whole vocabulary, equal on all ranks.
        label_smoothing: s, from 0 to below 1.
        tp_group: Tensor-parallel group (or 1-D DeviceMesh) of n ranks. Default ``tp`` of the
            default ``ProcessGroups``, else one rank.
        vocab_size: The number of vocabulary entries. Later columns are padding: they are left
            out and get no gradient. Default all columns.
        ignore_index: A target of this value has loss 0 and no gradient.

    Returns:
        Nats, ``[...]``, float32 or wider, equal on all ranks. Gradients have the logits' dtype.
        Gradients of gradients are not supported.

    Raises:
        ValueError: Shapes do not fit, an argument is out of range, or this rank is not a member of
            ``tp_group``. On a CPU also a target that is not below ``vocab_size``. Accelerators are
            not waited for: there the loss of such a target is NaN.
        RuntimeError: Backward with ``create_graph``.
        TypeError: ``target`` does not hold int64.

    Example:
        >>> import torch
        >>> logits, target = torch.zeros(2, 8), torch.tensor([3, -100])
        >>> vocab_parallel_cross_entropy(logits, target)
        tensor([2.0794, 0.0000])
    """
    group = group_of_several(tp_group, "tp")
    columns = vocab_parallel_logits.shape[-1] if vocab_parallel_logits.dim() else 0
    most = columns * (1 if group is None else group.size())
    vocab_size = most if vocab_size is None else vocab_size
    given = vocab_parallel_logits, target, label_smoothing, vocab_size, ignore_index
    places = partial(_find_targets_without_loss, *given, most)
    without_loss = check_on_all_ranks(places, lambda _: _describe(*given), group)
    # (1 - s) L_t + s / (v - 1) * (the sum of L_i over i != t) equals (1 - c) L_t + c * mean(L)
    # with c = s * v / (v - 1): the mean over all entries also contains the target.
    share = label_smoothing and label_smoothing * vocab_size / (vocab_size - 1)
    first = 0 if group is None else group.rank() * columns
    num_counted = min(max(vocab_size - first, 0), columns)
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        vocab_parallel_logits, target, without_loss, first, num_counted, share, vocab_size, group
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Losses of targets in the columns of any rank. Keeps exponentials. Launches few kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        without_loss: tuple[Tensor, Tensor, Tensor],
        first: int,
        num_counted: int,
        share: float,  # of the mean over all entries in a smoothed loss
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        is_outside, is_ignored, has_no_loss = without_loss
        local = target - first if first else target
        places = local.clamp(0, max(num_counted, 1) - 1)
        shifted = _shift(logits, num_counted, group)
        chosen = shifted.gather(-1, places[..., None])[..., 0]
        totals = [shifted[..., :num_counted].sum(dim=-1)] if share else []
        exponentials = shifted.exp_()
        sums = [exponentials.sum(dim=-1), chosen, *totals]
        is_elsewhere = None  # on one rank, such targets have no loss
        if group is not None:
            is_elsewhere = places != local if num_counted else torch.ones_like(has_no_loss)
            chosen.masked_fill_(is_elsewhere, 0.0)
            joined = torch.stack(sums)
            dist.all_reduce(joined, group=group)
            sums = list(joined.unbind())
        normalizer, chosen = sums[:2]
        ctx.save_for_backward(exponentials, normalizer, places, has_no_loss, is_elsewhere)
        ctx.dtype, ctx.num_counted = logits.dtype, num_counted
        ctx.share, ctx.vocab_size = share, vocab_size
        losses = normalizer.log() - chosen
        if share:
            average = normalizer.log() - sums[2] / vocab_size
            # Not torch.lerp: its difference of two infinite losses is NaN.
            losses = losses * (1 - share) + average * share
        return losses.masked_fill_(is_outside, float("nan")).masked_fill_(is_ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only with create_graph
            raise RuntimeError(
                "vocab_parallel_cross_entropy has no gradients of gradients: leave create_graph "
                "out, or take the cross entropy of gathered logits"
            )
        exponentials, normalizer, places, has_no_loss, is_elsewhere = ctx.saved_tensors
        zero = torch.zeros((), dtype=grad_losses.dtype, device="cpu")
        grad_losses = torch.where(has_no_loss, zero, grad_losses)
        grad = exponentials * (grad_losses / normalizer)[..., None]
        at_target = grad_losses
        if is_elsewhere is not None:
            at_target = torch.where(is_elsewhere, zero, grad_losses)
        if ctx.share:
            at_target = at_target * (1 - ctx.share)
            each = grad_losses * (ctx.share / ctx.vocab_size)
            grad[..., : ctx.num_counted] -= each[..., None]
        places = places[..., None]
        grad.scatter_(-1, places, grad.gather(-1, places) - at_target[..., None])
        return grad.to(ctx.dtype), *[None] * 7


def _shift(logits: Tensor, num_counted: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the logits minus the maximum of each row as a new tensor, with -inf in the padding.
    One all-reduce. Exponentials of the result cannot overflow.
    """
    values = logits.float() if logits.dtype.itemsize < 4 else logits
    if num_counted:
        largest = values[..., :num_counted].amax(dim=-1)
    else:
        largest = values.new_full(values.shape[:-1], float("-inf"))
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = values - largest[..., None]
    if num_counted < shifted.shape[-1]:
        shifted[..., num_counted:] = float("-inf")
    return shifted


def _find_targets_without_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float,
    vocab_size: int,
    ignore_index: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the arguments. Return masks of targets not in the vocabulary, ignored, and both."""
    if target.dtype != torch.int64:
        raise TypeError(f"target must hold int64, got {target.dtype}: pass target.long()")
    if not most or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits [..., columns] need a target [...], got shapes {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    if not 1 <= vocab_size <= most:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 to {most}, the number of columns")
    if not 0 <= label_smoothing < 1 or (label_smoothing and vocab_size == 1):
        raise ValueError(
            f"label_smoothing is {label_smoothing} with a vocabulary of {vocab_size}, expected 0 "
            "to below 1, and 0 for a vocabulary of 1"
        )
    is_ignored = target == ignore_index
    is_outside = target.clamp(0, vocab_size - 1) != target
    if target.device.type == "cpu":
        unknown = target[is_outside & ~is_ignored]
        if unknown.numel():
            raise ValueError(
                f"target {int(unknown[0])} is not below the vocabulary's size, "
                f"{vocab_size}: only {ignore_index} is ignored"
            )
    is_usual = not 0 <= ignore_index < vocab_size  # then ignored targets are outside
    return is_outside, is_ignored, is_outside if is_usual else is_outside | is_ignored


def _describe(logits: Tensor, target: Tensor, *settings: float) -> str:
    """Return the arguments that must be equal on all ranks, with a digest of the targets."""
    digest = hashlib.sha1(bytes_of(target), usedforsecurity=False).hexdigest()
    return f"cross entropy of {logits.dtype} {tuple(logits.shape)}, {settings}, targets {digest}"
