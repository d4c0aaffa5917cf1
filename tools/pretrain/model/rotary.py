"""Rotary positions (Su et al. 2021), applied while splitting query, key and value."""

from __future__ import annotations

from typing import Any

import torch

_BASE = 10_000.0


def rotary_table(positions: torch.Tensor, head_size: int) -> torch.Tensor:
    """Cosines and sines of positions ``[s, b]``: ``[2, s, b, head_size]``.

    Both halves of a head rotate by the same angles. ``b`` may be 1 if all sequences share
    positions.
    """
    half = torch.arange(head_size // 2, device=positions.device, dtype=torch.float32)
    frequencies = _BASE ** (-half / (head_size // 2))
    angles = positions.float()[..., None] * frequencies.repeat(2)
    return torch.stack((angles.cos(), angles.sin()))


def split_rotated(
    qkv: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[s, b, heads, 3 * head_size]`` to query, key and value ``[b, heads, s, head_size]``.

    Query and key are rotated by the positions of the table. The results are contiguous per head,
    the fastest layout for attention.
    """
    query, key, value = _SplitRotated.apply(  # type: ignore[no-untyped-call]
        qkv, table.to(qkv.dtype)
    )
    return query, key, value


class _SplitRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(table)
        parts = _view_three_parts(qkv)
        split = qkv.new_empty(parts.shape)
        _rotate(parts[:2], table, split[:2], sign=1)
        split[2] = parts[2]
        return tuple(split.unbind())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (table,) = ctx.saved_tensors
        batch, heads, sequence, size = gradients[0].shape
        whole = gradients[0].new_empty(sequence, batch, heads, 3 * size)
        for gradient, part in zip(gradients[:2], _view_three_parts(whole)[:2], strict=True):
            _rotate(gradient, table, part, sign=-1)
        _view_three_parts(whole)[2] = gradients[2]
        return whole, None


def _view_three_parts(qkv: torch.Tensor) -> torch.Tensor:
    """View ``[s, b, heads, 3 * head_size]`` as ``[3, b, heads, s, head_size]``."""
    sequence, batch, heads, size = qkv.shape
    return qkv.view(sequence, batch, heads, 3, size // 3).permute(3, 1, 2, 0, 4)


def _rotate(heads: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, sign: int) -> None:
    """Rotate ``[..., b, heads, s, head_size]`` by ``sign`` times the angles, into ``out``."""
    cos, sin = table.transpose(1, 2)[:, :, None]
    first, second = heads.chunk(2, dim=-1)
    out_first, out_second = torch.mul(heads, cos, out=out).chunk(2, dim=-1)
    out_first.addcmul_(second, sin[..., : second.shape[-1]], value=-sign)
    out_second.addcmul_(first, sin[..., : first.shape[-1]], value=sign)
