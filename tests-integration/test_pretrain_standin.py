"""The main job on the stand-in accelerator: its losses are those of the CPU, bit for bit."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from layouts.reference import PlainGPT, train_plain
from mcore.tensor import current_device
from pretrain.corpus import load_corpus
from pretrain.optim import fully_sharded, main_weights
from pretrain.optim.adamw import clip_to_norm
from pretrain.run import loop
from pretrain.run.loop import DivergedError, Loop, StoppedBySignal
from pretrain.run.training import train
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain_runs import SMALL, curve_of, curves_of, losses_of, train_here, train_on_ranks
from pretrain_worlds import Job, train_all
from rank_testing import run_ranks
from standin import no_host_waits, recorded
from standin.guard import find_problem

pytestmark = pytest.mark.skipif(
    find_problem() is not None, reason=f"no stand-in accelerator: {find_problem()}"
)

# An accelerator sums the norm of gradients in another order: for equal bits nothing is clipped.
# Two layers where one matters to the other: with recomputation, stages and shards fetched ahead.
STEPS = {**SMALL, "num_layers": 1, "train_iters": 3, "clip_grad": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"dp": 1, "num_layers": 2, "recompute": True},
    "bf16": {"dp": 1, "bf16": True},
    "dp": {"dp": 2, "check_replicas_interval": 2, "async_save": True, "save_interval": 2},
    "tp": {"dp": 1, "tp": 2},
    "cp": {"dp": 1, "cp": 2},
    "pp": {"dp": 1, "num_layers": 2, "pp": 2, "micro_batch_size": 2},
    "packed": {"dp": 1, "packed": True},
    "experts": {"dp": 2, "experts": 4, "ep": 2},
    "fsdp": {"dp": 2, "num_layers": 2, "fsdp": True},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of each layout, on the CPU and on the stand-in."""
    folder = tmp_path_factory.mktemp("trained")
    jobs = [(name, Settings(**{**STEPS, **layout})) for name, layout in LAYOUTS.items()]
    for kind in ("cpu", "standin"):
        train_all(sorted(jobs, key=lambda job: job[1].world_size), folder / kind, kind=kind)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_those_of_the_cpu(layout: str, trained: Path) -> None:
    losses = losses_of(trained / "cpu" / layout)
    if layout == "bf16":  # LayerNorm is computed in fp32 on a CPU, in bfloat16 elsewhere
        losses = pytest.approx(losses, rel=1e-3)
    assert losses_of(trained / "standin" / layout) == losses
    assert len(losses_of(trained / "standin" / layout)) == STEPS["train_iters"]


@pytest.mark.parametrize("layout", ["one", "tp", "pp"])
def test_clipped_steps_are_those_of_float64(layout: str, tmp_path: Path) -> None:
    """The order of a norm's sum in fp32 changes the last bits of norms and losses, 1e-7 of them."""
    settings = Settings(**{**STEPS, **LAYOUTS[layout], "clip_grad": 0.02})
    train_on_ranks(settings, tmp_path, kind="standin")
    model, corpus = PlainGPT(settings).double(), load_corpus()
    losses, norms = train_plain(
        model, settings, lambda n: model.loss(corpus.training_batch(settings, slice(None), n))
    )
    assert min(norms) > settings.clip_grad
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-6)
    assert list(curve_of(tmp_path, "grad-norm").values()) == pytest.approx(norms, rel=1e-6)


def test_a_resumed_run_continues_as_one_without_a_break(tmp_path: Path) -> None:
    settings = Settings(**{**STEPS, "dp": 1, "async_save": True, "save_interval": 2})
    halved = Settings(**{**STEPS, "dp": 1, "async_save": True, "exit_after": 1})
    jobs = [("whole", settings), ("broken", halved), ("broken", settings)]
    train_all(jobs, tmp_path, kind="standin")
    assert losses_of(tmp_path / "broken") == losses_of(tmp_path / "whole")


def train_without_waits(jobs: list[Job], folder: str) -> list[list[int]]:
    """Train on the stand-in. A wait from a step without a console line to the next step raises.

    Returns, for each run, the number of steps that were logged when each of them had started.
    """
    return [train_one_without_waits(settings, f"{folder}/{name}") for name, settings in jobs]


def train_one_without_waits(settings: Settings, run_dir: str) -> list[int]:
    run_step, free, seen = Loop._run_step, ExitStack(), []

    def watched(job: Loop) -> int:
        free.close()
        step = job.progress.step + len(job.started) + 1
        if step == job.last_step or step % settings.log_interval == 0:
            return run_step(job)
        free.enter_context(no_host_waits())
        found = run_step(job)
        seen.append(job.progress.step)
        return found

    with mock.patch.object(Loop, "_run_step", watched):
        train_here(settings, run_dir, kind="standin")
    return seen


@pytest.mark.parametrize("layouts", [["packed"], ["dp", "tp", "cp", "fsdp", "pp"]], ids="-".join)
def test_the_host_waits_only_in_steps_with_a_console_line(
    layouts: list[str], tmp_path: Path
) -> None:
    more = {"train_iters": 5, "log_interval": 3, "straggler": True, "tensorboard": True}
    same = dict.fromkeys(("check_replicas_interval", "save_interval", "eval_interval"), 3)
    # The thread of a background save waits while the training does not.
    jobs = [
        (name, Settings(**{**STEPS, **LAYOUTS[name], **more, **same, "async_save": False}))
        for name in layouts
    ]
    for seen in run_ranks(
        train_without_waits, jobs[0][1].world_size, jobs, str(tmp_path),
        init="standin:standin_nccl", timeout_s=600,
    ):  # fmt: skip
        assert seen == [[0, 1, 3]] * len(layouts)  # one step late
    for name in layouts:
        assert len(losses_of(tmp_path / name)) == 5


def count_waits(settings: Settings, run_dir: str) -> dict[str, int]:
    """Train on the stand-in. Returns the waits of the second step, which has no console line."""
    run_step, found = Loop._run_step, Counter[str]()

    def watched(job: Loop) -> int:
        with recorded() as record:
            step = run_step(job)
        if step == 2:
            found.update(line.partition(":")[0] for _, line in record.waits.elements())
        return step

    with mock.patch.object(Loop, "_run_step", watched):
        train_here(settings, run_dir, kind="standin")
    return dict(found)


@pytest.mark.parametrize("layout", ["experts", "mtp"])
def test_experts_wait_for_the_sizes_of_messages_and_a_tracker_once(
    layout: str, tmp_path: Path
) -> None:
    kind = LAYOUTS["experts"] if layout == "experts" else {"dp": 1, "mtp": 1}
    more = {"train_iters": 3, "log_interval": 3, "save_interval": 0, "eval_interval": 0}
    settings = Settings(**{**STEPS, **kind, **more})
    found = run_ranks(
        count_waits, settings.world_size, settings, str(tmp_path),
        init="standin:standin_nccl", timeout_s=600,
    )  # fmt: skip
    sizes = settings.num_layers if settings.experts else 0
    assert [one.pop("tools/pretrain/model/experts.py", 0) for one in found] == [sizes] * len(found)
    assert list(found[-1].values()) == [1], found  # the rank that logs
    assert all("/observe/" in file for one in found for file in one), found


# Settings, steps with an infinite gradient, the step at which a signal comes, and the end.
ENDS: dict[str, tuple[dict[str, Any], set[int], int, str]] = {
    "two steps skipped": ({"save_interval": 2}, {4, 5}, 0, ""),
    "seen late": ({"save_interval": 2, "max_skipped": 2}, {4, 5}, 0, "2 steps in a row, to step 5"),
    "last step": ({"train_iters": 4}, {4}, 0, "of step 4 were not"),
    "stopped": ({"train_iters": 9}, {4}, 5, "143"),
    "stopped in a bad step": ({"train_iters": 9}, {5}, 5, "143"),
}


def train_to_each_end(settings: Settings, run_dir: str, kind: str, ends: list[str]) -> list[str]:
    """Train as one rank for each of the ends. Returns the errors."""
    device = torch.device(kind) if kind == "cpu" else current_device()
    return [
        train_with_bad_steps(
            dataclasses.replace(settings, **changes), Path(run_dir, name), device, bad, signal_at
        )
        for name, (changes, bad, signal_at, _) in ((name, ENDS[name]) for name in ends)
    ]


def train_with_bad_steps(
    settings: Settings, path: Path, device: torch.device, bad: set[int], signal_at: int
) -> str:
    clip, started = clip_to_norm, 0

    def spoil(gradients: Any, limit: float, **groups: Any) -> torch.Tensor:
        nonlocal started
        started += 1
        if started in bad:
            gradients[0][1].fill_(math.inf)
        return clip(gradients, limit, **groups)

    path.mkdir(parents=True, exist_ok=True)
    with (
        mock.patch.object(main_weights, "clip_to_norm", spoil),
        mock.patch.object(fully_sharded, "clip_to_norm", spoil),
        mock.patch.object(Loop, "_draw"),
        mock.patch.object(loop, "_CHECK_EVERY_S", 0.0),  # the ranks agree after each step
    ):
        try:
            train(
                settings, RunFolder(path), device, resume=None,
                signal=lambda: 15 if 0 < signal_at <= started else 0,
            )  # fmt: skip
        except (DivergedError, StoppedBySignal) as error:
            return str(error)
    return ""


def load_all(checkpoint: Path) -> dict[str, Any]:
    """All entries of a checkpoint but the random streams, which each device has of its kind."""
    entries = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype) if hasattr(one, "size") else None
        for name, one in entries.items()
        if not name.startswith("random_streams")
    }
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return state


@pytest.mark.parametrize("layout", ["one", "fsdp"])
def test_skipped_steps_and_ends_are_those_of_the_cpu(layout: str, tmp_path: Path) -> None:
    # The loop ends the run. Two ranks show that they agree, and another optimizer skips steps.
    ends = list(ENDS) if layout == "one" else ["two steps skipped", "stopped in a bad step"]
    more = {"num_layers": 1, "train_iters": 6, "log_interval": 3}
    settings = Settings(**{**STEPS, **LAYOUTS[layout], **more})
    for kind, init in (("cpu", "gloo"), ("standin", "standin:standin_nccl")):
        for errors in run_ranks(
            train_to_each_end, settings.world_size, settings, str(tmp_path / kind), kind, ends,
            init=init, timeout_s=600,
        ):  # fmt: skip
            for error, name in zip(errors, ends, strict=True):
                expected = ENDS[name][-1]
                assert expected in error
                assert bool(error) == bool(expected)
    for name in ends:
        runs = [tmp_path / kind / name for kind in ("cpu", "standin")]
        cpu, ours = ({**curves_of(run)} for run in runs)
        for metric in ("lm loss", "learning-rate", "skipped-train-samples", "samples vs steps"):
            assert ours.get(metric) == cpu.get(metric), (name, metric)
        assert ours["step-time"].keys() == cpu["step-time"].keys() == cpu["lm loss"].keys()
        theirs, saved = ({one.name: one for one in run.glob("checkpoints/*")} for run in runs)
        assert saved.keys() == theirs.keys(), name
        for step in saved:
            found, wanted = load_all(saved[step]), load_all(theirs[step])
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
                assert same(found[key], value), (name, step, key)
