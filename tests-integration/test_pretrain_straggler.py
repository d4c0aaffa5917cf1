"""The straggler detector in the main job: it names a slow rank, answers, and changes no number."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore.observe import StragglerDetector, configure_nvtx_profiling
from mcore.observe.runs import Run
from mcore.observe.straggler.server.token_file import find_token
from pretrain.run_folder import RunFolder
from pretrain.settings import Settings
from pretrain.watch.straggler import CpuWaits, StepRanges, StragglerWatch
from pretrain_runs import (
    ENDLESS,
    PASSWORD,
    assert_no_password,
    losses_of,
    pretrain,
    ranks_of,
    records_of,
    started,
    train_on_ranks,
    wait_until,
)
from pretrain_runs import SMALL as BASE
from pretrain_runs import TINY as ONE_LAYER
from rank_testing import free_port, run_ranks

TINY = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--global-batch-size 8 --warmup-iters 2 --eval-batches 1 --eval-interval 0 "
    "--no-mlflow --no-tensorboard"
)
SMALL = Settings(
    tp=2, dp=1, dropout=0.1, log_interval=2,
    **{**BASE, "num_layers": 1, "train_iters": 4, "straggler": True},
)  # fmt: skip


@pytest.mark.xdist_group("waits")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_named(ranks: int, tmp_path: Path) -> None:
    # Interrupted passes on a busy machine are noise that can hide the rank in twenty reports.
    done = pretrain(
        tmp_path, *TINY, "--ranks", str(ranks), "--slow-rank", "1:40", "--run-dir", "run",
        "--train-iters", "60", "--log-interval", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    named = re.findall(r"^straggler: rank (\d+) takes ([\d.]+) times .* for its (\w+)$",
                       done.stdout, re.MULTILINE)  # fmt: skip
    assert ("1", "forward") in [(rank, part) for rank, _, part in named]
    assert re.search(r"^slow ranks +.*rank 1 in \d+\b.* of 60 reports", done.stdout, re.MULTILINE)

    *_, lines = (r for r in records_of(tmp_path / "run") if "straggler/rank0/forward-ms" in r)
    scores = {rank: lines[f"straggler/rank{rank}/relative-score"] for rank in range(ranks)}
    assert min(scores, key=scores.__getitem__) == 1
    assert scores[1] < 0.6
    assert max(scores.values()) == 1.0
    for name in ("forward-ms", "data-ms"):
        assert all(lines[f"straggler/rank{rank}/{name}"] > 0 for rank in range(ranks))

    slow = Run.read(tmp_path / "run").slow
    assert list(slow) == [*range(1, 61)]
    assert ("forward", socket.gethostname(), "cpu") in {
        (one.metric, one.host, one.device) for named in slow.values() for one in named
        if one.rank == 1
    }  # fmt: skip
    page = (tmp_path / "run" / "run.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    [strip] = (each for each in data["maps"] if each["name"] == "Slow ranks")
    assert strip["steps"] == [str(step) for step in slow]
    printed = max(float(times) for rank, times, _ in named if rank == "1")
    assert max(strip["cells"][strip["ranks"].index("1")]) == pytest.approx(printed, abs=0.051)
    [text] = (text for label, _, text in data["runs"][0]["figures"] if label == "slow ranks")
    assert re.fullmatch(r"rank \d in \d+ of 60 reports", text)

    written = (tmp_path / "run" / "straggler.log").read_text()
    assert re.search(r"\| MnRtt/Rnk: [\d.]+ms/\d \| MxRtt/Rnk: [\d.]+ms/\d \|", written)
    assert re.search(r"^straggler: rank 1 .* forward=[\d.]+ms ", written, re.MULTILINE)


def slow_ranks_here(run_dir: str) -> None:
    """Ranks 0 and 1 are slow, by clocks that are set by hand; rank 3 starts to the 8th report."""
    rank, cpu = dist.get_rank(), torch.device("cpu")
    report = 0
    settings = Settings(tp=2, dp=2)
    watch = StragglerWatch(
        settings, RunFolder(Path(run_dir)), cpu, 1, lambda: rank == 3 and report < 8
    )
    now_ns = 0
    watch.detector._now_ns = lambda: now_ns  # type: ignore[method-assign]
    watch.waits.close()
    watch.waits = CpuWaits(torch.device("meta"))
    ranges = StepRanges(watch.detector, None, cpu, waits=watch.waits)
    for report in range(1, 12):
        for _ in range(2):
            with ranges.forward():
                now_ns += (200 if rank < 2 else 10) * 1_000_000
            watch.end_step()
        if report == 10 and rank == 1:
            watch.waits = Waited()
        watch.report(report)
    watch.close()


class Waited(CpuWaits):
    """What a rank reports that had no CPU for ten seconds, once."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self._waited["forward"] = 10_000.0


def test_a_rank_that_starts_or_has_no_cpu_is_not_named(tmp_path: Path) -> None:
    run_ranks(slow_ranks_here, 4, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "slow_ranks.jsonl").read_text().splitlines()]
    named = {line["step"]: sorted(one["rank"] for one in line["slow"]) for line in lines}
    assert named == {9: [0, 1], 10: [], 11: [0, 1]}  # rank 0 waits for rank 1: one tp group


def lacked_ms() -> float:
    """Milliseconds of the wall clock that this thread did not run."""
    return 1e3 * (time.perf_counter() - time.thread_time())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count it")
def test_waiting_for_a_cpu_is_what_a_busy_thread_lacks_to_the_wall_clock() -> None:
    waits = CpuWaits(torch.device("cpu"))
    allowed = os.sched_getaffinity(0)
    busy = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            for process in (0, other.pid):
                os.sched_setaffinity(process, {min(allowed)})
            around = lacked_ms()
            with waits.during("forward"):
                inside, ran = lacked_ms(), time.thread_time()
                while time.thread_time() - ran < 0.3:
                    pass
                least = lacked_ms() - inside
            most = lacked_ms() - around
            began = time.perf_counter()
            with waits.during("backward"):
                time.sleep(0.3)
            overslept = time.perf_counter() - began - 0.3
        finally:
            os.sched_setaffinity(0, allowed)
            other.kill()
    forward, backward, optimizer = waits.take()
    assert 0.95 * least - 10 <= forward <= 1.05 * most + 10  # two clocks of the kernel
    assert forward > 50  # of 300 or so: the other process has the same right to the CPU
    assert backward <= 1e3 * overslept + 10  # a thread that sleeps does not wait
    assert optimizer == 0.0
    assert waits.take() == [0.0, 0.0, 0.0]
    waits.close()


def test_nothing_that_watches_changes_a_loss(tmp_path: Path) -> None:
    kinds = {
        "off": dataclasses.replace(SMALL, straggler=False),
        "on": SMALL,
        "all": dataclasses.replace(SMALL, slow_rank="0:1.5", nvtx=True),
    }
    losses = {}
    for kind, settings in kinds.items():
        train_on_ranks(settings, tmp_path / kind)
        losses[kind] = losses_of(tmp_path / kind)
    assert len(losses["off"]) == 4
    assert losses["on"] == losses["off"]
    assert losses["all"] == losses["off"]
    assert not (tmp_path / "off" / "straggler.log").exists()
    names = {name for record in records_of(tmp_path / "off") for name in record}
    assert not any(name.startswith("straggler/") for name in names)
    assert (tmp_path / "on" / "straggler.log").read_text().count("MnRtt/Rnk") == 2


def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text of an answer of the controller, with the token in its file."""
    token = find_token(("127.0.0.1", int(address.rpartition(":")[2])))
    asked = urllib.request.Request(
        address + path, method=method, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def answer_of(address: str, path: str, wanted: Callable[[str], bool]) -> str:
    """Ask until the answer is as wanted."""
    answers: list[tuple[int, str]] = []

    def is_as_wanted() -> bool:
        answers.append(ask(address, path))
        return answers[-1][0] == 200 and wanted(answers[-1][1])

    wait_until(is_as_wanted)
    return answers[-1][1]


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_a_running_job_answers_and_shows_no_password(tmp_path: Path) -> None:
    """The controller of a job whose MLflow is away; its processes can be seen by all users."""
    port = free_port()
    uri = f"http://someone:{PASSWORD}@127.0.0.1:{free_port()}"
    with started(
        tmp_path, *ONE_LAYER, *ENDLESS, "--log-interval", "3", "--save-interval", "0",
        "--run-dir", "run", "--straggler-port", str(port), "--mlflow-uri", uri,
    ) as job:  # fmt: skip
        job.wait_until_printed("/ui\n", timeout_s=600)
        assert f"straggler detector: http://127.0.0.1:{port}/ui" in job.printed.splitlines()
        lines = [rank["words"] for rank in ranks_of(job, tmp_path)]
        address = f"http://127.0.0.1:{port}"
        report = json.loads(answer_of(address, "/report", lambda text: True))
        assert report["world_size"] == 2
        assert set(report["sections"]) == {"compute", "data", "forward", "backward", "optimizer"}
        for name in ("forward", "backward", "optimizer"):
            assert [stats["count"] for stats in report["sections"][name]] == [3, 3]
        assert "mcore_straggler_enabled 1" in ask(address, "/metrics")[1]
        assert "<title>" in ask(address, "/ui")[1]
        shown = json.loads(answer_of(address, "/ui/data", lambda text: True))["scalars"]
        assert {"lm loss", "grad norm", "tokens/s"} <= {one["name"] for one in shown}
        assert ask(address, "/off", "POST")[0] == 202
        answer_of(address, "/status", lambda text: json.loads(text)["enabled"] is False)
        wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        os.killpg(job.pid, signal.SIGINT)
        done = job.wait(600)
    assert done.returncode == 130
    assert len(lines) == 2
    assert all("run" in line and PASSWORD not in " ".join(line) for line in lines)
    assert_no_password(tmp_path, done)


def test_a_taken_port_is_said_and_the_job_runs(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = pretrain(tmp_path, *TINY, "--ranks", "1", "--train-iters", "2", "--log-interval",
                        "2", "--straggler-port", port)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"straggler detector: port {port} cannot be used (" in done.stdout
    assert "slow ranks       none in 1 report " in done.stdout


def test_the_parts_of_a_step_have_names_for_profilers() -> None:
    ranges = StepRanges(StragglerDetector(), None, torch.device("cpu"))
    configure_nvtx_profiling(True, backend="record")
    try:
        with torch.profiler.profile() as profiler:
            for part in (ranges.data, ranges.forward, ranges.backward, ranges.optimizer):
                with part():
                    torch.ones(1)
    finally:
        configure_nvtx_profiling(False)
    names = {event.key for event in profiler.key_averages()}
    assert {"data", "forward", "backward", "optimizer"} <= names


REFUSED = {
    "form": ("--slow-rank 1", "--slow-rank must be RANK:FACTOR such as 1:4, got 1"),
    "rank": ("--slow-rank 2:4", "--slow-rank 2:4: there are 2 ranks, 0 to 1"),
    "factor": ("--slow-rank 1:1", "--slow-rank 1:1: the factor must be above 1"),
    "port": ("--straggler-port 65545", "--straggler-port must be from 0 to 65535, got 65545"),
    "off": (
        "--straggler-port 5000 --no-straggler",
        "--straggler-port 5000 needs --straggler: add it",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    done = pretrain(tmp_path, *shlex.split(arguments))
    assert done.returncode == 2
    assert done.stderr == f"pretrain: error: {message}\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
