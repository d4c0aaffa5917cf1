"""Rotary positions: against a multiplication of complex numbers, values and gradients."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.model.rotary import rotary_table, split_rotated

_SIZES = st.integers(1, 3)


@settings(deadline=None, max_examples=30)
@given(_SIZES, _SIZES, _SIZES, _SIZES, st.booleans())
def test_rotation_is_a_complex_multiplication(
    sequence: int, batch: int, heads: int, half: int, own_positions: bool
) -> None:
    positions = torch.randint(0, 100, (sequence, batch if own_positions else 1))
    shape = (sequence, batch, heads, 6 * half)
    qkv = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours = split_rotated(qkv, rotary_table(positions, 2 * half))
    theirs = _by_complex_numbers(qkv, positions)
    weights = torch.randn(3, *ours[0].shape, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((torch.stack(parts) * weights).sum(), qkv)[0]
        for parts in (ours, theirs)
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # the table has 24 bits
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-4)


def _by_complex_numbers(qkv: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """The first half of a head's elements are real parts, the second imaginary ones."""
    query, key, value = qkv.tensor_split(3, dim=-1)
    half = query.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = positions[..., None, None] * 10_000.0**-exponents
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = [torch.complex(x[..., :half], x[..., half:]) * turn for x in (query, key)]
    parts = [*(torch.cat((x.real, x.imag), dim=-1) for x in turned), value]
    return [part.permute(1, 2, 0, 3) for part in parts]
