"""The end of a run: its loss curve, its results, and the next commands."""

from __future__ import annotations

import math
import shlex
import socket
import time
from pathlib import Path
from statistics import fmean, median

import torch

from mcore.modules import GraphableMegatronModule
from mcore.modules.graphs import LocalGraphManager
from mcore.observe.runs import Run, draw_page
from mcore.observe.sinks import records_of
from pretrain.corpus import Corpus
from pretrain.model.objective import Objective, objective_of
from pretrain.run_folder import RunFolder, replacing
from pretrain.settings import Settings
from pretrain.watch.mlflow_run import JobRun
from pretrain.watch.straggler import StragglerWatch


def opening_lines(
    settings: Settings, num_parameters: int, corpus: Corpus, device: torch.device, folder: RunFolder
) -> list[str]:
    """The opening lines: model, layout, data, device and folder."""
    ep = experts = ""
    if settings.experts:
        ep = f"-ep{settings.ep}"
        experts = f", {_format_count(settings.experts, 'expert')}, {settings.topk} for each token"
    kind = "bf16" if settings.bf16 else "fp32"
    return [
        f"model            about {num_parameters / 1e6:.2f} M parameters, {kind}: "
        f"{_format_count(settings.num_layers, 'layer')} of {settings.hidden_size}, "
        f"{_format_count(settings.num_attention_heads, 'head')}{experts}",
        f"layout           {settings.layout}{ep} on {_format_count(settings.world_size, 'rank')}, "
        f"a global batch of {settings.global_batch_size} x {settings.seq_length}, "
        f"{_format_count(settings.rows_per_forward, 'sequence')} a rank at once",
        f"data             {corpus.description}",
        f"device           {device.type} on {socket.gethostname()}; run folder {folder.path}",
    ]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


class Summary:
    """Measures the steps of this start and formats the result."""

    def __init__(self, folder: RunFolder, settings: Settings, *, first_step: int) -> None:
        self.folder = folder
        self.settings = settings
        self.first_step = first_step
        self.seconds: list[float] = []  # of each step
        self.validation: float | None = None
        self.graphs: str | None = None
        self._step_began = 0.0

    def start_step(self) -> None:
        """Call before each optimizer step."""
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        """Call after each optimizer step, before logs, validation and checkpoints."""
        self.seconds.append(time.perf_counter() - self._step_began)

    def lines(self, mlflow: JobRun | None, watch: StragglerWatch) -> list[str]:
        """The closing lines."""
        objective = objective_of(self.settings)
        digits, unit = objective.digits, objective.unit
        curve = read_curve(self.folder.metrics, objective.loss_name)
        last = [value for _, value in curve[-self.settings.log_interval :]]
        path = self.folder.path
        more = ""
        if self.first_step + len(self.seconds) >= self.settings.train_iters:
            more = f" --train-iters {2 * self.settings.train_iters}"
        special, results, pages = [], [], []
        if self.settings.value_head:
            special.append(f"objective        {objective.description}")
        if self.graphs is not None:
            special.append(f"graphs           {self.graphs}")
        # A start that finds the run finished has no results.
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
            f"run folder       {path}",
            *special,
            f"loss             {curve[0][1]:.{digits}f} at step {curve[0][0]}, "
            f"{fmean(last):.{digits}f} over the last {_format_count(len(last), 'step')} ({unit})",
            *results,
            *(f"slow ranks       {text}" for text in (watch.summary(),) if text),
            f"loss curve       {self.folder.loss_picture}",
            f"run page         {self.folder.page}",
            *pages,
            f"continue         {self.folder.resume_command}{more}",
        ]

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


def read_curve(metrics: Path, name: str) -> list[tuple[int, float]]:
    """Step and value of every record that has the metric."""
    found = records_of(metrics)
    return [(record["step"], record[name]) for record in found if record.get(name) is not None]


def draw_run(folder: RunFolder, objective: Objective) -> None:
    """Draw the losses as a picture, and everything as a page. Needs no display."""
    run = Run.read(folder.path)
    _draw_losses(run, folder.loss_picture, objective)
    draw_page([run], folder.page)


def _draw_losses(run: Run, target: Path, objective: Objective) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, label, style in (
        (objective.loss_name, "train", "-"),
        (objective.validation_name, "validation", "o--"),
    ):
        curve = [point for point in run.points(name) if math.isfinite(point[1])]
        if curve:
            steps, values = zip(*curve, strict=True)
            axes.plot(steps, values, style, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{objective.loss_name} ({objective.unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(target) as file:
        figure.savefig(file, dpi=120, format="png")
