"""The main job as a user starts it: its output, its refusals, and what happens when ranks end."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore.parallel.checkpoint import list_checkpoints

TOOLS = Path(__file__).resolve().parents[1] / "tools"
TINY = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --no-mlflow"
)
CONSOLE_LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +12 \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): [\d.]+ \| "
    r"throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \| learning rate: (\d\.\d{6}E[+-]\d\d) \| "
    r"global batch size: +8 \| lm loss: (\d\.\d{6}E[+-]\d\d) \| loss scale: 1\.0 \| "
    r"grad norm: [\d.]+ \| number of skipped iterations: +0 \| number of nan iterations: +0 \|$",
    re.MULTILINE,
)


def environment() -> dict[str, str]:
    """The environment of a user who is no rank yet."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(TOOLS)}


def pretrain(cwd: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command in ``cwd`` and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command as the leader of a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int) -> dict[int, dict[str, str]]:
    """Environment of every process below ``pid``."""
    found: dict[int, dict[str, str]] = {}
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return found
    for child in map(int, children):
        try:
            raw = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[child] = dict(item.split("=", 1) for item in raw if "=" in item)
        found |= descendants(child)
    return found


def wait_for_checkpoint(runs: Path, timeout_s: float = 60) -> Path:
    """Wait until a run below ``runs`` has a checkpoint; return the run's folder."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = sorted(runs.glob("*/checkpoints/step_*"))
        if found:
            return found[0].parents[1]
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint below {runs} within {timeout_s} s")


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody has reaped counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_run_leaves_a_folder_that_holds_everything(tmp_path: Path) -> None:
    done = pretrain(
        tmp_path, *TINY, "--tp", "2", "--train-iters", "12", "--log-interval", "4",
        "--eval-interval", "5", "--save-interval", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-tp2-cp1-dp1", run.name)

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["lm loss"] for r in records if "lm loss" in r}
    validation = {r["step"]: r["lm loss validation"] for r in records if "lm loss validation" in r}
    assert list(losses) == list(range(1, 13))
    assert list(validation) == [5, 10, 12]

    lines = CONSOLE_LINE.findall(done.stdout)
    assert [(step, samples) for step, samples, _, _ in lines] == [
        ("4", "32"), ("8", "64"), ("12", "96"),
    ]  # fmt: skip
    for step, _, _, loss in lines:
        average = sum(losses[int(step) - back] for back in range(4)) / 4
        assert float(loss) == pytest.approx(average, rel=1e-6)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    scalars = {event.step: event.value for event in events.Scalars("lm loss")}
    assert scalars == pytest.approx(losses, rel=1e-6)
    assert {"learning-rate", "grad-norm", "batch-size", "loss-scale"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("lm loss validation")] == [5, 10, 12]

    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_00000008",
        "step_00000012",
    ]
    assert json.loads((run / "config.json").read_text())["settings"]["tp"] == 2
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")

    tail = done.stdout.splitlines()[-8:]
    assert any(f"{losses[1]:.3f} at step 1, {losses[12]:.3f} at step 12" in line for line in tail)
    assert any(f"hatch run tensorboard --logdir runs/{run.name}/tensorboard" in x for x in tail)
    assert any(re.search(r"\d tokens per second", line) for line in tail)
    (command,) = (line.split("  ")[-1].strip() for line in tail if line.startswith("go on"))

    again = pretrain(tmp_path, *shlex.split(command)[3:])
    assert again.returncode == 0, again.stderr
    assert (run / "checkpoints" / "step_00000024").is_dir()


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
    program = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        "dcp.save({'weight': torch.ones(3)}, checkpoint_id=sys.argv[1], no_dist=True)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(checkpoint)], check=True, capture_output=True
    )


def flip_a_byte(checkpoint: Path, pattern: str) -> None:
    """Damage each file with such a name at a random place."""
    for path in sorted(checkpoint.glob(pattern)):
        content = bytearray(path.read_bytes())
        draw = random.Random(path.name)
        content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(content)


UNREADABLE = "remove it to go on from the one before, or start a new run"


@pytest.mark.parametrize(
    ("harm", "reasons"),
    [
        (replace_by_foreign, ["key 'layout' is missing in the checkpoint", UNREADABLE]),
        (
            lambda checkpoint: flip_a_byte(checkpoint, "*.distcp"),
            ["0.distcp: the content of key '", "has changed since it was saved", UNREADABLE],
        ),
        (
            lambda checkpoint: flip_a_byte(checkpoint, ".metadata"),
            [".metadata has changed since it was saved", UNREADABLE],
        ),
        (
            lambda checkpoint: flip_a_byte(checkpoint, "manifest.json"),
            [
                "--resume run: no complete checkpoint in run/checkpoints, but damaged ones: ",
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
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = pretrain(tmp_path, "--resume", "run", "--train-iters", "6")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pretrain: error: --resume ")
    assert [reason for reason in reasons if reason not in done.stderr] == [], done.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_resume_names_damaged_checkpoints_and_saves_theirs_again(
    finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    checkpoints = run / "checkpoints"
    good, changed, cut = (checkpoints / f"step_{step:08d}" for step in (3, 4, 5))
    shutil.copytree(good, changed)
    flip_a_byte(changed, "manifest.json")
    shutil.copytree(good, cut)
    os.truncate(cut / "__1_0.distcp", 7)
    (checkpoints / ".step_00000006.incomplete-0123456789abcdef").mkdir()
    (checkpoints / "step_00000004.damaged").mkdir()
    done = pretrain(
        tmp_path, "--resume", "run", "--train-iters", "6", "--exit-after", "1", "--no-tensorboard"
    )
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if "passed over" in line)
    size = (good / "__1_0.distcp").stat().st_size
    assert said == (
        "pretrain: warning: going on from step 3: passed over run/checkpoints/step_00000004 "
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
    assert (run / "checkpoints" / "step_00000005").is_dir()


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_all_ranks_and_is_named(tmp_path: Path, number: int) -> None:
    job = start(tmp_path, *TINY, "--train-iters", "100000", "--save-interval", "5")
    try:
        run = wait_for_checkpoint(tmp_path / "runs")
        below = descendants(job.pid)
        (victim,) = (pid for pid, env in below.items() if env.get("RANK") == str(number))
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        _, errors = job.communicate(timeout=20)
        assert time.monotonic() - killed_at < 10
    finally:
        job.kill()
    assert job.returncode == 1
    assert f"rank {number} was killed by SIGKILL; all ranks ended." in errors
    assert "The last complete checkpoint is runs/" in errors
    assert all(is_gone(pid) for pid in below)

    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    more = str(steps[-1] + 3)
    resumed = pretrain(tmp_path, "--resume", str(run), "--train-iters", more)
    assert resumed.returncode == 0, resumed.stderr
    assert (run / "checkpoints" / f"step_{steps[-1] + 3:08d}").is_dir()


def test_ctrl_c_ends_all_ranks_within_seconds(tmp_path: Path) -> None:
    job = start(tmp_path, *TINY, "--train-iters", "100000", "--save-interval", "5")
    try:
        wait_for_checkpoint(tmp_path / "runs")
        below = descendants(job.pid)
        os.killpg(job.pid, signal.SIGINT)
        stopped_at = time.monotonic()
        _, errors = job.communicate(timeout=20)
        assert time.monotonic() - stopped_at < 10
    finally:
        job.kill()
    assert job.returncode == 130
    assert "interrupted by SIGINT; all ranks ended. The last complete checkpoint is" in errors
    assert "Traceback" not in errors
    assert all(is_gone(pid) for pid in below)


def test_the_same_program_runs_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "pretrain", *TINY, "--cp", "2", "--train-iters", "3"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("tp1-cp2-dp1")
    assert (run / "checkpoints" / "step_00000003").is_dir()


REFUSED = {
    "product": ("--ranks 2 --tp 2 --dp 2", "tp * cp * dp = 2 * 1 * 2 = 4, but there are 2 ranks"),
    "sequence": ("--cp 2 --seq-length 34", "--seq-length 34 is not divisible by 2 * --cp 4"),
    "heads": ("--tp 3", "--num-attention-heads 4 is not divisible by --tp 3"),
    "hidden": ("--hidden-size 30", "--hidden-size 30 is not divisible by --num-attention-heads 4"),
    "batch": ("--dp 3", "--global-batch-size 16 is not divisible by --dp 3"),
    "outer": ("--dp 4 --fsdp --hsdp-outer 3", "--dp 4 is not divisible by --hsdp-outer 3"),
    "outer alone": ("--hsdp-outer 2", "--hsdp-outer 2 needs --fsdp"),
    "microbatch": ("--micro-batch-size 3", "--global-batch-size / --dp 8 is not divisible by"),
    "zero": ("--tp 0", "--tp must be at least 1, got 0"),
    "dropout": ("--dropout 1.5", "--dropout must be in [0, 1), got 1.5"),
    "word": ("--tp two", "argument --tp: invalid int value: 'two'"),
    "unknown": ("--tpp 2", "unrecognized arguments: --tpp 2"),
    "length": ("--seq-length 100000000 --cp 1", "--seq-length 100000000 is not below"),
    "missing run": ("--resume nowhere", "--resume nowhere: no run folder (it has no config.json)"),
    "foreign run": ("--resume foreign", "config.json is not of this job"),
    "no checkpoint": ("--resume empty", "--resume empty: no complete checkpoint in"),
    "changed model": ("--resume empty --hidden-size 64", "--hidden-size 64 differs from the run"),
    "file as folder": ("--runs-dir file/runs", "cannot write the run folder file/runs/"),
    "used folder": ("--run-dir foreign", "--run-dir foreign is not empty"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    from pretrain.settings import Settings, write_settings

    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    write_settings(Settings(), tmp_path / "empty", [])
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    done = pretrain(tmp_path, *shlex.split(arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("pretrain: error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before
