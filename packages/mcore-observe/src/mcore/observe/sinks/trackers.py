"""The trackers that a run may have, and how the scalars of a step reach them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mcore.observe.secrets import config_secrets
from mcore.observe.sinks import comet, mlflow, tensorboard, wandb
from mcore.observe.sinks.base import GuardedSink, MetricSink, ScalarRules

TRACKERS = (tensorboard.TRACKER, wandb.TRACKER, mlflow.TRACKER, comet.TRACKER)
_ALL_SCALARS = ScalarRules()


class _Scalar(Protocol):
    """A value of a step, which TensorBoard may also show over the samples consumed."""

    @property
    def value(self) -> Any: ...

    @property
    def versus_samples(self) -> bool: ...


class SinkTable:
    """The sinks of one GlobalState, guarded; remembers which of them failed."""

    def __init__(self) -> None:
        self._guards: dict[int, tuple[Any, GuardedSink]] = {}

    def of(self, global_state: Any) -> list[tuple[ScalarRules, GuardedSink]]:
        """Return the sinks that a state holds now on this rank, each with its rules."""
        pairs = []
        config = getattr(global_state, "cfg", None)
        for tracker in TRACKERS:
            client = getattr(global_state, tracker.attribute, None)
            if client is not None:
                guard = self._guard(client, tracker.label, tracker.adapt, config)
                pairs.append((tracker.rules, guard))
        for sink in _extra_sinks(global_state):
            guard = self._guard(sink, type(sink).__name__, lambda sink: sink, config)
            pairs.append((_ALL_SCALARS, guard))
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
    sinks = getattr(global_state, "extra_sinks", ())
    return sinks if isinstance(sinks, (list, tuple)) else ()
