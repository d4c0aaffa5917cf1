"""L2 norms of gradients, for each parameter and together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mcore.observe.host_reads import read_scalars
from mcore.observe.model_groups import model_chunks
from mcore.observe.shard_sums import squares_of_each
from mcore.parallel.groups import GroupLike, get_pg_rank, get_pg_size
from mcore.parallel.reductions import sum_over_group

__all__ = ["gradient_norms", "report_l2_norm_grad"]

_PREFIX = "l2_norm/grad/"


def report_l2_norm_grad(
    model: torch.nn.Module | list[torch.nn.Module], *, group: GroupLike | None = None
) -> dict[str, float]:
    """Report the L2 norm of each parameter's gradient and of all of them together.

    Gradients are ``main_grad`` where a parameter has one, else ``grad``; call it after they are
    reduced and unscaled. DTensors are summed over the ranks that hold their shards; all ranks of
    their mesh call it. Everything else is this rank's own, unless ``group`` is given: then one
    all-reduce sums the squares over it, all its ranks call it and get the result.

    Args:
        model: One module or a list of chunks.
        group: A group whose ranks hold shards of the same parameters. Those marked with
            ``tensor_model_parallel`` False are whole on every rank, and count once.

    Returns:
        ``l2_norm/grad/{parameter}`` for each parameter that has a gradient, and
        ``l2_norm/grad/global``, 0.0 when there is none. A name that an earlier chunk has too gets
        the prefix ``chunk{i}.``, with chunks from 0.

    Raises:
        RuntimeError: A gradient is a DTensor with a partial placement.

    Example:
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0]])
        >>> report_l2_norm_grad(layer)
        {'l2_norm/grad/weight': 3.0, 'l2_norm/grad/global': 3.0}
    """
    return read_scalars(gradient_norms(model, group=group))


@torch.no_grad()
def gradient_norms(
    model: torch.nn.Module | list[torch.nn.Module], *, group: GroupLike | None = None
) -> dict[str, Any]:
    """Do as :func:`report_l2_norm_grad`, but copy nothing to the host.

    Args:
        model: One module or a list of chunks.
        group: As there.

    Returns:
        One element for each name, on the gradients' device.

    Example:
        >>> gradient_norms(torch.nn.Linear(1, 1))
        {'l2_norm/grad/global': 0.0}
    """
    named = dict(_named_gradients(model))
    if not named:
        return {f"{_PREFIX}global": 0.0}
    squares = squares_of_each([gradient for _, gradient in named.values()])
    if get_pg_size(group) > 1:
        counts = [_counts_here(parameter, group) for parameter, _ in named.values()]
        own = squares * torch.tensor(counts, dtype=squares.dtype, device=squares.device)
        (squares,) = sum_over_group([own], group)
    roots = torch.cat([squares, squares.sum(0, keepdim=True)]).sqrt().to(torch.float32)
    return {
        _PREFIX + name: root for name, root in zip([*named, "global"], roots.unbind(), strict=True)
    }


def _named_gradients(model: Any) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    taken: set[str] = set()
    for index, chunk in enumerate(model_chunks(model)):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                gradient = parameter.grad
            if gradient is None or not parameter.requires_grad:
                continue
            unique = f"chunk{index}.{name}" if name in taken else name
            taken.add(unique)
            yield unique, (parameter, gradient)


def _counts_here(parameter: torch.Tensor, group: GroupLike | None) -> bool:
    is_whole = getattr(parameter, "tensor_model_parallel", None) is False
    return not is_whole or get_pg_rank(group) == 0
