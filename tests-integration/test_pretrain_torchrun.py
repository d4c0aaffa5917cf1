"""The main job under torchrun: the guide's line on two nodes, and a restart after a lost rank."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ruamel.yaml import YAML
from torch.distributed.rendezvous import rendezvous

from faults.launchers import NODES_CHANGE, RENDEZVOUS
from pretrain.cli.handshake import join
from pretrain.cli.options import parse
from pretrain.run.checkpoints import has_checkpoint
from pretrain.run_folder import RunFolder
from pretrain_runs import (
    TINY,
    TOOLS,
    launcher,
    losses_of,
    pretrain,
    ranks_below,
    wait_until,
)
from rank_testing import run_ranks
from rank_testing.ports import free_port

GUIDE = TOOLS / "docs" / "pages" / "guides" / "main-job-options.md"


def guide_line(port: int) -> list[str]:
    """The words of the guide's command, for one rank a node, this host and a free port.

    The first is the module of ``torchrun``.
    """
    [line] = re.findall(r"^hatch run (torchrun .*\\\n.*)$", GUIDE.read_text(), re.MULTILINE)
    here = line.replace("\\\n", " ").replace("HOST:29400", f"127.0.0.1:{port}")
    name, *words = shlex.split(here.replace("--nproc-per-node 2", "--nproc-per-node 1"))
    [program] = importlib.metadata.entry_points(group="console_scripts", name=name)
    assert program.attr == "main"
    return [program.module, *words]


# A rank that saves its second checkpoint waits for a file, or it could be done before it is killed.
HALTING = """
import os, sys, time
def wait(event, facts):
    if event == "open" and "step_00000006" in str(facts[0]):
        while not os.path.exists("killed"):
            time.sleep(0.05)
sys.addaudithook(wait)
"""


@pytest.mark.xdist_group("waits")
@pytest.mark.slow
def test_the_guide_s_line_on_two_nodes_and_again_after_lost_ranks(tmp_path: Path) -> None:
    words = [*guide_line(free_port()), *TINY, "--no-mlflow", "--save-interval", "3"]
    folder = RunFolder(tmp_path / "runs" / "first")
    words += ["--train-iters", "12"]
    nodes = [launcher(tmp_path, *words, begin=HALTING) for _ in range(2)]
    try:
        wait_until(lambda: has_checkpoint(folder) or not nodes[0].is_running)
        # Only this node counts a restart.
        for pid in ranks_below(nodes[1], tmp_path).values():
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "killed").touch()
        done = [node.wait(600) for node in nodes]
    finally:
        for node in nodes:
            node.send(signal.SIGKILL)
    assert [node.returncode for node in done] == [0, 0], done
    assert len(losses_of(folder.path)) == 12
    assert "failed (exitcode: -9)" in "".join(node.stderr for node in done)


KILLED_ONCE = """
import os, signal, sys
def kill(event, facts):
    if event == "open" and "step_00000008" in str(facts[0]):
        os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    sys.addaudithook(kill)
"""


@pytest.mark.slow
def test_a_restart_by_torchrun_does_not_reset_the_text_a_second_time(tmp_path: Path) -> None:
    for name in ("text", "other"):
        words = (f"{name} {number}" for number in range(1000))
        (tmp_path / name).write_text("\n".join(words))
    shape = [*TINY, "--dp", "1", "--no-mlflow", "--no-tensorboard", "--no-straggler"]
    first = [*shape, "--data", "text", "--train-iters", "4", "--run-dir", "run"]
    assert pretrain(tmp_path, *first).returncode == 0
    shutil.copytree(tmp_path / "run", tmp_path / "undisturbed")
    words = ["--reset-data", "--data", "other", "--train-iters", "12", "--save-interval", "2"]
    assert pretrain(tmp_path, "--resume", "undisturbed", *words).returncode == 0
    torchrun = ("torch.distributed.run", "--standalone", "--max-restarts=1", "-m", "pretrain")
    done = launcher(tmp_path, *torchrun, "--resume", "run", *words, begin=KILLED_ONCE).wait(600)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9)" in done.stderr
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "undisturbed")
    said = "pretrain: from step 5 on --reset-data is True, before False\n"
    assert done.stderr.count(said) == 1


ASK = """
import sys
from pathlib import Path
from pretrain.cli.claim import is_of_this_launcher
Path("after").touch()
print(*(is_of_this_launcher(Path(), name) for name in ("before", "after")))
"""


def test_a_file_written_just_before_the_launcher_is_not_of_it(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    time.sleep(0.05)
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}])"
    env = os.environ | {"TORCHELASTIC_RUN_ID": "a-run", "PYTHONPATH": str(TOOLS)}
    done = subprocess.run(
        [sys.executable, "-c", launcher], cwd=tmp_path, timeout=300, env=env,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False True\n"


def meet_again() -> float:
    """Join beside what an earlier start left, as a rank whose node has counted otherwise."""
    number = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    store, *_ = next(rendezvous("env://"))
    if number:
        store.set(f"hello/{number}", "of a rank that is dead")
        time.sleep(0.2)
    join(torch.device("cpu"), datetime.timedelta(seconds=300))
    total = torch.tensor(number + 1.0)
    dist.all_reduce(total)
    return total.item()


def test_ranks_meet_though_their_nodes_count_restarts_differently() -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run_ranks(meet_again, 2, init=None, env=address, timeout_s=600) == [3.0, 3.0]


SRUN = """#!/bin/sh
echo "$@" > said
for step in $SAVES; do mkdir -p run/checkpoints/step_0000000$step; done
[ -z "$DIVERGES" ] || touch run/diverged.txt
exit $CODE
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show hostnames") echo n1;;
    "show node") echo NodeAddr=127.0.0.1;;
    requeue*) echo "$2" >> requeued;;
esac
"""


def test_the_batch_file_requeues_a_job_as_long_as_that_helps(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def is_requeued(restarts: int, code: int, saves: str = "", diverges: str = "") -> bool:
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "RUN_DIR": "run",
            "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "REQUEUES": "2",
            "SLURM_RESTART_COUNT": str(restarts),
            "CODE": str(code), "SAVES": saves, "DIVERGES": diverges,
        }  # fmt: skip
        if (tmp_path / "said").exists():
            variables["TORCHRUN"] = "torchrun"  # hatch, which finds it, takes longer than the rest
        batch = TOOLS / "pretrain" / "cluster" / "slurm.sbatch"
        done = subprocess.run(["bash", str(batch)], cwd=tmp_path, env=variables, check=False)
        assert done.returncode == code
        (requeued := tmp_path / "requeued").touch()
        told = requeued.read_text()
        requeued.unlink()
        return told == "7\n"

    assert not is_requeued(0, 1)  # nothing saved
    assert is_requeued(0, 1, saves="1 2")
    assert not is_requeued(0, 2)  # submitted again, refused
    assert [is_requeued(n, 1, saves=str(n)) for n in range(3, 8)] == [True] * 5
    assert [is_requeued(n, 1) for n in range(8, 11)] == [True, False, False]
    assert not is_requeued(11, 0, saves="8")
    ids = []
    for start in (12, 12):
        assert not is_requeued(start, 1, saves="9", diverges="1")
        said = (tmp_path / "said").read_text()
        [(port, run_id)] = re.findall(r"--rdzv-endpoint 127\.0\.0\.1:(\d+) --rdzv-id (\S+)", said)
        assert 10_000 <= int(port) < 30_000
        assert re.fullmatch("7-12-[0-9a-f]{32}", run_id)
        ids.append(run_id)
    assert ids[0] != ids[1]


def check_that_pods_hear_only_each_other(network: Any, store: Any, job: Any) -> None:
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    chosen = network["spec"]["podSelector"]
    for pod in (store, template):
        assert chosen["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert network["kind"] == "NetworkPolicy"
    assert network["spec"]["policyTypes"] == ["Ingress"]
    assert network["spec"]["ingress"] == [{"from": [{"podSelector": chosen}]}]


def test_the_cluster_files_give_options_that_exist() -> None:
    folder = TOOLS / "pretrain" / "cluster"
    service, store, job, network = YAML(typ="safe").load_all(folder / "kubernetes.yaml")
    policy = job["spec"]["elasticPolicy"]
    assert policy["rdzvHost"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == store["metadata"]["labels"]
    ports = {policy["rdzvPort"], *(port["port"] for port in service["spec"]["ports"])}
    assert ports == {int(store["spec"]["containers"][0]["command"][-1])}
    [(name, value)] = [(entry["key"], entry["value"]) for entry in policy["rdzvConf"]]
    assert f"{name}={value}" == RENDEZVOUS
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    check_that_pods_hear_only_each_other(network, store, job)
    [container] = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables == {**NODES_CHANGE, "PYTHONPATH": "/mcore/tools"}
    assert container["command"][2] == 'exec "$(hatch env find)/bin/torchrun" -m pretrain "$@"'
    words = container["args"]
    batch = (folder / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n"], input=batch, text=True, check=False).returncode == 0
    if shutil.which("shellcheck") or os.environ.get("GITHUB_ACTIONS"):
        subprocess.run(["shellcheck", str(folder / "slurm.sbatch")], check=True)
    assert re.findall(r"--run-dir|--auto-resume", batch) == ["--run-dir", "--auto-resume"]
    given = parse(words)
    assert (given.auto_resume, given.tp, given.run_dir) == (True, 2, Path("/runs/first"))
    assert given.grace_s < 30 < pod["terminationGracePeriodSeconds"]  # torchrun waits 30 s
