"""``--slow-rank``: one rank is made slow on purpose, so that the detector can be watched."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pretrain.usage import UsageError

_FORM = re.compile(r"(\d+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class SlowRank:
    """Which rank takes how many times as long as the others for a forward pass."""

    rank: int
    factor: float

    @classmethod
    def parse(cls, text: str, world_size: int) -> SlowRank | None:
        """Read ``RANK:FACTOR``; empty is none.

        Raises:
            UsageError: the text is something else, the rank does not exist, or nothing is slower.
        """
        if not text:
            return None
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(f"--slow-rank must be RANK:FACTOR such as 1:4, got {text}")
        slow = cls(int(match[1]), float(match[2]))
        if slow.rank >= world_size:
            raise UsageError(
                f"--slow-rank {text}: there are {world_size} ranks, 0 to {world_size - 1}"
            )
        if not 1.0 < slow.factor < math.inf:
            raise UsageError(f"--slow-rank {text}: the factor must be above 1")
        return slow
