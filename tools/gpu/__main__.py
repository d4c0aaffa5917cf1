"""Check this machine's GPU: tests, benchmark rows and the main job. Exit code 1 for a problem."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.limits import JOURNAL, LIMIT
from results.journal import append_line, read_journal, write_whole
from results.machine import describe_machine, join_facts, timestamp
from results.page import markdown_table, read_head

ROOT = Path(__file__).parents[2]
_LIMITS_S = {"tests": 300, "rows": 120, "main job": 150}  # together below ten minutes
_JOB = "--dp 1 --no-mlflow --no-tensorboard --async-save --save-interval 100 --eval-interval 0"
_SIZES = {
    "cuda": "--num-layers 4 --hidden-size 256 --seq-length 256 --global-batch-size 16 "
    "--micro-batch-size 16 --bf16",
    "standin": "--num-layers 1 --hidden-size 16 --seq-length 16 --global-batch-size 2 "
    "--micro-batch-size 2 --device standin",
}
# Marked tests, and tests with a fixture whose device is then a GPU.
_USES_GPU = r"mark\.cuda|on_each_device|def test_\w+\([^)]*\b(accelerator|device)\b"


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
    device = options.device
    if device == "cuda":
        import torch  # it takes seconds, and the phases import it for themselves

        device = torch.cuda.get_device_name(0)
    libraries = describe_machine("megatron-core", "transformer-engine", "xxhash")
    facts = {"machine": socket.gethostname(), "device": device, "at": timestamp(), **libraries}
    append_line(journal, {"kind": "machine", "facts": facts})
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "tests": ["pytest", "--continue-on-collection-errors", "-pgpu.limits",
                      *find_tests(options.device, options.tests)],
            "rows": ["gpu.rows", str(journal), options.device],
            "main job": ["pretrain", "--run-dir", f"{folder}/run", *_JOB.split(),
                         *_SIZES[options.device].split(), "--train-iters", str(options.steps)],
        }  # fmt: skip
        for name, command in commands.items():
            append_line(journal, run_phase(name, command, journal))
    lines = list(read_journal(journal, dict))
    write_whole(options.folder / "gpu.md", make_page(lines))
    problems = [f"{one['name']}: {one['outcome']}: {_end_of_reason(one)}" for one in lines[1:]
                if one["outcome"] not in ("passed", "skipped")]  # fmt: skip
    print("\n".join(problems or ["gpu: no problem"]), f"\ngpu: see {options.folder / 'gpu.md'}")
    return bool(problems)


def find_tests(device: str, folders: Sequence[str]) -> list[str]:
    """Return pytest's arguments. Files without such tests may import libraries that are missing."""
    name, selection = (_USES_GPU, "cuda") if device == "cuda" else (device, "not cuda")
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("test_*.py")))
    found = [str(path) for path in files if re.search(name, path.read_text(encoding="utf-8"))]
    return ["-m", selection, *(found or ["no test that names the device"])]


def run_phase(name: str, command: Sequence[str], journal: Path) -> dict[str, Any]:
    """Run a module of Python to its limit, and return its line of the journal."""
    environment = {LIMIT: "60", **os.environ, JOURNAL: str(journal)}
    began, limit_s = time.monotonic(), _LIMITS_S[name]
    print(f"gpu: {name}, at most {limit_s} s", flush=True)
    words = ["timeout", str(limit_s), sys.executable, "-m", *command]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    took = f"exit code {done.returncode} after {time.monotonic() - began:.0f} s"
    reason = f"{(done.stderr + done.stdout)[-3000:].strip()}\n{took}, at most {limit_s} s"
    outcome = "failed" if done.returncode else "passed"
    return {"kind": "phase", "name": name, "outcome": outcome, "reason": reason}


def make_page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of a journal."""
    parts = [read_head(__file__), join_facts(lines[0]["facts"])]
    for kind in ("phase", "row", "test"):
        found = [line for line in lines if line["kind"] == kind]
        num_passed = sum(line["outcome"] == "passed" for line in found)
        cells = [(line["name"], line["outcome"], _end_of_reason(line)) for line in found
                 if kind != "test" or line["outcome"] != "passed"]  # fmt: skip
        title = f"\n## {kind.capitalize()}s: {num_passed} of {len(found)} passed\n"
        parts += [title, markdown_table(("name", "outcome", ""), cells)]
    return "\n".join(parts) + "\n"


def _end_of_reason(line: Mapping[str, Any]) -> str:
    return "; ".join(line["reason"].strip().replace("|", "/").splitlines()[-3:])


if __name__ == "__main__":
    sys.exit(main())
