"""The trackers that a run may have, and how each one wants its scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore.observe.config_params import config_secrets
from mcore.observe.sinks.comet import CometSink
from mcore.observe.sinks.guarded import GuardedSink
from mcore.observe.sinks.mlflow import MlflowSink
from mcore.observe.sinks.protocol import MetricSink
from mcore.observe.sinks.scalars import Scalar
from mcore.observe.sinks.tensorboard import TensorBoardSink
from mcore.observe.sinks.wandb import WandbSink

__all__ = ["TRACKERS", "SinkTable", "Tracker", "emit"]


@dataclass(frozen=True)
class Tracker:
    """How one kind of tracker gets its scalars.

    Attributes:
        attribute: Where a GlobalState keeps the client.
        label: Its name in messages.
        adapt: Makes a sink of the client.
        left_out: Scalars that it does not get.
        renamed: Scalars that it gets under another name.
        versus_samples: It also gets some scalars over the samples consumed.
    """

    attribute: str
    label: str
    adapt: Callable[[Any], MetricSink]
    left_out: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    versus_samples: bool = False


TRACKERS = (
    Tracker(
        "tensorboard_logger",
        "TensorBoard",
        TensorBoardSink,
        left_out=frozenset({"samples vs steps"}),
        versus_samples=True,
    ),
    Tracker("wandb_logger", "Weights & Biases", WandbSink),
    Tracker(
        "mlflow_logger",
        "MLflow",
        MlflowSink,
        # The sanitizer would make "throughput/tflops_device" of it, which no dashboard knows.
        renamed={"throughput/tflops/device": "throughput/tflops_per_device"},
    ),
    Tracker("comet_logger", "Comet", CometSink),
)


def _as_it_is(sink: MetricSink) -> MetricSink:
    return sink


class SinkTable:
    """The sinks of one GlobalState, guarded; remembers which of them failed.

    Example:
        >>> from types import SimpleNamespace
        >>> from mcore.observe.sinks.memory import MemorySink
        >>> table = SinkTable()
        >>> [sink.name for _, sink in table.of(SimpleNamespace(extra_sinks=[MemorySink()]))]
        ['MemorySink']
    """

    def __init__(self) -> None:
        self._guards: dict[int, tuple[Any, GuardedSink]] = {}

    def of(self, global_state: Any) -> list[tuple[Tracker, GuardedSink]]:
        """Return the sinks that a state holds now on this rank.

        Args:
            global_state: Something with the clients of :data:`TRACKERS` and ``extra_sinks``;
                what is missing or None is left out.

        Returns:
            Each sink, with how it gets its scalars.
        """
        pairs = []
        config = getattr(global_state, "cfg", None)
        for tracker in TRACKERS:
            client = getattr(global_state, tracker.attribute, None)
            if client is not None:
                pairs.append((tracker, self._guard(tracker, client, config)))
        for sink in _extra_sinks(global_state):
            kind = Tracker("extra_sinks", type(sink).__name__, _as_it_is)
            pairs.append((kind, self._guard(kind, sink, config)))
        return pairs

    def _guard(self, tracker: Tracker, client: Any, config: Any) -> GuardedSink:
        # The client is kept next to its guard, so that its id cannot become another object's.
        if id(client) not in self._guards:
            secrets = config_secrets(config)
            guard = GuardedSink(tracker.label, tracker.adapt(client), secrets=secrets)
            self._guards[id(client)] = (client, guard)
        return self._guards[id(client)][1]


def emit(
    sinks: Sequence[tuple[Tracker, GuardedSink]],
    batches: Sequence[Mapping[str, Scalar]],
    iteration: int,
    consumed_samples: int,
) -> None:
    """Send the scalars of a step, one call for each sink and batch.

    Args:
        sinks: The sinks of :meth:`SinkTable.of`.
        batches: The scalars, with Python numbers.
        iteration: The step.
        consumed_samples: Samples trained on, the other axis of TensorBoard.

    Example:
        >>> from types import SimpleNamespace
        >>> from mcore.observe.sinks.memory import MemorySink
        >>> kept = MemorySink()
        >>> sinks = SinkTable().of(SimpleNamespace(extra_sinks=[kept]))
        >>> emit(sinks, [{"lm loss": Scalar(2.5, versus_samples=True)}], 1, 64)
        >>> kept.steps
        {1: {'lm loss': 2.5}}
    """
    for tracker, sink in sinks:
        for batch in batches:
            chosen = {name: s for name, s in batch.items() if name not in tracker.left_out}
            named = {tracker.renamed.get(name, name): s.value for name, s in chosen.items()}
            sink.log(named, iteration)
            if tracker.versus_samples:
                pairs = {f"{n} vs samples": s.value for n, s in chosen.items() if s.versus_samples}
                sink.log(pairs, consumed_samples)


def _extra_sinks(global_state: Any) -> Sequence[MetricSink]:
    sinks = getattr(global_state, "extra_sinks", ())
    return sinks if isinstance(sinks, (list, tuple)) else ()
