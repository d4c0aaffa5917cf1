"""The settings of the straggler detector, with their defaults and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from mcore.observe.straggler.exchange import PEERS_BYTES
from mcore.parallel.groups import GroupLike

if TYPE_CHECKING:
    from mcore.observe.straggler.report import StragglerReport

OnStraggler: TypeAlias = 'Literal["log", "stop"] | Callable[[StragglerReport], object]'

_MAX_PORT = 65535


@dataclass(frozen=True)
class StragglerSettings:
    """The arguments of :meth:`StragglerDetector.configure`.

    Every rank of the group passes the same ``sections`` and ``enabled``.

    Attributes:
        world: The number of ranks of the group.
        rank: This rank, from 0 to ``world - 1``. No two ranks share a number. Rank 0 logs, and
            decides whether timing is on.
        mmcnt: The number of ranks to list with the lowest and with the highest throughput. Values
            below 1 count as 1.
        amp: The time of a step over the timed part of it: 3.0 if only the forward pass is timed.
        port: The port of the controller on rank 0, up to 65535. 0 chooses a free port.
        prefill: The number of events to create when timing is first switched on.
        enabled: Whether ranges are timed from the start.
        group: The ranks that report together. None means the whole job.
        device: The computing device. None means the accelerator, or the CPU if there is none.
        sections: At most 64 names for :meth:`StragglerDetector.section`, known to all ranks.
        sample_every: Time only every Nth range of a kind. Sums are multiplied by N.
        bind: The address on which rank 0 listens.
        token: The token that requests have to present. None reads ``MCORE_STRAGGLER_TOKEN``, else
            writes a random one to a file of mode 0600 that ``mcore-straggler`` reads.
        controller: Whether rank 0 listens for requests.
        allow_get_toggle: Whether ``GET /`` toggles timing, as with Megatron-LM.
        z_threshold: The distance of an outlier in standard deviations of the measured noise, above
            0. It is raised with the number of ranks and sections, to keep the chance of a false
            report the same.
        relative_threshold: An outlier also takes this much longer, above 0: its relative score
            (time of the faster ranks over the rank's) is below this. 1.0 leaves the decision to
            the noise.
        individual_threshold: A rank has become slow if its usual time over its time is below this,
            above 0, and the noise does not explain it. The default means 0.96 for a rank without
            peers, which has nothing else to be compared with.
        telemetry: Returns temperature (C), power (W), utilisation (%) and clock (MHz). None reads
            NVML, or amdsmi through torch.
        report_every_s: About how often :meth:`StragglerDetector.report_if_due` reports, in seconds,
            and ten times as often while the noise is measured.
        on_straggler: The action of a report with ``stragglers``, in addition to the warning on
            rank 0. ``"log"`` does nothing more, ``"stop"`` raises :class:`StragglerFoundError` on
            every rank, and a function is called with the report on every rank.
        peers: A label of at most 32 bytes for the work and the hardware of this rank, such as
            ``"stage 0"``. A verdict compares ranks with the same label. Ranks without such a peer
            are compared with their past.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> StragglerSettings(world=8, rank=0, sections=("forward",)).amp
        3.0
    """

    world: int
    rank: int
    mmcnt: int = 1
    amp: float = 3.0
    port: int = 65535
    prefill: int = 1024
    enabled: bool = False
    _: KW_ONLY
    group: GroupLike | None = None
    device: torch.device | str | None = None
    sections: Sequence[str] = ()
    sample_every: int = 1
    bind: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)  # a secret
    controller: bool = True
    allow_get_toggle: bool = False
    z_threshold: float = 3.3
    relative_threshold: float = 1.0
    individual_threshold: float = 0.85
    telemetry: Callable[[], Sequence[float]] | None = None
    report_every_s: float = 300.0
    on_straggler: OnStraggler = "log"
    peers: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mmcnt", max(self.mmcnt, 1))
        can_act = self.on_straggler in ("log", "stop") or callable(self.on_straggler)
        # NaN fails every comparison, so it is out of range, too.
        for name, is_valid, expected in (
            ("world", self.world >= 1, "at least 1"),
            ("rank", 0 <= self.rank < self.world, f"0 to {self.world - 1}"),
            ("amp", self.amp > 0, "a number above 0"),
            ("port", 0 <= self.port <= _MAX_PORT, f"0 to {_MAX_PORT}"),
            ("prefill", self.prefill >= 0, "0 or more"),
            ("sample_every", self.sample_every >= 1, "at least 1"),
            ("z_threshold", self.z_threshold > 0, "a number above 0"),
            ("relative_threshold", self.relative_threshold > 0, "a number above 0"),
            ("individual_threshold", self.individual_threshold > 0, "a number above 0"),
            ("peers", len(self.peers.encode()) <= PEERS_BYTES, f"at most {PEERS_BYTES} bytes"),
            ("report_every_s", self.report_every_s > 0, "seconds above 0"),
            ("on_straggler", can_act, "'log', 'stop' or a function of the report"),
        ):
            if not is_valid:
                value = getattr(self, name)
                raise ValueError(f"straggler detector: {name} is {value!r}; give {expected}")
