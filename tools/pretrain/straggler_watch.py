"""Straggler detection over the job: who is slow, where it is written, what the trackers get."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist

from mcore.observe import StragglerDetector, StragglerReport
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.step_ranges import SECTIONS

_CLEAR_SCORE = 0.6
_SHARE = 0.1
_logger = logging.getLogger("mcore.observe.straggler")


class StragglerWatch:
    """The detector of a run; all ranks make it and call ``report`` together.

    Args:
        settings: whether it is on, and the port of its controller on rank 0.
        folder: gets ``straggler.log``.
        device: what computes.
        flops_per_step: operations of the whole job in a step.
    """

    def __init__(
        self, settings: Settings, folder: RunFolder, device: torch.device, flops_per_step: int
    ) -> None:
        StragglerDetector.reset_singleton()
        self.detector = StragglerDetector()
        self.reports = 0
        self.named: Counter[int] = Counter()
        self._log = folder.straggler_log
        self._flops_per_step = flops_per_step
        self._steps = 0
        self._handler: logging.Handler | None = None
        if settings.straggler:
            self._start(settings, device)

    def _start(self, settings: Settings, device: torch.device) -> None:
        rank = dist.get_rank()
        if rank == 0:
            self._write_lines()
        self.detector.configure(
            dist.get_world_size(),
            rank,
            port=settings.straggler_port,
            enabled=True,
            device=device,
            sections=SECTIONS,
        )
        if self.detector.controller_error is not None:
            print(
                f"straggler detector: port {settings.straggler_port} cannot be used "
                f"({self.detector.controller_error.strerror}); the detector works without it",
                flush=True,
            )
        elif self.detector.controller_address is not None:
            host, port = self.detector.controller_address
            print(f"straggler detector: http://{host}:{port}/report", flush=True)

    def _write_lines(self) -> None:
        """Have every line of the detector in the file; the console gets the clear cases only."""
        self._handler = logging.FileHandler(self._log)
        _logger.addHandler(self._handler)
        _logger.setLevel(logging.INFO)

    def end_step(self) -> None:
        """Call after every step; no communication."""
        self._steps += 1

    def report(self) -> dict[str, float]:
        """Compare the ranks since the last report; one all-gather over the world.

        Returns:
            For the trackers, equal on all ranks: each rank's speed relative to the fastest one, the
            time of its forward passes in a step, and its longest wait for data.
        """
        steps, self._steps = self._steps, 0
        if not self.detector.configured or not steps:
            return {}
        before = self.detector.last_report
        self.detector.report(float(self._flops_per_step * steps), steps)
        found = self.detector.last_report
        if found is None or found is before:  # it is switched off
            return {}
        self.reports += 1
        slow = list(slow_parts(found))
        self.named.update({rank for rank, _, _ in slow})
        if dist.get_rank() == 0:
            for rank, part, times in slow:
                print(
                    f"straggler: rank {rank} takes {times:.1f} times as long as the fastest rank "
                    f"for its {part}",
                    flush=True,
                )
        columns = {
            "relative-score": found.relative_scores["compute"],
            "forward-ms": found.metrics["elapsed_ms"],
            "data-ms": found.metrics["data_ms"],
        }
        return {
            f"straggler/rank{rank}/{name}": values[rank]
            for rank in range(found.world_size)
            for name, values in columns.items()
        }

    def summary(self) -> str | None:
        """Which ranks were named how often, or None without a report."""
        if not self.reports:
            return None
        reports = f"{self.reports} reports ({self._log})"
        if not self.named:
            return f"none in {reports}"
        named = ", ".join(f"rank {rank} in {count}" for rank, count in sorted(self.named.items()))
        return f"{named} of {reports}"

    def close(self) -> None:
        """Stop listening and writing; all ranks call it."""
        StragglerDetector.reset_singleton()
        if self._handler is not None:
            _logger.removeHandler(self._handler)
            self._handler.close()
            self._handler = None


def slow_parts(found: StragglerReport) -> Iterator[tuple[int, str, float]]:
    """The clear cases of a report: rank, part of the step, and how many times the fastest's time.

    A case is clear where the rank's median is 1.67 times the fastest one's or more, in a part that
    takes a tenth of the step or more: where ranks share a machine, shorter parts vary that much.
    """
    whole_ms = sum(stats.sum_ms for name in SECTIONS for stats in found.sections[name])
    for name in SECTIONS:
        if sum(stats.sum_ms for stats in found.sections[name]) < _SHARE * whole_ms:
            continue
        for rank, score in enumerate(found.relative_scores[name]):
            if score <= _CLEAR_SCORE:
                yield rank, name, 1.0 / score
