"""A number that the text determines: how far into its line each byte is."""

from __future__ import annotations

import torch

LONGEST_COLUMN = 80
_LINE_BREAK = ord("\n")


def line_columns(tokens: torch.Tensor) -> torch.Tensor:
    """Bytes since the last line break, as a share of 80, from 0 (a line break) to 1.

    Args:
        tokens: whole sequences ``[b, s]``. What comes before a sequence is not known: it counts as
            a line break.

    Returns:
        float32 ``[b, s]``.
    """
    places = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
    breaks = torch.where(tokens == _LINE_BREAK, places, 0)
    columns = places - breaks.cummax(dim=-1).values
    return (columns / LONGEST_COLUMN).clamp(max=1.0)
