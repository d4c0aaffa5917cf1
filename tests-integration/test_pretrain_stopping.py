"""Runs of the main job that stop early, and who may go on with them."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pretrain.cli.claim import check_unclaimed, claim
from pretrain.cli.handshake import check_seen_by_all
from pretrain.run.checkpoints import latest_step
from pretrain.run.loop import StopAgreement
from pretrain.run.saving import Saver
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings, read_config, read_settings, write_settings
from pretrain.usage import UsageError
from pretrain_runs import (
    TINY,
    curve_of,
    flip_a_bit,
    losses_of,
    patient_main,
    pretrain,
)
from rank_testing import run_ranks


def test_a_run_that_diverges_says_so_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *TINY, "--no-mlflow", "--train-iters", "40", "--run-dir", "run", "--lr", "1e30",
        "--min-lr", "1", "--warmup-iters", "0", "--save-interval", "1", "--max-skipped", "3",
    )  # fmt: skip
    assert done.returncode == 4
    folder = RunFolder(tmp_path / "run")
    assert latest_step(folder) == 1
    assert "3 steps in a row, to step 4" in folder.diverged.read_text()
    assert done.stderr == (
        "pretrain: error: the gradients of 3 steps in a row, to step 4, were not finite: try a "
        "lower --lr or --clip-grad. The last complete checkpoint is run/checkpoints/step_00000001. "
        "Continue with: hatch run pretrain --resume run --lr 1e+29 --min-lr 0.1\n"
    )
    assert "loss value: 0" not in done.stdout
    assert curve_of(folder.path, "skipped-train-samples")[4] == 3 * 8


def deleting_main(arguments: list[str]) -> int:
    """Be a rank of a job whose run folder is moved away after the checkpoint of step 2."""
    save = Saver.save

    def delete_after(saver: Saver, step: int) -> None:
        save(saver, step)
        saver.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            saver.folder.path.rename("moved")

    with mock.patch.object(Saver, "save", delete_after):
        return patient_main(arguments)


@pytest.mark.slow
def test_a_run_folder_that_is_gone_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *TINY, "--train-iters", "1000000", "--run-dir", "run", "--log-interval", "1",
        "--save-interval", "2", "--async-save", "--no-mlflow", "--no-tensorboard",
        entry=deleting_main,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert done.stderr.count("pretrain: error: the run folder run is gone: after step ") == 1
    assert "start a new run" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--resume run" not in done.stderr
    assert not (tmp_path / "run").exists()


def short_of_disk(arguments: list[str]) -> int:
    """Be a rank whose files cannot grow beyond some bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    return patient_main(arguments)


@pytest.mark.slow
def test_metrics_that_cannot_be_written_end_the_run_before_a_save(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *TINY, "--train-iters", "60", "--run-dir", "run", "--log-interval", "1",
        "--save-interval", "55", "--no-mlflow", "--no-tensorboard", entry=short_of_disk,
    )  # fmt: skip
    assert done.returncode == 5
    said = done.stderr.splitlines()
    assert said[-1] == (
        "pretrain: error: cannot write run/metrics.jsonl (File too large), so the checkpoint of "
        "step 55 is not saved: free some space, then continue. There is no complete checkpoint yet."
    )
    assert sum("straggler.log" in line for line in said) == 1, done.stderr
    assert not any(line.startswith(("Traceback", "---")) for line in said)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lr inf", "--lr must be finite and at least 0, got inf"),
        ("--weight-decay nan", "--weight-decay must be finite and at least 0, got nan"),
        ("--lr 1e-4 --min-lr 1e-3", "--min-lr 0.001 is above --lr 0.0001"),
    ],
)
def test_options_that_cannot_work_together(arguments: str, message: str, tmp_path: Path) -> None:
    done = pretrain(tmp_path, *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_run_of_an_older_version_takes_defaults_and_wrong_types_are_named(tmp_path: Path) -> None:
    write_settings(Settings(tp=2), tmp_path, [])
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    del stored["settings"]["max_skipped"]
    path.write_text(json.dumps(stored))
    assert Settings(**read_settings(tmp_path)) == Settings(tp=2)

    for name, value in (("tp", "two"), ("fsdp", 1), ("lr", None), ("no_such_option", 3)):
        path.write_text(json.dumps({"settings": stored["settings"] | {name: value}}))
        with pytest.raises(UsageError, match=name):
            read_settings(tmp_path)
    for damaged in ("{", "[]", "null", "{}", '{"settings": []}'):
        path.write_text(damaged)
        for read in (lambda: read_settings(tmp_path), lambda: read_config(path)):
            with pytest.raises(UsageError, match=r"line 1 column|has no table of settings"):
                read()


def see_folder(folders: list[str]) -> str:
    path = Path(folders[dist.get_rank()])
    claims = [claim(path)] if dist.get_rank() == 0 else []
    try:
        check_seen_by_all(path, torch.device("cpu"))
    except UsageError as error:
        return str(error)
    finally:
        for file in claims:
            file.close()
    return "seen"


def stop_together(asked_at: int) -> tuple[int, int]:
    agreement = StopAgreement(torch.device("cpu"))
    for step in range(100_000):
        asked = step >= asked_at and dist.get_rank() == 1
        if found := agreement.agreed(partial(int, signal.SIGHUP if asked else 0)):
            return found, step
    return 0, -1


def steps_asked_at() -> list[int]:
    """The steps, of 0.1 s by a clock of their own, that ask; each is followed by a save."""
    now, asked = 0.0, []
    with mock.patch("time.perf_counter", lambda: now):  # noqa: PT008  # it moves
        agreement = StopAgreement(torch.device("cpu"))
        for step in range(50):
            now += 0.1
            agreement.agreed(lambda step=step: asked.append(step) or 0)
            agreement.agreed_now(int)
    return asked


def test_what_is_asked_at_a_save_does_not_delay_the_answer_to_a_signal() -> None:
    [asked] = run_ranks(steps_asked_at, 1)
    assert max(later - one for one, later in pairwise(asked)) <= 3  # 0.25 s
    assert asked[-1] >= 47


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_ranks_agree_on_what_they_see_and_on_when_to_stop(tmp_path: Path) -> None:
    for name in ("shared", "other"):
        (tmp_path / name).mkdir()
    shared, other = str(tmp_path / "shared"), str(tmp_path / "other")
    assert both([shared, shared]) == ["seen", "seen"]
    assert both([shared, other]) == 2 * [
        f"rank 1 on {socket.gethostname()} does not see the run folder {other}: pass a folder "
        "that all nodes share with --run-dir or --runs-dir"
    ]
    stopped = run_ranks(stop_together, 2, 37)
    assert stopped[0] == stopped[1]
    found, step = stopped[0]
    assert found == signal.SIGHUP
    assert step >= 37


def both(folders: list[str]) -> list[Any]:
    return run_ranks(see_folder, 2, folders)


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        claim(tmp_path)
        os._exit(0)
    os.waitpid(pid, 0)
    with claim(tmp_path):
        with pytest.raises(UsageError, match=f"process {os.getpid()}"):
            claim(tmp_path)
        with pytest.raises(UsageError, match="is in use by another job"):
            check_unclaimed(tmp_path)
    check_unclaimed(tmp_path)

    told, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = claim(tmp_path)
        os.write(telling, b"!")
        time.sleep(0.5)
        kept.close()
        os._exit(0)
    os.read(told, 1)
    with claim(tmp_path, patience_s=120):
        os.waitpid(pid, 0)


def test_auto_resume_begins_sets_aside_and_goes_on(tmp_path: Path) -> None:
    words = (*TINY, "--no-mlflow", "--run-dir", "run", "--auto-resume", "--save-interval", "0")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "lm loss": 9.0}\n')
    for last in (3, 5):  # a checkpoint at its end only
        done = pretrain(tmp_path, *words, "--train-iters", str(last))
        assert done.returncode == 0, done.stderr
        assert latest_step(folder) == last
        assert len(losses_of(folder.path)) == last
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.unsaved"]

    # Killed in its last moments, and started again: there is nothing left to train.
    folder.loss_picture.unlink()
    folder.page.unlink()
    folder.page.mkdir()  # as if there were no place for it
    losses, weights = losses_of(folder.path), folder.checkpoint(5).stat().st_mtime_ns
    done = pretrain(tmp_path, *words, "--train-iters", "5")
    assert done.returncode == 0, done.stderr
    assert folder.loss_picture.is_file()
    assert "pretrain: warning: cannot draw the run: " in done.stderr
    folder.page.rmdir()
    assert "speed" not in done.stdout
    assert (losses_of(folder.path), folder.checkpoint(5).stat().st_mtime_ns) == (losses, weights)

    # Nobody is there to remove a checkpoint whose content has changed.
    flip_a_bit(folder.checkpoint(5), "__1_0.distcp")
    done = pretrain(tmp_path, *words, "--train-iters", "7")
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "skipped" in line)
    assert "has changed since it was saved" in said
    assert said.endswith("now step_00000005.damaged")
    assert len(losses_of(folder.path)) == 7
    assert losses_of(folder.path)[:3] == losses[:3]
    assert latest_step(folder) == 7
