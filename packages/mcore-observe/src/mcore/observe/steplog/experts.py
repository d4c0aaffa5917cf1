"""Which MoE and multi-token-prediction metrics a step reports, and who has kept them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mcore.observe.host_reads import as_number
from mcore.observe.moe_metrics import (
    MoEMetricsTracker,
    get_moe_metrics_tracker,
    has_moe_metrics_tracker,
)
from mcore.observe.mtp_metrics import (
    MTPMetricsTracker,
    get_mtp_metrics_tracker,
    has_mtp_metrics_tracker,
)
from mcore.observe.scalars import Scalars

__all__ = ["ExpertReport", "ExpertTexts", "moe_metric_names"]

_MEGATRON_MOE = "megatron.core.transformer.moe.moe_utils"
_MEGATRON_MTP = "megatron.core.transformer.multi_token_prediction"

_NAMES = (
    ("aux_loss", "load_balancing_loss"),
    ("seq_aux_loss", "seq_load_balancing_loss"),
    ("global_aux_loss", "global_load_balancing_loss"),
)


def moe_metric_names(model_config: Any) -> list[str]:
    """List the router losses that a model's configuration gives rise to.

    A list of balancing types is looked up exactly; in a text each type is looked for as a part,
    so that ``"seq_aux_loss"`` also yields ``load_balancing_loss``, which then stays 0.

    Args:
        model_config: Something with ``moe_router_load_balancing_type`` (text or list) and
            ``moe_z_loss_coeff``.

    Returns:
        The names.

    Example:
        >>> from types import SimpleNamespace
        >>> moe_metric_names(SimpleNamespace(moe_router_load_balancing_type="seq_aux_loss"))
        ['load_balancing_loss', 'seq_load_balancing_loss']
    """
    kinds = getattr(model_config, "moe_router_load_balancing_type", None) or ()
    names = [name for kind, name in _NAMES if kind in kinds]
    if getattr(model_config, "moe_z_loss_coeff", None) is not None:
        names.append("z_loss")
    return names


@dataclass
class ExpertTexts:
    """What the console shows besides losses.

    Attributes:
        values: Numbers by name, still on the device.
        ready: Fields that another library has formatted.
    """

    values: dict[str, Any] = field(default_factory=dict)
    ready: str = ""


@dataclass
class ExpertReport:
    """Brings MoE and MTP metrics into the scalars and the loss totals of the training log.

    Our own trackers add up on the device until a step logs, and leave out skipped steps. Trackers
    of other libraries are asked at every step, as they expect.

    Attributes:
        steps: Steps whose metrics wait for the next report.
    """

    steps: int = 0

    def end_step(
        self, global_state: Any, model_config: Any, *, skipped: bool, num_microbatches: int
    ) -> None:
        """Keep the step's metrics, or drop them if it was skipped. No communication, no wait.

        Args:
            global_state: As for :meth:`collect`.
            model_config: As for :meth:`collect`.
            skipped: The optimizer skipped the step.
            num_microbatches: Forward passes of this step: its losses are divided by it.
        """
        self.steps += not skipped
        for tracker in (_moe(global_state, model_config), _mtp(global_state, model_config)):
            if isinstance(tracker, (MoEMetricsTracker, MTPMetricsTracker)):
                if skipped:
                    tracker.discard_step()
                else:
                    tracker.commit_step(1 / num_microbatches)

    def collect(
        self,
        global_state: Any,
        model_config: Any,
        scalars: Scalars,
        totals: dict[str, Any],
        *,
        num_microbatches: int,
        skipped: bool,
        step_logs: bool,
        pg_collection: Any,
    ) -> ExpertTexts:
        """Reduce the metrics over the ranks and add them to the scalars and the totals.

        The collectives are those of the trackers; all ranks call it with the same arguments.

        Args:
            global_state: Something with ``train_state.step`` that may have ``moe_metrics`` and
                ``mtp_metrics``.
            model_config: The model's configuration, or None.
            scalars: Gets the values, which stay on the device.
            totals: Gets the losses.
            num_microbatches: Forward passes of this step, for trackers of other libraries.
            skipped: The optimizer skipped the step.
            step_logs: Trackers or the console want numbers now.
            pg_collection: The groups.

        Returns:
            What the console shows besides losses.
        """
        texts = ExpertTexts()
        scale = 1 / num_microbatches
        has_values = step_logs and self.steps > 0
        moe, mtp = _moe(global_state, model_config), _mtp(global_state, model_config)
        foreign = _ForeignCall(global_state, scalars, None if skipped else totals, scale)
        options = _moe_options(model_config) if moe is not None else {}
        options["pg_collection"] = pg_collection
        if isinstance(moe, MoEMetricsTracker):
            if has_values:
                self._take_moe(moe, model_config, scalars, totals, texts, options)
        elif moe is not None:
            per_layer = _logs_layers(model_config)
            texts.ready += foreign.ask(moe, options | {"per_layer_logging": per_layer})
        if isinstance(mtp, MTPMetricsTracker):
            if has_values:
                scalars.add_all(mtp.take(1.0, total_loss_dict=totals, num_steps=self.steps))
        elif mtp is not None:
            texts.ready += foreign.ask(mtp, {})
        if step_logs:
            self.steps = 0
        return texts

    def _take_moe(
        self,
        tracker: MoEMetricsTracker,
        model_config: Any,
        scalars: Scalars,
        totals: dict[str, Any],
        texts: ExpertTexts,
        options: dict[str, Any],
    ) -> None:
        reduced = tracker.take(1.0, total_loss_dict=totals, num_steps=self.steps, **options)
        scalars.add_all(reduced.values)
        if _logs_layers(model_config):
            scalars.add_all(reduced.by_layer())
        texts.values.update({name: reduced.values[name] for name in reduced.text_names()})


@dataclass(frozen=True)
class _ForeignCall:
    """Asks a tracker of another library for its report of this step."""

    global_state: Any
    scalars: Scalars
    totals: dict[str, Any] | None
    loss_scale: float

    def ask(self, tracker: Any, options: dict[str, Any]) -> str:
        text = tracker.report(
            loss_scale=self.loss_scale,
            iteration=self.global_state.train_state.step,
            writer=self.scalars,
            wandb_writer=None,
            total_loss_dict=self.totals,
            **options,
        )
        return text if isinstance(text, str) else ""


class _MegatronTracker:
    """One of Megatron-LM's functions as a tracker; leaves out arguments that it does not know."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._known = inspect.signature(function).parameters

    def report(self, **options: Any) -> Any:
        if "num_moe_layers" in options and "num_moe_layers" not in self._known:
            # There, the layers with experts of a hybrid model are all that there are.
            options["num_layers"] = options["num_moe_layers"] - (options["mtp_num_layers"] or 0)
            options["moe_layer_freq"] = None
        return self._function(**{k: v for k, v in options.items() if k in self._known})


def _moe(global_state: Any, model_config: Any) -> Any:
    if as_number(getattr(model_config, "num_moe_experts", None)) is None:
        return None
    given = getattr(global_state, "moe_metrics", None)
    if given is not None:
        return given
    function = getattr(sys.modules.get(_MEGATRON_MOE), "track_moe_metrics", None)
    if function is not None and not has_moe_metrics_tracker():
        return _MegatronTracker(function)
    return get_moe_metrics_tracker()


def _mtp(global_state: Any, model_config: Any) -> Any:
    if as_number(getattr(model_config, "mtp_num_layers", None)) is None:
        return None
    given = getattr(global_state, "mtp_metrics", None)
    if given is not None:
        return given
    helper = getattr(sys.modules.get(_MEGATRON_MTP), "MTPLossLoggingHelper", None)
    function = getattr(helper, "track_mtp_metrics", None)
    if function is not None and not has_mtp_metrics_tracker():
        return _MegatronTracker(function)
    return get_mtp_metrics_tracker()


def _moe_options(model_config: Any) -> dict[str, Any]:
    mtp_num_layers = getattr(model_config, "mtp_num_layers", None)
    options = {
        "force_initialize": True,
        "track_names": moe_metric_names(model_config),
        "num_layers": getattr(model_config, "num_layers", None),
        "moe_layer_freq": getattr(model_config, "moe_layer_freq", None),
        "mtp_num_layers": mtp_num_layers,
    }
    pattern = getattr(model_config, "hybrid_layer_pattern", None)
    if getattr(model_config, "is_hybrid_model", False) and isinstance(pattern, str):
        options["num_moe_layers"] = pattern.count("E") + (mtp_num_layers or 0)
    return options


def _logs_layers(model_config: Any) -> bool:
    return getattr(model_config, "moe_per_layer_logging", False) is True
