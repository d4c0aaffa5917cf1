"""A resumed run continues where the first start stopped, in the same layout and in another one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layouts.reference import plain_losses
from mcore.parallel.checkpoint import save_sharded_state_dict
from pretrain.cli.options import parse, resolve
from pretrain.run.checkpoints import CheckpointedState
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, write_settings
from pretrain.usage import UsageError
from pretrain_runs import SMALL as BASE
from pretrain_runs import losses_of, pretrain, train_here
from pretrain_worlds import Job, train_all
from rank_testing import run_ranks

STEPS = 4
STOP = 2
SMALL: dict[str, Any] = {**BASE, "train_iters": STEPS, "eval_interval": 3}


SAME = {
    "cp2-bf16": Settings(tp=1, cp=2, dp=1, bf16=True, **SMALL),
    "dp2-untied-dropout": Settings(tp=1, cp=1, dp=2, dropout=0.1, untied=True, **SMALL),
}
# Its ranks took their number for a data-parallel size, with other random streams.
COMMAND = Settings(tp=2, cp=1, dp=1, dropout=0.1, **SMALL)
LOGGED_MORE = Settings(tp=1, cp=1, dp=1, **SMALL)
# Sizes of tp, cp and dp before and after.
MOVED = {
    "tp2 to dp2": ((2, 1, 1), (1, 1, 2)),
    "dp2 to tp2": ((1, 1, 2), (2, 1, 1)),
    "tp2-cp2 to one": ((2, 2, 1), (1, 1, 1)),
    "one to tp3": ((1, 1, 1), (3, 1, 1)),
}
REPLICAS = Settings(tp=1, cp=1, dp=4, **SMALL)
SHARDED = dataclasses.replace(REPLICAS, fsdp=True, hsdp_outer=2)


def moved(sizes: tuple[int, int, int]) -> Settings:
    """Settings of a layout that has other sizes when it goes on."""
    shape = {**SMALL, "hidden_size": 48, "num_attention_heads": 12}
    return Settings(**dict(zip(("tp", "cp", "dp"), sizes, strict=True)), **shape)


WHOLE = {**SAME, "command": COMMAND, "logged more": LOGGED_MORE}
# The settings of the runs that begin in one process and go on in another one.
BEFORE = {**WHOLE, **{name: moved(before) for name, (before, _) in MOVED.items()}}
AFTER = {
    **SAME,
    "logged more": LOGGED_MORE,
    **{name: moved(after) for name, (_, after) in MOVED.items()},
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs without a break, below "whole", of begun ones, and of two kinds of dp."""
    folder = tmp_path_factory.mktemp("begun")
    jobs = [(f"whole/{name}", settings) for name, settings in WHOLE.items()]
    jobs += [(name, halved(settings)) for name, settings in BEFORE.items()]
    # The first use of sharding takes long: these go on in the same processes.
    jobs += [("sharded to whole", halved(SHARDED)), ("whole to sharded", halved(REPLICAS))]
    jobs += [("sharded to whole", REPLICAS), ("whole to sharded", SHARDED)]
    train_all(sorted(jobs, key=lambda job: job[1].world_size), folder)
    return folder


def halved(settings: Settings) -> Settings:
    """The same, up to a stop that is not kept."""
    return dataclasses.replace(settings, exit_after=STOP)


@pytest.fixture(scope="module")
def resumed(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder in which the runs have gone on, all but that of the command."""
    folder = tmp_path_factory.mktemp("resumed") / "runs"
    shutil.copytree(begun, folder)
    # A run killed between checkpoints has logged steps that the next start does again.
    with (folder / "logged more" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": STOP + 1, "lm loss": 99.0}) + "\n")
        metrics.write(f'{{"step": {STOP + 2}, "lm lo')
    for size in {settings.world_size for settings in AFTER.values()}:
        of_size = [job for job in AFTER.items() if job[1].world_size == size]
        run_ranks(resume_here, size, of_size, str(folder), timeout_s=600)
    return folder


def resume_here(jobs: list[Job], folder: str) -> None:
    """Be a rank of one resumed run after the other."""
    for name, settings in jobs:
        train_here(settings, f"{folder}/{name}", resume=True)


@pytest.mark.parametrize("name", SAME)
def test_same_layout_goes_on_bit_for_bit(name: str, begun: Path, resumed: Path) -> None:
    whole, first = losses_of(begun / "whole" / name), losses_of(begun / name)
    assert len(first) == STOP
    assert first == whole[:STOP]
    assert len(whole) == STEPS
    assert losses_of(resumed / name) == whole


def test_the_command_goes_on_in_the_stored_layout(begun: Path, tmp_path: Path) -> None:
    whole = losses_of(begun / "whole" / "command")
    shutil.copytree(begun / "command", tmp_path / "parts")
    done = pretrain(tmp_path, "--resume", "parts")
    assert done.returncode == 0, done.stderr
    assert "pretrain: from step" not in done.stderr
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["settings"]["tp"] == 2
    assert losses_of(tmp_path / "parts") == whole


@pytest.mark.parametrize(
    ("options", "world_size", "layout"),
    [
        ("", 4, "tp2-cp1-dp2"),
        ("--ranks 4", 4, "tp2-cp1-dp2"),
        ("", None, "tp2-cp1-dp2"),
        ("--ranks 2", 2, "tp2-cp1-dp1"),
        ("--ranks 8", None, "tp2-cp1-dp4"),
        ("--tp 2", 2, "tp2-cp1-dp1"),
        ("--dp 2", 2, "tp1-cp1-dp2"),
        ("--dp 4", None, "tp1-cp1-dp4"),
    ],
)
def test_another_layout_only_where_it_is_asked_for(
    options: str, world_size: int | None, layout: str, tmp_path: Path
) -> None:
    write_settings(Settings(tp=2, cp=1, dp=2), tmp_path, [])
    request = resolve(parse(["--resume", str(tmp_path), *options.split()]), world_size)
    assert request.settings.layout == layout


def test_a_layout_that_is_named_leaves_nothing_of_the_stored_one(tmp_path: Path) -> None:
    stored = Settings(pp=2, vpp=2, dp=4, experts=4, ep=2, fsdp=True, hsdp_outer=2)
    write_settings(stored, tmp_path, [])
    for options, layout, ep, outer in (
        ("", "tp1-cp1-pp2-vpp2-dp4", 2, 2),
        ("--tp 2", "tp2-cp1-dp1", 1, 1),
        ("--pp 2 --dp 2", "tp1-cp1-pp2-dp2", 1, 1),
        ("--pp 2 --vpp 2 --dp 2 --ep 2", "tp1-cp1-pp2-vpp2-dp2", 2, 1),
    ):
        found = resolve(parse(["--resume", str(tmp_path), *options.split()]), None).settings
        assert (found.layout, found.ep, found.hsdp_outer) == (layout, ep, outer)
        assert (found.experts, found.fsdp) == (4, True)


def test_another_number_of_ranks_is_no_layout(tmp_path: Path) -> None:
    write_settings(Settings(tp=2, cp=1, dp=2), tmp_path, [])
    with pytest.raises(UsageError, match="has 4 ranks and 2 were started: start 4, or set"):
        resolve(parse(["--resume", str(tmp_path)]), 2)


@pytest.mark.parametrize("name", MOVED)
def test_another_layout_goes_on_with_equal_losses(name: str, begun: Path, resumed: Path) -> None:
    found = losses_of(resumed / name)
    assert found == pytest.approx(plain_losses(BEFORE[name]), rel=1e-4)
    assert found[:STOP] == losses_of(begun / name)


@pytest.mark.parametrize("name", ["sharded to whole", "whole to sharded"])
def test_sharded_and_whole_replicas_read_each_others_checkpoints(name: str, begun: Path) -> None:
    assert losses_of(begun / name) == pytest.approx(plain_losses(REPLICAS), rel=1e-4)


class Reader(CheckpointedState):
    """Notes what it is told to load."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.read: list[str] = []

    def load(self, path: Path) -> None:
        self.read.append(path.name)


def read_latest(folders: list[str]) -> list[str]:
    """What a rank, which sees a folder of its own, is told to load."""
    reader = Reader()
    reader.load_latest(RunFolder(Path(folders[dist.get_rank()])), past_damage=True)
    return reader.read


def test_all_ranks_load_what_rank_0_sees(tmp_path: Path) -> None:
    """A network file system may show ranks different listings for a while."""
    for name, steps in (("new", (4, 8)), ("old", (4,))):
        for step in steps:
            save_sharded_state_dict({}, tmp_path / name / "checkpoints" / f"step_{step:08d}")
    folders = [str(tmp_path / name) for name in ("new", "old")]
    assert run_ranks(read_latest, 2, folders) == 2 * [["step_00000008"]]
    assert run_ranks(read_latest, 2, folders[::-1]) == 2 * [["step_00000004"]]


def test_steps_logged_after_the_checkpoint_are_logged_once(begun: Path, resumed: Path) -> None:
    assert losses_of(resumed / "logged more") == losses_of(begun / "whole" / "logged more")
