"""A resumed run continues where the first start stopped, in the same layout and in another one."""

from __future__ import annotations

import dataclasses
import json
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
from pretrain_runs import losses_of, pretrain, train_on_ranks
from pretrain_worlds import train_all
from rank_testing import run_ranks

STEPS = 12
STOP = 6
SMALL: dict[str, Any] = {**BASE, "train_iters": STEPS, "eval_interval": 5}


def start(settings: Settings, run_dir: Path, *, resume: bool = False) -> list[float]:
    """Run the job on its ranks and return all losses that its folder has by then."""
    train_on_ranks(settings, run_dir, resume=resume)
    return losses_of(run_dir)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(tp=1, cp=2, dp=1, bf16=True, **SMALL),
        Settings(tp=1, cp=1, dp=2, dropout=0.1, untied=True, **SMALL),
    ],
    ids=["cp2-bf16", "dp2-untied-dropout"],
)
def test_same_layout_goes_on_bit_for_bit(settings: Settings, tmp_path: Path) -> None:
    halved = dataclasses.replace(settings, exit_after=STOP)
    train_all([("whole", settings), ("parts", halved)], tmp_path)
    whole, first = (losses_of(tmp_path / name) for name in ("whole", "parts"))
    assert len(first) == STOP
    assert first == whole[:STOP]
    resumed = start(settings, tmp_path / "parts", resume=True)
    assert resumed == whole


def test_the_command_goes_on_in_the_stored_layout(tmp_path: Path) -> None:
    """Its ranks took their number for a data-parallel size, with other random streams."""
    settings = Settings(tp=2, cp=1, dp=1, dropout=0.1, **SMALL)
    halved = dataclasses.replace(settings, exit_after=3)  # which is not kept
    train_all([("whole", settings), ("parts", halved)], tmp_path)
    whole = losses_of(tmp_path / "whole")
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 1, 1), (1, 1, 2)),
        ((1, 1, 2), (2, 1, 1)),
        ((2, 2, 1), (1, 1, 1)),
        ((1, 1, 1), (3, 1, 1)),
    ],
)
def test_another_layout_goes_on_with_equal_losses(
    before: tuple[int, int, int], after: tuple[int, int, int], tmp_path: Path
) -> None:
    shape = {**SMALL, "hidden_size": 48, "num_attention_heads": 12}
    one = Settings(**dict(zip(("tp", "cp", "dp"), before, strict=True)), **shape)
    other = Settings(**dict(zip(("tp", "cp", "dp"), after, strict=True)), **shape)
    first = start(dataclasses.replace(one, exit_after=STOP), tmp_path)
    resumed = start(other, tmp_path, resume=True)
    assert resumed == pytest.approx(plain_losses(one), rel=1e-4)
    assert resumed[:STOP] == first


def test_sharded_and_whole_replicas_read_each_others_checkpoints(tmp_path: Path) -> None:
    whole = Settings(tp=1, cp=1, dp=4, **SMALL)
    sharded = dataclasses.replace(whole, fsdp=True, hsdp_outer=2)
    expected = plain_losses(whole)
    begun = [dataclasses.replace(one, exit_after=STOP) for one in (sharded, whole)]
    train_all(
        [("one", begun[0]), ("other", begun[1]), ("one", whole), ("other", sharded)], tmp_path
    )
    for name in ("one", "other"):
        assert losses_of(tmp_path / name) == pytest.approx(expected, rel=1e-4), name


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


def test_steps_logged_after_the_checkpoint_are_logged_once(tmp_path: Path) -> None:
    """A run killed between checkpoints has logged steps that the next start does again."""
    settings = Settings(tp=1, cp=1, dp=1, **SMALL)
    halved = dataclasses.replace(settings, exit_after=STOP)
    train_all([("whole", settings), ("parts", halved)], tmp_path)
    whole = losses_of(tmp_path / "whole")
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": STOP + 1, "lm loss": 99.0}) + "\n")
        metrics.write('{"step": 8, "lm lo')
    assert start(settings, tmp_path / "parts", resume=True) == whole
