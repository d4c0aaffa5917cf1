"""Damaged and foreign checkpoints: refused in one line, or set aside and saved again."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore.parallel.checkpoint import list_checkpoints
from pretrain import sample
from pretrain_runs import flip_a_bit, pretrain

pytestmark = pytest.mark.xdist_group("pretrain_damaged")
TINY = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --no-mlflow"
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path_factory.mktemp("finished")
    done = pretrain(folder, *TINY, "--tp", "2", "--train-iters", "3", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def replace_by_foreign(checkpoint: Path) -> None:
    """Put the checkpoint of some other program in its place."""
    shutil.rmtree(checkpoint)
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=checkpoint, no_dist=True)


def change_a_digit(checkpoint: Path) -> None:
    """Have the manifest tell another digest of the index: valid JSON, and a digest in form."""
    path = checkpoint / "manifest.json"
    text = path.read_text()
    digest = json.loads(text)["content"][0]["files"][".metadata"][1]
    other = ("1" if digest[0] == "0" else "0") + digest[1:]
    assert text.count(digest) == 1
    path.write_text(text.replace(digest, other))


UNREADABLE = "Remove it to continue from the previous checkpoint, or start a new run"


def contents(run: Path) -> dict[Path, bytes]:
    """What a run's files hold, but for who had the folder last."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "job.lock")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("harm", "reasons"),
    [
        (replace_by_foreign, ["key 'layout' is missing in the checkpoint", UNREADABLE]),
        (
            lambda checkpoint: flip_a_bit(checkpoint, "*.distcp"),
            ["0.distcp: the content of key '", "has changed since it was saved", UNREADABLE],
        ),
        (
            lambda checkpoint: flip_a_bit(checkpoint, ".metadata"),
            [".metadata has changed since it was saved", UNREADABLE],
        ),
        (
            change_a_digit,
            [
                "--resume run: no complete checkpoint in run/checkpoints. Damaged checkpoints: ",
                "run/checkpoints/step_00000003 (manifest.json has changed since it was saved)",
            ],
        ),
    ],
    ids=["foreign", "payload", "index", "manifest"],
)
def test_a_foreign_or_damaged_checkpoint_is_refused_in_one_line(
    harm: Callable[[Path], None], reasons: list[str], finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    harm(run / "checkpoints" / "step_00000003")
    before = contents(run)
    done = pretrain(tmp_path, "--resume", "run", "--train-iters", "6")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pretrain: error: --resume ")
    assert [reason for reason in reasons if reason not in done.stderr] == [], done.stderr
    assert contents(run) == before


def test_a_sample_says_what_is_wrong_with_the_only_checkpoint(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    change_a_digit(run / "checkpoints" / "step_00000003")
    assert sample.main(["--run", str(run), "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sample: error: --run {run}: no complete checkpoint in ")
    assert "step_00000003 (manifest.json has changed since it was saved)" in said


def test_a_resume_names_damaged_checkpoints_and_saves_theirs_again(
    finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    checkpoints = run / "checkpoints"
    good, changed, cut = (checkpoints / f"step_{step:08d}" for step in (3, 4, 5))
    shutil.copytree(good, changed)
    change_a_digit(changed)
    shutil.copytree(good, cut)
    os.truncate(cut / "__1_0.distcp", 7)
    (checkpoints / ".step_00000006.incomplete-0123456789abcdef").mkdir()
    (checkpoints / "step_00000004.damaged").mkdir()
    done = pretrain(
        tmp_path, "--resume", "run", "--train-iters", "6", "--exit-after", "1", "--no-tensorboard"
    )
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "skipped" in line)
    size = (good / "__1_0.distcp").stat().st_size
    assert said == (
        "pretrain: warning: continuing from step 3, skipped run/checkpoints/step_00000004 "
        "(manifest.json has changed since it was saved), now step_00000004.damaged-2, "
        f"run/checkpoints/step_00000005 (__1_0.distcp has 7 bytes but {size} were saved: it is "
        "truncated or was changed), now step_00000005.damaged"
    )
    assert [path.name for path in list_checkpoints(checkpoints)] == [good.name, changed.name]
    records = (run / "metrics.jsonl").read_text().splitlines()
    assert sorted({json.loads(record)["step"] for record in records}) == [1, 2, 3, 4]


def test_a_layout_given_on_the_command_line_replaces_that_of_the_run(
    finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    done = pretrain(tmp_path, "--resume", "run", "--dp", "2", "--train-iters", "5")
    assert done.returncode == 0, done.stderr
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert (settings["tp"], settings["dp"]) == (1, 2)
    for said in ("--tp is 1, before 2", "--dp is 2, before 1", "--train-iters is 5, before 3"):
        assert f"pretrain: from step 4 on {said}\n" in done.stderr
    assert (run / "checkpoints" / "step_00000005").is_dir()
