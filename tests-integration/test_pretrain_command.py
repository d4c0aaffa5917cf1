"""The main job as a user starts it: its output and its refusals."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.cli.options import parse
from pretrain.settings import Settings, write_settings
from pretrain_runs import command, environment, last_value, pretrain

TINY = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --no-mlflow"
)
CONSOLE_LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +12 \| consumed samples: +(\d+) \| "
    r"step ms: [\d.]+ \| tokens/s: [\d,]+ \| learning rate: (\d\.\d{6}E[+-]\d\d) \| "
    r"global batch size: +8 \| lm loss: (\d\.\d{6}E[+-]\d\d) \| (?:max lm loss: \S+ \| )?"
    r"grad norm: [\d.]+ \|$",
    re.MULTILINE,
)


@pytest.mark.slow
def test_a_run_leaves_a_folder_that_holds_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    done = command(
        tmp_path, *TINY, "--tp", "2", "--train-iters", "12", "--log-interval", "4",
        "--eval-interval", "5", "--save-interval", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert last_value(done.stdout, "device").endswith(", 3 threads a rank (OMP_NUM_THREADS)")
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
    assert last_value(done.stdout, "run page") == f"runs/{run.name}/run.html"
    assert '"name":"lm loss"' in (run / "run.html").read_text()

    tail = done.stdout.splitlines()[-9:]
    mean = sum(losses[step] for step in range(9, 13)) / 4
    assert any(f"{losses[1]:.3f} at step 1, {mean:.3f} over the last 4" in line for line in tail)
    assert any(f"hatch run tensorboard --logdir runs/{run.name}/tensorboard" in x for x in tail)
    assert any(re.search(r"\d tokens per second", line) for line in tail)
    (printed,) = (line.split("  ")[-1].strip() for line in tail if line.startswith("continue "))

    again = pretrain(tmp_path, *shlex.split(printed)[3:])
    assert again.returncode == 0, again.stderr
    assert (run / "checkpoints" / "step_00000024").is_dir()


REFUSED = {
    "product": (
        "--ranks 2 --tp 2 --dp 2",
        "tp * cp * pp * dp = 2 * 1 * 1 * 2 = 4, but there are 2 ranks",
    ),
    "sequence": ("--cp 2 --seq-length 34", "--seq-length 34 is not divisible by 2 * --cp 4"),
    "heads": ("--tp 3", "--num-attention-heads 4 is not divisible by --tp 3"),
    "hidden": ("--hidden-size 30", "--hidden-size 30 is not divisible by --num-attention-heads 4"),
    "batch": ("--dp 3", "--global-batch-size 16 is not divisible by --dp 3"),
    "outer": ("--dp 4 --fsdp --hsdp-outer 3", "--dp 4 is not divisible by --hsdp-outer 3"),
    "outer alone": ("--hsdp-outer 2", "--hsdp-outer 2 needs --fsdp"),
    "microbatch": ("--micro-batch-size 3", "--global-batch-size / --dp 8 is not divisible by"),
    "zero": ("--tp 0", "--tp must be at least 1, got 0"),
    "dropout": ("--dropout 1.5", "--dropout must be in [0, 1), got 1.5"),
    "no ranks": ("--ranks 0", "--ranks must be at least 1, got 0"),
    "endless": ("--timeout-s 1e300", "--timeout-s must be above 0 and at most 1000000, got 1e+300"),
    "seed": ("--seed 99999999999999", "--seed must be from 0 to 1000000000000, got 99999999999999"),
    "field": ("--field body", "--field body has no effect without --data"),
    "word": ("--tp two", "argument --tp: invalid int value: 'two'"),
    "unknown": ("--tpp 2", "unrecognized arguments: --tpp 2"),
    "length": ("--seq-length 100000000 --cp 1", "both must be above --seq-length 100000000"),
    "missing run": (
        "--resume nowhere",
        "--resume nowhere: not a run folder (it has no config.json)",
    ),
    "foreign run": ("--resume foreign", "config.json is not from this job"),
    "no checkpoint": ("--resume empty", "--resume empty: no complete checkpoint in"),
    "changed model": ("--resume empty --hidden-size 64", "--hidden-size 64 differs from the run"),
    "file as folder": ("--runs-dir file/runs", "cannot write the run folder file/runs/"),
    "used folder": ("--run-dir foreign", "--run-dir foreign is not empty"),
}


COMMAND_ITSELF = REFUSED["heads"][0]


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    write_settings(Settings(), tmp_path / "empty", [])
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    run = command if arguments == COMMAND_ITSELF else pretrain
    done = run(tmp_path, *shlex.split(arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("pretrain: error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_refusals_and_help_come_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import contextlib, sys\n"
        "from pretrain.cli.command import main\n"
        "for words in (['--nonsense'], ['--tp', '3'], ['--config', 'x'], ['--resume', 'x']):\n"
        "    print(main(words))\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'mcore.parallel', 'mcore.tensor', 'mlflow', 'matplotlib'}\n"
        "print(sys.modules.keys() & heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert (lines[:4], lines[-1]) == (["2"] * 4, "set()")
    assert "--train-iters" in done.stdout
    assert len(done.stderr.splitlines()) == 4


def test_each_group_of_the_help_fits_a_screen_and_the_first_has_ten_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    groups = dict(re.findall(r"^([a-z].*):\n((?: .*\n)+)", text, re.MULTILINE))
    assert len(groups) >= 10
    assert max(group.count("\n") for group in groups.values()) < 24
    first = re.findall(r"^  (--[a-z-]+)", next(iter(groups.values())), re.MULTILINE)
    assert len(first) == 10
    assert {"--data", "--resume", "--train-iters", "--lr"} < set(first)
