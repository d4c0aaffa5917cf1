"""What the detector was configured with, checked before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mcore.observe.straggler.outliers import OutlierRule
from mcore.observe.straggler.sections import checked_sections, section_hash

__all__ = ["Settings", "chosen_device"]

_MAX_PORT = 65535


@dataclass(frozen=True)
class Settings:
    """The arguments of ``configure`` that reports need.

    Args:
        world: The number of ranks.
        rank: This rank.
        mmcnt: How many ranks to list at each end of the throughput; below 1 means 1.
        amp: How many times longer a step takes than what is timed of it.
        port: Of the controller; 0 takes a free one.
        prefill: How many events to make when timing is switched on.
        sections: Names that the user declares.
        sample_every: Time only each Nth range of a kind.
        rule: When a rank stands out.

    Raises:
        ValueError: A value that cannot be.

    Example:
        >>> Settings(world=1, rank=0, mmcnt=0, sections=["mlp"]).names
        ('compute', 'data', 'mlp')
    """

    world: int
    rank: int
    mmcnt: int = 1
    amp: float = 3.0
    port: int = _MAX_PORT
    prefill: int = 1024
    sections: Sequence[str] = ()
    sample_every: int = 1
    rule: OutlierRule = field(default_factory=OutlierRule)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mmcnt", max(self.mmcnt, 1))
        for is_right, given, expected in (
            (self.world >= 1, f"world is {self.world}", "at least 1"),
            (0 <= self.rank < self.world, f"rank is {self.rank}", f"0 to {self.world - 1}"),
            (self.amp > 0, f"amp is {self.amp}", "a number above 0"),
            (0 <= self.port <= _MAX_PORT, f"port is {self.port}", f"0 to {_MAX_PORT}"),
            (self.prefill >= 0, f"prefill is {self.prefill}", "0 or more"),
            (self.sample_every >= 1, f"sample_every is {self.sample_every}", "at least 1"),
            (self.rule.z > 0, f"z_threshold is {self.rule.z}", "a number above 0"),
        ):
            if not is_right:
                raise ValueError(f"straggler detector: {given}; give {expected}")
        checked_sections(self.sections)

    @property
    def names(self) -> tuple[str, ...]:
        """All section names, the two built-in kinds first."""
        return checked_sections(self.sections)

    @property
    def sections_hash(self) -> float:
        """The hash of all section names."""
        return section_hash(self.names)


def chosen_device(device: torch.device | str | None) -> torch.device:
    """Return the device whose time is taken: the one given, else the accelerator, else the CPU.

    Example:
        >>> chosen_device("cpu")
        device(type='cpu')
    """
    if device is not None:
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found
