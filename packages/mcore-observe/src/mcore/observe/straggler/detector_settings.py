"""Settings of the straggler detector: what is allowed, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from mcore.observe.straggler.events import make_ranges
from mcore.observe.straggler.exchange import Exchange
from mcore.observe.straggler.outliers import OutlierRule
from mcore.observe.straggler.ranges import HostRanges
from mcore.observe.straggler.report import StragglerReport
from mcore.observe.straggler.reporter import Reporter
from mcore.observe.straggler.telemetry import guarded, telemetry_of
from mcore.parallel.groups import GroupLike
from mcore.tensor.device import current_device

if TYPE_CHECKING:
    from mcore.observe.straggler.controller import Listener

OnStraggler: TypeAlias = 'Literal["log", "stop"] | Callable[[StragglerReport], object]'

_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """What :meth:`StragglerDetector.configure` was given; ValueError for an impossible value."""

    world: int
    rank: int
    mmcnt: int
    amp: float
    port: int
    prefill: int
    enabled: bool
    group: GroupLike | None
    device: torch.device | str | None
    sections: Sequence[str]
    sample_every: int
    bind: str
    token: str | None
    controller: bool
    allow_get_toggle: bool
    z_threshold: float
    relative_threshold: float
    individual_threshold: float
    telemetry: Callable[[], Sequence[float]] | None
    report_every_s: float
    on_straggler: OnStraggler

    def __post_init__(self) -> None:
        object.__setattr__(self, "mmcnt", max(self.mmcnt, 1))
        what = "straggler detector"
        if self.world < 1:
            raise ValueError(f"{what}: world is {self.world}; give at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"{what}: rank is {self.rank}; give 0 to {self.world - 1}")
        if not self.amp > 0:  # nor NaN
            raise ValueError(f"{what}: amp is {self.amp}; give a number above 0")
        if not 0 <= self.port <= _MAX_PORT:
            raise ValueError(f"{what}: port is {self.port}; give 0 to {_MAX_PORT}")
        if self.prefill < 0:
            raise ValueError(f"{what}: prefill is {self.prefill}; give 0 or more")
        if self.sample_every < 1:
            raise ValueError(f"{what}: sample_every is {self.sample_every}; give at least 1")
        if not self.z_threshold > 0:
            raise ValueError(f"{what}: z_threshold is {self.z_threshold}; give a number above 0")
        if not self.report_every_s > 0:
            raise ValueError(
                f"{what}: report_every_s is {self.report_every_s}; give seconds above 0"
            )
        if self.on_straggler not in ("log", "stop") and not callable(self.on_straggler):
            raise ValueError(
                f"{what}: on_straggler is {self.on_straggler!r}; give 'log', 'stop' or a function "
                "of the report"
            )

    @property
    def computing(self) -> torch.device:
        """The device that computes; without an index, the one current when a range begins."""
        return torch.device(current_device().type if self.device is None else self.device)

    def make_listener(self) -> Listener | None:
        """Return what is to listen for requests on rank 0, if anything is."""
        if not self.controller or self.rank != 0:
            return None
        # This imports the standard library's HTTP server, which most ranks never need.
        from mcore.observe.straggler.controller import Listener

        return Listener(
            bind=self.bind,
            port=self.port,
            token=self.token,
            allow_get_toggle=self.allow_get_toggle,
        )

    def make_ranges(self) -> HostRanges:
        """Return what times ranges."""
        return make_ranges(self.computing, prefill=self.prefill, sample_every=self.sample_every)

    def make_reporter(self, exchange: Exchange, names: Sequence[str]) -> Reporter:
        """Return what makes reports of the sections."""
        own = self.telemetry
        return Reporter(
            exchange,
            telemetry_of(self.computing) if own is None else guarded(own),
            world=self.world,
            rank=self.rank,
            amp=self.amp,
            num_listed=self.mmcnt,
            names=names,
            rule=OutlierRule(self.z_threshold, self.relative_threshold, self.individual_threshold),
        )
