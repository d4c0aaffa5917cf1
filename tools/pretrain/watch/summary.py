"""The end of a run: its loss curve, its results, and the next commands."""

from __future__ import annotations

import shlex
import socket
import time
from statistics import fmean, median

import torch

from mcore.modules import GraphableMegatronModule
from mcore.modules.graphs import LocalGraphManager
from mcore.observe.runs import Run, draw_page, draw_picture
from mcore.observe.sinks import records_of
from pretrain.corpus import Corpus
from pretrain.model.objective import Objective, objective_of
from pretrain.run.checkpoints import has_checkpoint
from pretrain.run.schedule import describe_schedule, lower_rates
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.threads import choose_threads
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.straggler import StragglerWatch


def opening_lines(
    settings: Settings, num_parameters: int, corpus: Corpus, device: torch.device,
    folder: RunFolder, first_step: int = 0,
) -> list[str]:  # fmt: skip
    """The opening lines: model, layout, data, device, learning rate and folder."""
    ep = experts = ""
    if settings.experts:
        ep = f"-ep{settings.ep}"
        experts = f", {_format_count(settings.experts, 'expert')}, {settings.topk} for each token"
    kind = "bf16" if settings.bf16 else "fp32"
    micro, accumulated = settings.num_microbatches, ""
    if micro > 1:
        accumulated = f", gradients accumulated over {micro} micro-batches"
    return [
        f"model            about {num_parameters / 1e6:.2f} M parameters, {kind}: "
        f"{_format_count(settings.num_layers, 'layer')} of {settings.hidden_size}, "
        f"{_format_count(settings.num_attention_heads, 'head')}{experts}",
        f"layout           {settings.layout}{ep} on {_format_count(settings.world_size, 'rank')}, "
        f"a global batch of {settings.global_batch_size} x {settings.seq_length}, "
        f"{_format_count(settings.rows_per_forward, 'sequence')} a rank at once{accumulated}",
        f"data             {corpus.description}",
        f"device           {device.type} on {socket.gethostname()}, "
        f"{_format_count(torch.get_num_threads(), 'thread')} a rank ({choose_threads()[1]})",
        f"learning rate    {describe_schedule(settings, first_step + 1)}",
        f"run folder       {folder.path}",
    ]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


class Summary:
    """Measures the steps of this start and formats the result."""

    def __init__(self, folder: RunFolder, settings: Settings, *, first_step: int) -> None:
        self.folder, self.settings, self.first_step = folder, settings, first_step
        self.seconds: list[float] = []  # of each step
        self.validation: float | None = None
        self.num_skipped = 0  # of the last steps, because of gradients that were not finite
        self.graphs: str | None = None
        self._last_end = 0.0

    def end_step(self, began: float) -> None:
        """Call after each optimizer step, before logs, validation and checkpoints.

        The step began then, or with the end of the step before, whose work the device did first.
        """
        now = time.perf_counter()
        self.seconds.append(now - max(began, self._last_end))
        self._last_end = now

    def lines(self, mlflow: JobRun | None, watch: StragglerWatch) -> list[str]:
        """The closing lines."""
        objective = objective_of(self.settings)
        digits, unit = objective.digits, objective.unit
        name, found = objective.loss_name, records_of(self.folder.metrics)
        curve = [(one["step"], one[name]) for one in found if one.get(name) is not None]
        last = [value for _, value in curve[-self.settings.log_interval :]]
        special, results, pages = [], [], []
        if self.num_skipped:
            steps = _format_count(self.num_skipped, "last step")
            special.append(f"diverged         the gradients of {steps} were not finite")
        if self.settings.value_head:
            special.append(f"objective        {objective.description}")
        if self.graphs is not None:
            special.append(f"graphs           {self.graphs}")
        if curve:
            steps = _format_count(len(last), "step")
            results.append(
                f"loss             {curve[0][1]:.{digits}f} at step {curve[0][0]}, "
                f"{fmean(last):.{digits}f} over the last {steps} ({unit})"
            )
        # A start that finds the run finished has no other results.
        if self.validation is not None:
            results.append(f"validation loss  {self.validation:.{digits}f} {unit}")
        if self.seconds:
            results.append(f"speed            {self._format_speed()}")
        if self.settings.tensorboard:
            folder = shlex.quote(str(self.folder.tensorboard))
            pages.append(f"TensorBoard      hatch run tensorboard --logdir {folder}")
        if mlflow is not None:
            pages.append(f"MLflow           {mlflow.summary()}")
        return [
            f"run folder       {self.folder.path}",
            *special,
            *results,
            *(f"slow ranks       {text}" for text in (watch.summary(),) if text),
            f"loss curve       {self.folder.loss_picture}",
            f"run page         {self.folder.page}",
            *pages,
            self._format_next_command(),
        ]

    def _format_next_command(self) -> str:
        """The command that continues the run, or starts it anew if it has diverged too early."""
        settings = self.settings
        lower = lower_rates(settings) if self.num_skipped else ""
        if (self.num_skipped or settings.eval_only) and not has_checkpoint(self.folder):
            config = shlex.quote(str(self.folder.path / "config.json"))
            return f"start again      hatch run pretrain --config {config}{lower}"
        if not lower and self.first_step + len(self.seconds) >= settings.train_iters:
            lower = f" --train-iters {2 * settings.train_iters}"
        return f"continue         {self.folder.resume_command}{lower}"

    def _format_speed(self) -> str:
        """The speed of the median step, which ignores the start of the run."""
        second = median(self.seconds[1:] or self.seconds)
        also = "" if len(self.seconds) > 1 else ", including the start of the run"
        tokens = self.settings.global_batch_size * self.settings.seq_length
        return f"{tokens / second:,.0f} tokens per second ({1e3 * second:.1f} ms a step{also})"


def describe_graphs(model: torch.nn.Module) -> str:
    """The number of graphs of a model's layers, and the runner that captured them."""
    managers = [
        module.cudagraph_manager
        for module in model.modules()
        if isinstance(module, GraphableMegatronModule) and hasattr(module, "cudagraph_manager")
    ]
    local = [manager for manager in managers if isinstance(manager, LocalGraphManager)]
    names = {manager.runner.name for manager in local if manager.runner is not None}
    if not names:
        return "none captured: too few steps"
    captured = sum(manager.num_graphs for manager in local)
    layers = _format_count(len(local), "layer")
    return f"{captured} for {layers}, by the {', '.join(sorted(names))} runner"


def draw_run(folder: RunFolder, objective: Objective) -> None:
    """Draw the losses as a picture, and everything as a page. Needs no display."""
    run = Run.read(folder.path)
    names = (objective.loss_name, objective.validation_name)
    losses = {name: run.curves[name] for name in names if name in run.curves}
    draw_picture([Run(run.name, losses)], folder.loss_picture)
    draw_page([run], folder.page)
