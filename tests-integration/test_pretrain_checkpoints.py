"""The main job's checkpoints: how many stay, background saves, and copies that stop being equal."""

from __future__ import annotations

import dataclasses
import os
import resource
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mcore.parallel.checkpoint import is_complete_checkpoint
from pretrain.cli.command import main
from pretrain.cli.launch import launch
from pretrain.cli.options import Request, parse, resolve
from pretrain.run import training as pretrain_training
from pretrain.run.steps import Steps
from pretrain.run.training import train
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, write_settings
from pretrain.usage import UsageError
from pretrain_runs import (
    OFF,
    losses_of,
    pretrain,
    train_on_ranks,
)
from pretrain_runs import SMALL as BASE
from rank_testing import RankFailure, run_ranks

SMALL: dict[str, Any] = {**BASE, "num_layers": 1, "train_iters": 9, "save_interval": 2}
LARGER = {**SMALL, "num_layers": 4, "hidden_size": 128, "train_iters": 100_000, "save_interval": 1}
OPTIONS = shlex.split(
    " ".join(f"--{k.replace('_', '-')} {v}" for k, v in LARGER.items() if k not in OFF)
)
QUIET = ("--no-mlflow", "--no-tensorboard")


def run(settings: Settings, run_dir: Path, *, resume: bool = False) -> list[float]:
    """Run the job on its ranks and return all losses that its folder has by then."""
    train_on_ranks(settings, run_dir, resume=resume)
    return losses_of(run_dir)


@pytest.mark.parametrize("async_save", [False, True])
def test_exactly_the_last_complete_checkpoints_stay(async_save: bool, tmp_path: Path) -> None:
    settings = Settings(
        **SMALL, keep_last=2, async_save=async_save, check_replicas_interval=1, exit_after=5
    )
    checkpoints = RunFolder(tmp_path).checkpoints
    run(settings, tmp_path)
    assert sorted(os.listdir(checkpoints)) == ["step_00000004", "step_00000005"]
    (checkpoints / ".step_00000006.incomplete-0123456789abcdef").mkdir()
    run(settings, tmp_path, resume=True)
    assert sorted(os.listdir(checkpoints)) == ["step_00000008", "step_00000009"]
    assert all(map(is_complete_checkpoint, checkpoints.iterdir()))


def test_background_saves_write_the_same_bytes_and_resume_the_same(tmp_path: Path) -> None:
    settings = Settings(tp=2, dp=1, dropout=0.1, **{**SMALL, "bf16": True})
    at_once = run(settings, tmp_path / "at once")
    background = dataclasses.replace(settings, async_save=True)
    stopped = dataclasses.replace(background, exit_after=5)
    assert run(stopped, tmp_path / "background") == at_once[:5]
    assert run(background, tmp_path / "background", resume=True) == at_once
    all_of_them = [f"step_{step:08d}" for step in (2, 4, 6, 8, 9)]
    assert sorted(os.listdir(tmp_path / "at once" / "checkpoints")) == all_of_them
    for step in all_of_them:
        one, other = (tmp_path / run / "checkpoints" / step for run in ("at once", "background"))
        files = sorted(path.name for path in one.glob("*.distcp"))
        assert files == ["__0_0.distcp", "__1_0.distcp"]
        for file in files:
            assert (one / file).read_bytes() == (other / file).read_bytes(), (step, file)


def main_with_small_files(arguments: list[str]) -> int:
    """The command, whose files may not grow beyond 64 KiB: logs do not, parameters do."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    return main(arguments)


def test_a_background_save_that_fails_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *OPTIONS, *QUIET, "--async-save", "--run-dir", "run", entry=main_with_small_files
    )
    assert done.returncode == 1
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert f"pretrain: error: cannot save {path}: " in done.stderr
    assert "_0.distcp cannot be written at key '" in done.stderr
    assert "[Errno 27] File too large" in done.stderr
    assert "all ranks ended. There is no complete checkpoint yet." in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


class FlippingSteps(Steps):
    """Flips a bit of one number of a replica after the third step."""

    def train_step(self, step: int) -> Any:
        """Do the step, and the harm."""
        done = super().train_step(step)
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                weight = dict(self.model.named_parameters())[FLIPPED]
                weight.view(torch.int32)[5] ^= 1 << 12
        return done


FLIPPED = "final_norm.weight"


def train_with_a_flip(settings: Settings, run_dir: str) -> None:
    """One rank of the main job, on which memory is not to be relied on."""
    pretrain_training.Steps = FlippingSteps  # type: ignore[misc]
    train(settings, RunFolder(Path(run_dir)), torch.device("cpu"), resume=None)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 1, "cp": 2}], ids=["dp2", "cp2"])
def test_a_flipped_bit_is_found_and_named(layout: dict[str, int], tmp_path: Path) -> None:
    settings = Settings(**layout, **{**SMALL, "save_interval": 1}, check_replicas_interval=2)
    with pytest.raises(RankFailure) as caught:
        run_ranks(train_with_a_flip, 2, settings, str(tmp_path), timeout_s=600)
    for report in caught.value.ranks:
        assert report.exception_type == "ReplicasDifferError"
        assert "copies of the parameters differ between ranks after step 4" in report.message
    line = f"[Rank 1] Hash not matching for {FLIPPED} in model chunk 0"
    assert str(caught.value).count("Hash not matching for") == 1
    assert line in str(caught.value)
    names = sorted(os.listdir(RunFolder(tmp_path).checkpoints))
    assert names == [f"step_{step:08d}" for step in (1, 2, 3)]


def main_with_a_flip(arguments: list[str]) -> int:
    """The command, on memory that is not to be relied on."""
    pretrain_training.Steps = FlippingSteps  # type: ignore[misc]
    return main(arguments)


def test_a_flipped_bit_ends_the_job_with_one_message(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *OPTIONS, *QUIET, "--train-iters", "9", "--check-replicas-interval", "4",
        "--run-dir", "run", entry=main_with_a_flip,
    )  # fmt: skip
    assert done.returncode == 1
    text = done.stderr
    named = text.index(f"[Rank 1] Hash not matching for {FLIPPED} in model chunk 0\n")
    error = text.index(
        "pretrain: error: copies of the parameters differ between ranks after step 4"
    )
    assert named < error
    assert text.count("pretrain: error: ") == 1
    assert "Traceback" not in text
    assert not (tmp_path / "run" / "checkpoints" / "step_00000004").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--save-interval", "-1"), ("--keep-last", "-1"), ("--check-replicas-interval", "-5")],
)
def test_negative_counts_are_refused(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be at least 0, got {value}"):
        resolve(parse([option, value]), None)


def test_options_of_saving_may_change_on_resume(tmp_path: Path) -> None:
    write_settings(Settings(keep_last=3, async_save=True), tmp_path, [])
    given = ["--resume", str(tmp_path), "--keep-last", "1", "--no-async-save"]
    request = resolve(parse([*given, "--check-replicas-interval", "7"]), None)
    assert (request.settings.keep_last, request.settings.async_save) == (1, False)
    assert request.settings.check_replicas_interval == 7


@pytest.mark.parametrize(
    ("exit_codes", "code", "text"),
    [
        ((2, -15), 2, ""),
        ((-15, 2), 2, ""),
        ((1, -15), 1, "rank 0 failed with exit code 1; all ranks ended."),
        ((-15, 1), 1, "rank 1 failed with exit code 1; all ranks ended."),
        ((1, -9), 1, "rank 1 was killed by SIGKILL; all ranks ended."),
    ],
)
def test_a_rank_that_the_launcher_stopped_is_not_blamed(
    exit_codes: tuple[int, int],
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rank that ends first has the launcher terminate the other, often before it ends too."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file="<N/A>")
        for rank, exit_code in enumerate(exit_codes)
    }

    def ranks_that_fail(*arguments: str) -> None:
        raise ChildFailedError("pretrain", failures)

    monkeypatch.setattr("pretrain.cli.launch.elastic_launch", lambda *arguments: ranks_that_fail)
    request = Request(settings=Settings(), run_dir=tmp_path, resume=None, runs_dir=tmp_path)
    assert launch([], request, RunFolder(tmp_path)) == code
    assert capsys.readouterr().err.partition(" There is")[0] == f"pretrain: {text}" * bool(text)
