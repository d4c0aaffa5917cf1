"""Metrics of experts and of multi-token prediction that a step reports, and their trackers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from mcore.observe.experts.moe_metrics import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    has_moe_metrics_tracker,
)
from mcore.observe.experts.mtp_metrics import (
    MTPMetricsTracker,
    get_mtp_metrics_tracker,
    has_mtp_metrics_tracker,
)
from mcore.observe.sinks.scalars import Scalars, as_number
from mcore.observe.training_log.console import Field
from mcore.observe.training_log.step import LogStep, is_on

_MEGATRON_MOE = "megatron.core.transformer.moe.moe_utils"
_MEGATRON_MOE_LOGGING = "megatron.core.transformer.moe.moe_logging"
_MEGATRON_MTP = "megatron.core.transformer.multi_token_prediction"

_NAMES = (
    ("aux_loss", "load_balancing_loss"),
    ("seq_aux_loss", "seq_load_balancing_loss"),
    ("global_aux_loss", "global_load_balancing_loss"),
)


class ExpertReport:
    """Adds metrics of experts to the scalars, the totals and the line of the training log."""

    def __init__(self) -> None:
        self._num_steps = 0  # steps since the last report, without skipped ones
        self._foreign = {"moe": _Foreign(), "mtp": _Foreign()}

    def end_step(self, step: LogStep) -> None:
        """Keep the step's metrics, or drop them if it was skipped. No communication, no wait."""
        if not step.given.skipped:
            self._num_steps += 1
        for source in self._find_sources(step):
            if isinstance(source, _Foreign):
                continue
            if step.given.skipped:
                source.tracker.discard_step()
            else:
                source.tracker.commit_step(1 / step.num_microbatches)

    def collect(self, step: LogStep, scalars: Scalars, totals: dict[str, Any]) -> list[Field | str]:
        """Reduce the metrics over the ranks, on the device, and return their fields.

        All ranks call it at every step. A text is a field that another library has formatted.
        """
        fields: list[Field | str] = []
        for source in self._find_sources(step):
            fields += source.report(step, self._num_steps, scalars, totals)
        if step.logs:
            self._num_steps = 0
        return fields

    def _find_sources(self, step: LogStep) -> Iterator[_Source]:
        if as_number(getattr(step.model_config, "num_moe_experts", None)) is not None:
            tracker = _find_moe_tracker(step.global_state)
            if isinstance(tracker, MoEMetricsTracker):
                yield _OurExperts(tracker)
            else:
                per_layer = is_on(step.model_config, "moe_per_layer_logging")
                options = _list_moe_options(step) | {"per_layer_logging": per_layer}
                yield self._foreign["moe"].use(tracker.report, options)
        if as_number(getattr(step.model_config, "mtp_num_layers", None)) is not None:
            tracker = _find_mtp_tracker(step.global_state)
            if isinstance(tracker, MTPMetricsTracker):
                yield _OurPrediction(tracker)
            else:
                yield self._foreign["mtp"].use(tracker.report, {})


@dataclass(frozen=True)
class _OurExperts:
    """Our tracker of routers, which adds up on the device until a step logs."""

    tracker: MoEMetricsTracker

    def report(
        self, step: LogStep, num_steps: int, scalars: Scalars, totals: dict[str, Any]
    ) -> list[Field | str]:
        if not step.logs or not num_steps:
            return []
        reduced = self.tracker.take(
            1.0, total_loss_dict=totals, num_steps=num_steps, **_list_moe_options(step)
        )
        scalars.add_all(reduced.values)
        if is_on(step.model_config, "moe_per_layer_logging"):
            scalars.add_all(reduced.by_layer())
        return [Field(name, reduced.values[name], ".2f") for name in reduced.text_names()]


@dataclass(frozen=True)
class _OurPrediction:
    """Our tracker of multi-token prediction, which adds up on the device until a step logs."""

    tracker: MTPMetricsTracker

    def report(
        self, step: LogStep, num_steps: int, scalars: Scalars, totals: dict[str, Any]
    ) -> list[Field | str]:
        if step.logs and num_steps:
            scalars.add_all(self.tracker.take(1.0, total_loss_dict=totals, num_steps=num_steps))
        return []


class _Foreign:
    """A tracker of another library, which expects to be called at every step.

    It keeps the sums of the reported values since the last step that logs.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._text = ""

    def use(self, report_step: Callable[..., Any], options: dict[str, Any]) -> _Foreign:
        """Set the function of the tracker, and its further arguments."""
        self._report_step, self._options = report_step, options
        return self

    def report(
        self, step: LogStep, num_steps: int, scalars: Scalars, totals: dict[str, Any]
    ) -> list[Field | str]:
        reported = Scalars()
        text = self._report_step(
            loss_scale=1 / step.num_microbatches,
            iteration=step.iteration,
            writer=reported,
            wandb_writer=None,
            total_loss_dict={} if step.given.skipped else totals,
            **self._options,
        )
        if not step.given.skipped:
            for batch in reported.batches:
                for name, scalar in batch.items():
                    self._sums[name] = self._sums.get(name, 0) + scalar.value
                    self._counts[name] = self._counts.get(name, 0) + 1
            self._text = text if isinstance(text, str) else ""
        if not step.logs:
            return []
        scalars.add_all({name: total / self._counts[name] for name, total in self._sums.items()})
        self._sums, self._counts = {}, {}
        if not step.ends_console_interval:
            return []
        shown, self._text = self._text, ""
        return [shown] if shown else []


_Source: TypeAlias = "_OurExperts | _OurPrediction | _Foreign"


def _find_moe_tracker(global_state: Any) -> Any:
    """Return the state's tracker, else ours if used, else Megatron-LM's if loaded, else ours."""
    given = getattr(global_state, "moe_metrics", None)
    if given is not None:
        return given
    if has_moe_metrics_tracker():
        return get_moe_metrics_tracker()
    newer = getattr(sys.modules.get(_MEGATRON_MOE_LOGGING), "get_moe_metrics_tracker", None)
    if newer is not None:
        return _MegatronTracker(newer().report)
    function = getattr(sys.modules.get(_MEGATRON_MOE), "track_moe_metrics", None)
    return get_moe_metrics_tracker() if function is None else _MegatronTracker(function)


def _find_mtp_tracker(global_state: Any) -> Any:
    """Return the state's tracker, else ours if used, else Megatron-LM's if loaded, else ours."""
    given = getattr(global_state, "mtp_metrics", None)
    if given is not None:
        return given
    helper = getattr(sys.modules.get(_MEGATRON_MTP), "MTPLossLoggingHelper", None)
    function = getattr(helper, "track_mtp_metrics", None)
    if function is not None and not has_mtp_metrics_tracker():
        return _MegatronTracker(function)
    return get_mtp_metrics_tracker()


class _MegatronTracker:
    """A function of Megatron-LM as a tracker; omits arguments that the function lacks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._known = inspect.signature(function).parameters

    def report(self, **options: Any) -> Any:
        if "num_moe_layers" in options and "num_moe_layers" not in self._known:
            # This version lacks hybrid models and counts every layer: give it those with experts.
            options["num_layers"] = options["num_moe_layers"] - (options["mtp_num_layers"] or 0)
            options["moe_layer_freq"] = None
        return self._function(**{k: v for k, v in options.items() if k in self._known})


def _list_moe_options(step: LogStep) -> dict[str, Any]:
    model_config = step.model_config
    mtp_num_layers = getattr(model_config, "mtp_num_layers", None)
    options = {
        "force_initialize": True,
        "track_names": moe_metric_names(model_config),
        "num_layers": getattr(model_config, "num_layers", None),
        "moe_layer_freq": getattr(model_config, "moe_layer_freq", None),
        "mtp_num_layers": mtp_num_layers,
        "pg_collection": step.pg_collection,
    }
    pattern = getattr(model_config, "hybrid_layer_pattern", None)
    if getattr(model_config, "is_hybrid_model", False) and isinstance(pattern, str):
        options["num_moe_layers"] = pattern.count("E") + (mtp_num_layers or 0)
    return options


def moe_metric_names(model_config: Any) -> list[str]:
    """List the router losses that a model's configuration produces.

    A list of balancing types is matched by its items, a string by substrings, as in Megatron-LM:
    ``"seq_aux_loss"`` also yields ``load_balancing_loss``, which then stays 0.
    """
    kinds = getattr(model_config, "moe_router_load_balancing_type", None) or ()
    names = [name for kind, name in _NAMES if kind in kinds]
    if getattr(model_config, "moe_z_loss_coeff", None) is not None:
        names.append("z_loss")
    return names
