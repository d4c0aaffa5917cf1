"""Which model chunk of which pipeline rank holds the first and the last layers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StageFlags", "stage_flags"]


class StageFlags(NamedTuple):
    """Whether a model chunk gets the model's inputs, and whether it gives the model's outputs.

    Example:
        >>> StageFlags(is_first=True, is_last=False).is_first
        True
    """

    is_first: bool
    is_last: bool


def stage_flags(
    pp_rank: int, pp_size: int, vp_stage: int | None, vp_size: int | None
) -> StageFlags:
    """Say whether a model chunk is the first and whether it is the last of the pipeline.

    With interleaved stages the first chunk of all lies on the first pipeline rank and the last on
    the last one.

    Args:
        pp_rank: Rank in the pipeline group.
        pp_size: Size of the pipeline group.
        vp_stage: Number of this chunk among those of its pipeline rank; None for the only one.
        vp_size: Number of chunks of each pipeline rank; None for one.

    Returns:
        The two flags.

    Raises:
        ValueError: ``vp_stage`` does not fit ``vp_size``.

    Example:
        >>> stage_flags(0, 2, 0, 2), stage_flags(1, 2, 1, 2).is_last
        (StageFlags(is_first=True, is_last=False), True)
    """
    chunks = 1 if vp_size is None else vp_size
    if chunks > 1 and vp_stage is None:
        raise ValueError(
            f"vp_stage is None with {vp_size} virtual stages; give 0 to {chunks - 1}, the number "
            "of this model chunk"
        )
    chunk = vp_stage or 0
    if not 0 <= chunk < max(chunks, 1):
        raise ValueError(
            f"vp_stage is {vp_stage} with vp_size {vp_size}; "
            + (f"give 0 to {chunks - 1}" if chunks > 1 else "give None or 0, or a vp_size")
        )
    return StageFlags(
        is_first=pp_rank == 0 and chunk == 0,
        is_last=pp_rank == pp_size - 1 and chunk == max(chunks, 1) - 1,
    )
