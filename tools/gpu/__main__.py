"""Check this machine's GPU: tests, benchmark rows and the main job. Exit code 1 for a problem."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gpu.limits import JOURNAL, LIMIT
from results.journal import append_line, read_journal, write_whole
from results.machine import describe_machine, join_facts, timestamp
from results.page import format_duration, markdown_table, read_head

ROOT = Path(__file__).parents[2]
_LIMITS_S = {"tests": 300, "rows": 120, "main job": 150}  # together below ten minutes
_TEST_LIMIT_S = "60"
_JOB = "--dp 1 --no-mlflow --no-tensorboard --async-save --save-interval 100"
_SIZES = {
    "cuda": "--num-layers 4 --hidden-size 256 --seq-length 256 --global-batch-size 16 "
    "--micro-batch-size 16 --bf16",
    "standin": "--num-layers 1 --hidden-size 16 --seq-length 16 --global-batch-size 2 "
    "--micro-batch-size 2 --eval-interval 0",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all phases, write the journal and its page, and return 1 for a problem."""
    parser = argparse.ArgumentParser(prog="bash tools/gpu/run.sh", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="write gpu.jsonl and gpu.md here")
    add("--device", choices=list(_SIZES), default="cuda", help="standin: try this command")
    add("--tests", nargs="+", default=["packages", "tests-integration"], help="folders of tests")
    add("--steps", type=int, default=200, help="steps of the main job")
    options = parser.parse_args(arguments)
    journal: Path = options.folder / "gpu.jsonl"
    journal.unlink(missing_ok=True)
    append_line(journal, {"kind": "machine", "facts": describe_device(options.device)})
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "tests": ["pytest", "-pgpu.limits", *find_tests(options.device, options.tests)],
            "rows": ["gpu.rows", str(journal), options.device],
            "main job": ["pretrain", "--run-dir", f"{folder}/run", *_JOB.split(),
                         *_SIZES[options.device].split(), "--train-iters", str(options.steps)],
        }  # fmt: skip
        for name, command in commands.items():
            append_line(journal, run_phase(name, command, journal))
        append_line(journal, read_job(Path(folder, "run", "metrics.jsonl"), options.steps))
    lines = list(read_journal(journal, dict))
    write_whole(options.folder / "gpu.md", make_page(lines))
    problems = find_problems(lines)
    print("\n".join(problems or ["gpu: no problem"]), f"\ngpu: see {options.folder / 'gpu.md'}")
    return bool(problems)


def describe_device(kind: str) -> dict[str, str]:
    """Facts that the figures depend on."""
    device = torch.cuda.get_device_name(0) if kind == "cuda" else kind
    facts = {"machine": socket.gethostname(), "device": device, "CUDA": str(torch.version.cuda)}
    return {**facts, **describe_machine("megatron-core", "transformer-engine"), "at": timestamp()}


def find_tests(device: str, folders: Sequence[str]) -> list[str]:
    """Return pytest's arguments. Files without such tests may import libraries that are missing."""
    mark, selection = ("pytest.mark.cuda", "cuda") if device == "cuda" else (device, "not cuda")
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("test_*.py")))
    found = [str(path) for path in files if mark in path.read_text(encoding="utf-8")]
    return ["-m", selection, *found]


def run_phase(name: str, command: Sequence[str], journal: Path) -> dict[str, Any]:
    """Run a module of Python to its limit, and return its line of the journal."""
    environment = {**os.environ, JOURNAL: str(journal), LIMIT: os.environ.get(LIMIT, _TEST_LIMIT_S)}
    began, limit_s = time.monotonic(), _LIMITS_S[name]
    print(f"gpu: {name}, at most {limit_s} s", flush=True)
    line = {"kind": "phase", "name": name, "outcome": "failed", "reason": f"over {limit_s} s"}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, timeout=limit_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        took = f"{time.monotonic() - began:.0f} s"
        if done.returncode == 0:
            return {**line, "outcome": "passed", "reason": took}
        line["reason"] = f"{done.stdout[-3000:]}\nexit code {done.returncode} after {took}"
    return line


def read_job(metrics: Path, steps: int) -> dict[str, Any]:
    """Return the line of the main job: its steps, its last loss and the median time of a step."""
    lines = list(read_journal(metrics, dict))
    times = sorted(line["step-time"] for line in lines if "step-time" in line)
    losses = [line["lm loss"] for line in lines if "lm loss" in line]
    reason = f"{len(times)} of {steps} steps"
    if times and losses:
        reason += f", loss {losses[-1]:.4f}, median step {format_duration(times[len(times) // 2])}"
    outcome = "passed" if len(times) == steps else "failed"
    return {"kind": "phase", "name": "steps of the main job", "outcome": outcome, "reason": reason}


def find_problems(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """List what did not pass. Only tests may be skipped."""
    tests = [line for line in lines if line["kind"] == "test"]
    problems = [] if any(test["outcome"] == "passed" for test in tests) else ["no test has passed"]
    for line in lines[1:]:
        if line["outcome"] not in ("passed", "skipped"):
            problems.append(f"{line['name']}: {line['outcome']}: {_last_line(line)}")
    return problems


def make_page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of a journal."""
    of_kind = {kind: [line for line in lines if line["kind"] == kind]
               for kind in ("test", "row", "phase")}  # fmt: skip
    outcomes = [test["outcome"] for test in of_kind["test"]]
    counts = (f"{outcomes.count(one)} {one}" for one in sorted(set(outcomes)))
    skipped = [t for t in of_kind["test"] if t["outcome"] == "skipped"]
    rows = [
        (row["name"], format_duration(row["ours_s"]), format_duration(row["peer_s"]), row["peer"],
         f"{row['peer_s'] / row['ours_s']:.2f}", row["reason"])
        for row in of_kind["row"] if row["outcome"] == "passed"
    ]  # fmt: skip
    parts = [
        read_head(__file__), join_facts(lines[0]["facts"]),
        "## Problems", *(f"- {one}" for one in find_problems(lines) or ["none"]),
        "## Phases", *(f"- {one['name']}: {one['outcome']}, {_last_line(one)}"
                       for one in of_kind["phase"]),
        "## Tests", ", ".join(counts), *(f"- {t['name']}: {_last_line(t)}" for t in skipped),
        "## Rows", markdown_table(("case", "here", "there", "compared with", "ratio", ""), rows),
    ]  # fmt: skip
    return "\n".join(f"\n{one}\n" if one[:2] == "##" else one for one in parts).rstrip() + "\n"


def _last_line(line: Mapping[str, Any]) -> str:
    return str(line["reason"]).strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
