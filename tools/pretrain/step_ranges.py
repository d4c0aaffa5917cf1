"""The parts of a step by name, for the straggler detector and for profilers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mcore.observe import StragglerDetector, nvtx_range
from pretrain.slow_rank import SlowRank

SECTIONS = ("forward", "backward", "optimizer")


class StepRanges:
    """Context managers around the parts of a step.

    Nothing in a part waits for another rank, save what tensor- and context-parallel layers and
    FSDP wait for inside it.

    Args:
        detector: times the parts, once it is configured and on.
        slow: the rank to make slow, or None. Its forward takes ``factor`` times as long as the
            longest of all ranks, pass by pass, so that it stands out on a busy machine too.
        device: what computes.
    """

    def __init__(
        self, detector: StragglerDetector, slow: SlowRank | None, device: torch.device
    ) -> None:
        self._detector = detector
        self._slow = slow
        self._device = device

    @contextmanager
    def data(self) -> Iterator[None]:
        """Making the batch."""
        with nvtx_range("data"), self._detector(bdata=True):
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model and its loss: what the detector calls compute, and a section of its own."""
        section = self._detector.section("forward")
        if self._slow is None:
            with nvtx_range("forward"), self._detector, section:
                yield
            return
        is_slow = dist.get_rank() == self._slow.rank
        with nvtx_range("forward"), self._detector, section:
            began = self._now()
            yield
            took = self._now() - began
            if is_slow:
                end = began + self._slow.factor * self._longest(took)
                time.sleep(max(0.0, end - self._now()))
        if not is_slow:
            self._longest(took)
        dist.barrier()  # or the others would wait for the slow rank inside their next part

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Gradients of this rank."""
        with nvtx_range("backward"), self._detector.section("backward"):
            yield

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """The update of the weights."""
        with nvtx_range("optimizer"), self._detector.section("optimizer"):
            yield

    def _longest(self, seconds: float) -> float:
        """The longest time of all ranks; one all-reduce over the world."""
        longest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
