"""Runs of the main job for its tests: in forked ranks or as a user's command, and what they leave.

Where a test is about the launcher itself or about signals, it starts the real command.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mcore.observe.sinks import sanitize_metric_name
from mcore.parallel.checkpoint.files.index import read_index
from mcore.tensor import current_device
from pretrain.cli import SLOW_IMPORTS, launch
from pretrain.cli.command import main
from pretrain.cli.handshake import LAUNCHER
from pretrain.run.loop import Loop
from pretrain.run.steps import Steps
from pretrain.run.training import train
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch import mlflow_run
from rank_testing import preload, run_ranks
from rank_testing.programs import Entry, run_program
from rank_testing.scripts import Script

preload(*SLOW_IMPORTS, "torch.distributed.checkpoint", "layouts.text_in_memory")

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent / "tools"
COMMAND = (sys.executable, "-m", "pretrain")
PASSWORD = "open-sesame-7"
TINY = shlex.split(
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --eval-interval 0"
)
# Steps until a signal comes, most of which is sleep: others need the cores. Busy ones are slow.
ENDLESS = ("--train-iters", "100000", "--slow-rank", "1:60", "--grace-s", "300")
# Ranks give MLflow all the time it needs.
_PATIENT = """
from pretrain.cli import ending
from pretrain.watch import mlflow_run
ending.LAST_CALL_S = mlflow_run._WAIT_WHEN_IT_FAILED_S = 150.0
"""
# Forks the ranks of a launcher, a module that is run with the words that follow.
_LAUNCHER = """
import inspect, os, pathlib, runpy, sys
here, first, begin, sys.argv = *sys.argv[1:4], sys.argv[4:]
os.setsid()
exec(first)
for name in ("<string>", "<frozen runpy>"):  # torch's launcher looks for it in every module
    inspect.modulesbyfile[os.path.abspath(name)] = "__main__"
sys.path.append(here)
from forked_ranks import fork_ranks
fork_ranks(begin, pathlib.Path(f"ranks-{os.getpid()}"))
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# The same in a launcher that is a new Python.
_NEW_LAUNCHER = """
import os, sys
if "RANK" not in os.environ and sys.orig_argv[1].endswith("/torchrun"):
    sys.path.append({here!r})
    from forked_ranks import fork_ranks
    fork_ranks()
"""
Curves = dict[str, dict[int, float]]
_NOT_A_USERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MLFLOW_TRACKING_URI")
OFF: dict[str, Any] = {"mlflow": False, "tensorboard": False, "straggler": False}
SMALL: dict[str, Any] = {
    **OFF,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "train_iters": 8,
    "global_batch_size": 8,
    "warmup_iters": 2,
    "eval_interval": 0,
    "eval_batches": 1,
    "save_interval": 0,
}


def train_on_ranks(
    settings: Settings, run_dir: Path, *, resume: bool = False, kind: str = "cpu"
) -> list[str]:
    """Train on the ranks of the layout; return what each has printed."""
    init = "gloo" if kind == "cpu" else f"{kind}:{kind}_nccl"
    return run_ranks(
        train_here, settings.world_size, settings, str(run_dir), resume=resume, kind=kind,
        init=init, timeout_s=600,
    )  # fmt: skip


def train_here(settings: Settings, run_dir: str, *, resume: bool = False, kind: str = "cpu") -> str:
    """Be one rank of the main job, in a process group that exists; return what it prints.

    Its curves are not drawn, which takes longer than many a run. The command draws them.
    """
    path = Path(run_dir)
    path.mkdir(parents=True, exist_ok=True)
    device = torch.device(kind) if kind == "cpu" else current_device()
    with mock.patch.object(Loop, "_draw"), contextlib.redirect_stdout(io.StringIO()) as printed:
        train(settings, RunFolder(path), device, resume=path if resume else None)
    return printed.getvalue()


def seen_here(settings: Settings, run_dir: str, *, resume: bool = False) -> list[list[int]]:
    """Train as one rank; return the windows that it was trained on."""
    seen: list[list[int]] = []
    part = Steps._prepare_batch

    def recording(steps: Steps, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if steps.model.training:
            seen.extend(batch["tokens"].tolist())
        return part(steps, batch)

    with mock.patch.object(Steps, "_prepare_batch", recording):
        train_here(settings, run_dir, resume=resume)
    return seen


def patient_main(arguments: list[str]) -> int:
    """The command, which gives MLflow all the time that it needs on a busy machine."""
    mlflow_run._WAIT_AT_THE_END_S = 150.0
    return main(arguments)


def pretrain(
    cwd: Path, *arguments: str, entry: Entry = patient_main, **env: str
) -> subprocess.CompletedProcess[str]:
    """Do in ``cwd`` what the command does, with ranks that are forked instead of launched."""
    output, errors = io.StringIO(), io.StringIO()

    def forking_launcher(config: Any, program: str) -> Callable[..., None]:
        def ranks(*words: str) -> None:
            assert words[:2] == ("-m", "pretrain")
            with mock.patch.dict(os.environ):
                del os.environ[LAUNCHER]  # the ranks are children of another process
                ended = run_program(entry, list(words[2:]), config.nproc_per_node, timeout_s=600)
            output.write(ended.stdout)
            errors.write(ended.stderr)
            if failures := _failures(ended.exit_codes):
                raise ChildFailedError("pretrain", failures)

        return ranks

    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.dict(os.environ, {**environment(), **env}, clear=True),
        mock.patch.object(launch, "elastic_launch", forking_launcher),
        _working_in(cwd),
    ):
        code = main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def command(cwd: Path, *arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """Run the real command in ``cwd``, with its own launcher."""
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip


def launcher(
    cwd: Path,
    module: str,
    *arguments: str,
    first: str = "",
    begin: str = "",
    env: dict[str, str] | None = None,
) -> Script:
    """Start ``python -m module`` in ``cwd``, which leads a process group and forks its ranks.

    Args:
        cwd: its folder.
        module: the job's launcher, or torch's.
        *arguments: its command line.
        first: code that it executes first.
        begin: code that each rank executes first.
        env: its variables.
    """
    words = (str(HERE), first, begin, module, *arguments)
    return Script(_LAUNCHER, *words, cwd=cwd, env=env or environment())


@contextlib.contextmanager
def started(cwd: Path, *arguments: str, patient: bool = False) -> Iterator[Script]:
    """Start the job's launcher, which leads a process group and forks its ranks; then end it."""
    job = launcher(cwd, "pretrain", *arguments, begin=_PATIENT if patient else "")
    try:
        yield job
    finally:
        job.send(signal.SIGTERM)  # the launcher ends its ranks


def environment() -> dict[str, str]:
    """The environment of a user who is no rank and has no MLflow of their own."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_A_USERS}
    scripts = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PYTHONPATH": str(TOOLS), "PATH": scripts}


def forking(folder: Path) -> dict[str, str]:
    """The environment of a user whose torchrun forks its ranks."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_NEW_LAUNCHER.format(here=str(HERE)))
    return {**environment(), "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(TOOLS)])}


def ranks_of(job: Script, cwd: Path) -> list[dict[str, Any]]:
    """The ranks that a launcher has started: ``pid``, ``words`` and a few variables as ``env``."""
    path = cwd / f"ranks-{job.pid}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ranks_below(job: Script, cwd: Path) -> dict[int, int]:
    """Process of each rank that a launcher has started."""
    return {int(rank["env"]["RANK"]): rank["pid"] for rank in ranks_of(job, cwd)}


def wait_until(condition: Callable[[], Any], *, every_s: float = 0.05) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(every_s)


def records_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's JSONL file."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve_of(run: Path, name: str) -> dict[int, float]:
    """A metric by step; a step that comes twice is an error."""
    points = [(record["step"], record[name]) for record in records_of(run) if name in record]
    curve = dict(points)
    assert len(curve) == len(points), f"{name} twice at a step"
    return curve


def losses_of(run: Path, name: str = "lm loss") -> list[float]:
    """The losses of all steps that a run has done, in their order, none left out."""
    curve = curve_of(run, name)
    assert list(curve) == list(range(1, len(curve) + 1))
    return list(curve.values())


def curves_of(run: Path) -> Curves:
    """Each metric of the JSONL file by step; a step that comes twice is an error."""
    curves: Curves = defaultdict(dict)
    for record in records_of(run):
        for name, value in record.items():
            if name not in ("step", "time"):
                assert record["step"] not in curves[name], f"{name} twice at {record['step']}"
                curves[name][record["step"]] = value
    return curves


def whole_parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, read by PyTorch alone."""
    stored = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith("model.") and hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def norm_of(tensors: Any) -> float:
    """The norm of all elements, summed in float64."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def events_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the TensorBoard files, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def mlflow_of(uri: str, run_id: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """An MLflow run and the history of every metric it has."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    run = client.get_run(run_id)
    history = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in run.data.metrics
    }
    return run, history


def known_to_mlflow(curves: Curves) -> dict[str, list[tuple[int, float]]]:
    """What MLflow is to have, from what the JSONL file has."""
    names = {"throughput/tflops/device": "throughput/tflops_per_device"}
    return {
        sanitize_metric_name(names.get(name, name)): sorted(curve.items())
        for name, curve in curves.items()
    }


def flip_a_bit(checkpoint: Path, pattern: str) -> None:
    """Flip a bit of the largest tensor in each file with such a name, or of the whole file."""
    stored = read_index(checkpoint).keys.values()
    for path in sorted(checkpoint.glob(pattern)):
        pieces = [piece for one in stored for piece in one.pieces if piece.file == path.name]
        size = path.stat().st_size
        largest = max(pieces, key=lambda piece: math.prod(piece.shape), default=None)
        content = bytearray(path.read_bytes())
        content[size // 2 if largest is None else largest.at + largest.length // 2] ^= 1
        path.write_bytes(content)


def last_value(output: str, label: str) -> str:
    """What the closing lines say behind a label."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"{label}  "))
    return line.removeprefix(label).strip()


def assert_no_password(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Nothing that was printed or written holds the password."""
    assert PASSWORD not in done.stdout + done.stderr
    for path in folder.rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def _failures(exit_codes: list[int]) -> dict[int, ProcessFailure]:
    return {
        rank: ProcessFailure(local_rank=rank, pid=0, exitcode=code, error_file="<N/A>")
        for rank, code in enumerate(exit_codes)
        if code
    }


@contextlib.contextmanager
def _working_in(folder: Path) -> Any:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
