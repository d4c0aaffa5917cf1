"""The trackers that a run may have, and how the scalars of a step reach them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from mcore.observe.rank_logging import is_last_rank
from mcore.observe.settings.secrets import config_params, config_secrets, mask_secrets
from mcore.observe.sinks import comet, mlflow, tensorboard, wandb
from mcore.observe.sinks.base import GuardedSink, MetricSink, Opening, ScalarRules, Tracker
from mcore.observe.sinks.jsonl import JsonlSink
from mcore.observe.sinks.run_folder import RunFolder, run_folder_of, spool_folder_of
from mcore.observe.sinks.spool import EarlierSpools, Spool

logger = logging.getLogger(__name__)

TRACKERS = (tensorboard.TRACKER, wandb.TRACKER, mlflow.TRACKER, comet.TRACKER)
_ALL_SCALARS = ScalarRules()


class _Scalar(Protocol):
    """A value of a step, which TensorBoard may also show over the samples consumed."""

    @property
    def value(self) -> Any: ...

    @property
    def versus_samples(self) -> bool: ...


def open_tracker(
    tracker: Tracker, settings: Any, config: Any, earlier_run_id: str | None = None
) -> Any:
    """Start opening a run of a tracker; what it cannot take waits on the disk."""
    folder = run_folder_of(settings)
    resume_step = getattr(settings, "resume_step", None)
    spools = spool_folder_of(settings)
    run_id = earlier_run_id
    if run_id is None and resume_step is not None and folder is not None:
        run_id = folder.run_id(tracker.short_name)
    earlier = None
    if resume_step is not None and earlier_run_id is None:
        earlier = EarlierSpools(spools, tracker.short_name, resume_step)
    return tracker.open(
        Opening(
            settings=settings,
            config=config,
            run_id=run_id,
            resume_step=None if earlier is None else resume_step,
            spool=Spool(spools, tracker.short_name, _facts(tracker, settings, config)),
            earlier=earlier,
            on_open=None
            if folder is None
            else functools.partial(_note, folder, tracker.short_name),
        )
    )


def import_libraries(settings: Any) -> None:
    """Import what the trackers need, which slows down all other threads for seconds."""
    for tracker in TRACKERS:
        if getattr(settings, tracker.asked_by, None) is not None:
            with contextlib.suppress(ImportError):  # a warning when the tracker is opened
                import_module(tracker.module)


def open_metrics_file(settings: Any, begun_s: float | None = None) -> JsonlSink | None:
    """Open the file in the run's folder; a warning where that fails, since it is one rank's own.

    A run that has begun at step 0, at a time, sets aside what an earlier one has left there.
    """
    folder = run_folder_of(settings)
    if folder is None:
        return None
    resume_step = getattr(settings, "resume_step", None)
    try:
        if begun_s is not None and resume_step is None:
            folder.set_aside(begun_s)
        return JsonlSink(folder.metrics, resume_step=resume_step)
    except OSError as error:
        logger.warning("%s is not written: %s", folder.metrics, error)
        return None


def _note(folder: RunFolder, tracker: str, run_id: str) -> None:
    if run_id:
        folder.note(tracker, {"run_id": run_id})


def _facts(tracker: Tracker, settings: Any, config: Any) -> dict[str, Any]:
    """Return what a replay needs to know about a run, without secrets."""
    given = {name: getattr(settings, name, None) for name in tracker.settings}
    known = config_secrets(config)
    shown = {
        name: mask_secrets(os.fspath(value), known)
        if isinstance(value, (str, os.PathLike))
        else value
        for name, value in given.items()
    }
    return {"tracker": tracker.short_name, "settings": shown, "params": config_params(config)}


class SinkTable:
    """The sinks of one GlobalState, guarded; remembers which of them failed."""

    def __init__(self) -> None:
        self._guards: dict[int, tuple[Any, GuardedSink]] = {}
        self._has_warned = False

    def of(self, global_state: Any) -> list[tuple[ScalarRules, GuardedSink]]:
        """Return the sinks that a state holds now on this rank, each with its rules."""
        pairs = []
        config = getattr(global_state, "cfg", None)
        for tracker in TRACKERS:
            client = getattr(global_state, tracker.attribute, None)
            if client is not None:
                guard = self._guard(client, tracker.label, tracker.adapt, config)
                pairs.append((tracker.rules, guard))
        for sink in _extra_sinks(global_state) if is_last_rank() else ():
            guard = self._guard(sink, type(sink).__name__, lambda sink: sink, config)
            pairs.append((_ALL_SCALARS, guard))
        return pairs

    def to_log_to(self, global_state: Any) -> list[tuple[ScalarRules, GuardedSink]]:
        """Return :meth:`of`, with one WARNING where there are none any more."""
        pairs = self.of(global_state)
        if self._guards and not pairs and not self._has_warned:
            self._has_warned = True
            logger.warning("the log is closed: what is logged now is only on the console")
        return pairs

    def _guard(
        self, client: Any, name: str, adapt: Callable[[Any], MetricSink], config: Any
    ) -> GuardedSink:
        # The client is kept next to its guard, so that its id cannot become another object's.
        if id(client) not in self._guards:
            guard = GuardedSink(name, adapt(client), secrets=config_secrets(config))
            self._guards[id(client)] = (client, guard)
        return self._guards[id(client)][1]


def emit(
    sinks: Sequence[tuple[ScalarRules, GuardedSink]],
    batches: Sequence[Mapping[str, _Scalar]],
    iteration: int,
    consumed_samples: int,
) -> None:
    """Send the scalars of a step, which are Python numbers, in one call for each sink and batch."""
    for rules, sink in sinks:
        for batch in batches:
            chosen = {name: s for name, s in batch.items() if name not in rules.left_out}
            sink.log({rules.renamed.get(n, n): s.value for n, s in chosen.items()}, iteration)
            if rules.versus_samples:
                pairs = {f"{n} vs samples": s.value for n, s in chosen.items() if s.versus_samples}
                sink.log(pairs, consumed_samples)


def _extra_sinks(global_state: Any) -> Sequence[MetricSink]:
    given = getattr(global_state, "extra_sinks", ())
    sinks = list(given) if isinstance(given, (list, tuple)) else []
    own = getattr(global_state, "metrics_file", None)
    return [own, *sinks] if isinstance(own, JsonlSink) else sinks
