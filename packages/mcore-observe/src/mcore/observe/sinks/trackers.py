"""The trackers that a run may have, and how the scalars of a step reach them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from mcore.observe.rank_logging import writes_log
from mcore.observe.sinks import comet, mlflow, tensorboard, wandb
from mcore.observe.sinks.base import GuardedSink, MetricSink, ScalarRules, TrackerSpec
from mcore.observe.sinks.delivery.spool import EarlierSpools, Spool
from mcore.observe.sinks.delivery.tracker_run import Opening
from mcore.observe.sinks.jsonl import JsonlSink
from mcore.observe.sinks.run_folder import run_folder_of, spool_folder_of
from mcore.observe.sinks.scalars import Scalar
from mcore.observe.sinks.secrets import config_params, config_secrets, mask_secrets

logger = logging.getLogger(__name__)

# All that the package does with trackers reads this list. In this order they get their metrics.
TRACKERS = (tensorboard.TRACKER, wandb.TRACKER, mlflow.TRACKER, comet.TRACKER)
_ALL_SCALARS = ScalarRules()


def open_tracker(
    spec: TrackerSpec, settings: Any, config: Any, earlier_run_id: str | None = None
) -> Any:
    """Start to open a run of a tracker. Metrics wait for it on the disk."""
    folder = run_folder_of(settings)
    resume_step = getattr(settings, "resume_step", None)
    if spec.is_local:
        return spec.open(Opening(settings, config, resume_step=resume_step))
    spools = spool_folder_of(settings)
    run_id = earlier_run_id
    if run_id is None and resume_step is not None and folder is not None:
        run_id = folder.run_id(spec.name)
    earlier = None
    if resume_step is not None and earlier_run_id is None:
        earlier = EarlierSpools(spools, spec.name, resume_step)

    def note_run_id(run_id: str) -> None:
        if run_id and folder is not None:
            folder.note(spec.name, {"run_id": run_id})

    # A replay opens the run from these facts. A spool file must not contain secrets.
    known = config_secrets(config)
    kept = {name: getattr(settings, name, None) for name in spec.settings}
    for name, value in kept.items():
        if isinstance(value, (str, os.PathLike)):
            kept[name] = mask_secrets(os.fspath(value), known)
    facts = {"tracker": spec.name, "settings": kept, "params": config_params(config)}
    return spec.open(
        Opening(
            settings=settings,
            config=config,
            run_id=run_id,
            resume_step=None if earlier is None else resume_step,
            spool=Spool(spools, spec.name, facts),
            earlier=earlier,
            on_open=note_run_id,
        )
    )


def import_libraries(settings: Any) -> None:
    """Import the libraries of the wanted trackers, which slows down other threads for seconds."""
    for spec in TRACKERS:
        if getattr(settings, spec.wanted_by, None) is not None:
            with contextlib.suppress(ImportError):  # a warning when the tracker is opened
                import_module(spec.module)


def open_metrics_file(settings: Any, begun_s: float | None = None) -> JsonlSink | None:
    """Open the file in the run's folder, or warn and return None if it cannot be opened.

    An error would stop one rank only, and the others would wait for it. If the run has begun at
    step 0, at a time, the files of an earlier run are renamed.
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
        logger.warning("cannot write %s: %s", folder.metrics, error)
        return None


def write_config(settings: Any, config: Any) -> None:
    """Write a run's settings to its folder, without secrets. The page of the run shows them."""
    folder = run_folder_of(settings)
    if folder is None:
        return
    try:
        folder.replace_json(folder.path / "config.json", config_params(config))
    except OSError as error:
        logger.warning("cannot write the settings to %s: %s", folder.path, error)


class SinkTable:
    """The sinks of one GlobalState, guarded. It remembers which of them failed."""

    def __init__(self) -> None:
        self._guards: dict[int, tuple[Any, GuardedSink]] = {}
        self._has_warned = False

    def of(self, global_state: Any) -> list[tuple[ScalarRules, GuardedSink]]:
        """Return the sinks that a state has now on this rank, each with its rules."""
        pairs = []
        config = getattr(global_state, "cfg", None)
        for spec in TRACKERS:
            client = getattr(global_state, spec.attribute, None)
            if client is not None:
                pairs.append((spec.rules, self._guard(client, spec.label, spec.adapt, config)))
        if writes_log(global_state):
            given = getattr(global_state, "extra_sinks", ())
            sinks = list(given) if isinstance(given, (list, tuple)) else []
            file = getattr(global_state, "metrics_file", None)
            for sink in [file, *sinks] if isinstance(file, JsonlSink) else sinks:
                guard = self._guard(sink, type(sink).__name__, lambda sink: sink, config)
                pairs.append((_ALL_SCALARS, guard))
        return pairs

    def to_log_to(self, global_state: Any) -> list[tuple[ScalarRules, GuardedSink]]:
        """Return :meth:`of`, with one WARNING if all sinks have been closed."""
        pairs = self.of(global_state)
        if self._guards and not pairs and not self._has_warned:
            self._has_warned = True
            logger.warning("the log is closed: further metrics go to the console only")
        return pairs

    def _guard(
        self, client: Any, name: str, adapt: Callable[[Any], MetricSink], config: Any
    ) -> GuardedSink:
        # The client is kept next to its guard: else its id could become another object's.
        if id(client) not in self._guards:
            guard = GuardedSink(name, adapt(client), secrets=config_secrets(config))
            self._guards[id(client)] = (client, guard)
        return self._guards[id(client)][1]


def emit(
    sinks: Sequence[tuple[ScalarRules, GuardedSink]],
    batches: Sequence[Mapping[str, Scalar]],
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
