"""Steps that the log counts itself: counters, sums and time stamps between two lines."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mcore.observe.loss_totals import count_iterations
from mcore.observe.model_groups import find_process_groups
from mcore.observe.training_log.log import log_training_step
from mcore.observe.training_log.step import find_num_microbatches, samples_per_step
from mcore.observe.values.scalars import as_number


class CountedSteps:
    """What a training loop keeps for :func:`mcore.observe.training_log`, kept for it."""

    def __init__(self) -> None:
        self._totals: dict[str, Any] = {}
        self.first_step: int | None = None  # done before the first that was counted
        self._finished: collections.deque[float] = collections.deque()

    def log(
        self,
        config: Any,
        global_state: Any,
        losses: Mapping[str, Any],
        values: Mapping[str, Any],
        *,
        samples: int | None,
        tokens: int | None,
        steps: int,
        skipped: bool,
        model: Any,
        pg_collection: Any,
        scalars: Mapping[str, Any],
    ) -> None:
        """Advance the counters by steps and log them; all ranks call it."""
        progress = global_state.train_state
        if self.first_step is None:
            self.first_step = progress.step
        if samples is None:
            groups = find_process_groups(pg_collection, model)
            microbatches = find_num_microbatches(config, global_state, groups)
            samples = samples_per_step(config, microbatches, groups) * steps
        progress.step += steps
        progress.consumed_train_samples += int(samples)
        if skipped:
            progress.skipped_train_samples += int(samples)
        window = as_number(getattr(config.logger, "throughput_window_size", None)) or 100
        self._finished.extend(self._stamps(steps))
        while len(self._finished) > window + 1:
            self._finished.popleft()
        log_training_step(
            losses,
            self._totals,
            values,
            config,
            global_state,
            skipped_iter=int(skipped),
            history_wct=list(self._finished) if len(self._finished) > window else None,
            model=model,
            pg_collection=pg_collection,
            loaded_iteration=self.first_step,
            further=scalars,
            samples=samples,
            tokens=tokens,
            steps=steps,
        )
        if not count_iterations(self._totals):  # a line has shown them
            self._totals.clear()  # else a loss that does not come again would be shown as 0

    def _stamps(self, steps: int) -> Iterator[float]:
        """Yield a time stamp for each of the steps that have ended since the last call."""
        now_s = time.time()
        since_s = self._finished[-1] if self._finished else now_s
        for left in range(steps - 1, -1, -1):
            yield now_s - (now_s - since_s) * left / steps
