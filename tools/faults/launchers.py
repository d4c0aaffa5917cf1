"""Starts of a job by real launchers: torchrun on one or two nodes, and the job's own command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from faults.deck import RANKS
from faults.inside import COUNT, UNDER_HATCH
from faults.starting import KILLED_AFTER_S, LOOK_EVERY_S, MAX_RESTARTS, Ended, environment

# cluster/kubernetes.yaml has these too. Without the second, a surviving agent keeps the address of
# the ranks' store from the previous round, a new agent waits for it, and both end after 60 s.
RENDEZVOUS = "is_host=0"
NODES_CHANGE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


_REPOSITORY = Path(__file__).parents[2]  # in which hatch starts every command
_HATCH = ("hatch", "run", f"{os.environ.get('HATCH_ENV_ACTIVE', 'dev')}:python")
_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable)
_PROGRAMS = {"command": (sys.executable,), "hatch": _HATCH, "container": _CONTAINER}


def own_command(
    words: Sequence[str], folder: Path, start: int, limit_s: float, launcher: str
) -> Ended:
    """Run the same as ``hatch run pretrain``, which has its own launcher: alone, by hatch, or as
    process 1.
    """
    command = [*_PROGRAMS[launcher], "-m", "faults.inside", *words]
    variables = {UNDER_HATCH: "1"} if launcher == "hatch" else {}
    return _run(command, folder, start, limit_s, variables)


def torchrun(words: Sequence[str], folder: Path, start: int, limit_s: float) -> Ended:
    """Run the job under the real torchrun, which restarts it up to three times."""
    command = _build_torchrun_command(words, 0, "--nnodes", "1", "--nproc-per-node", str(RANKS))
    return _run(command, folder, start, limit_s, {COUNT: "1"})


def agents(words: Sequence[str], folder: Path, start: int, limit_s: float) -> Ended:
    """Run the job on two nodes of one rank until both end.

    A killed node is started again, as a cluster's scheduler does.
    """
    with _start_store() as port:
        options = ("--nnodes", str(RANKS), "--nproc-per-node", "1", "--rdzv-conf", RENDEZVOUS)
        command = _build_torchrun_command(words, port, *options, "--rdzv-id", "faults")
        return _run(command, folder, start, limit_s, {COUNT: "1", **NODES_CHANGE}, nodes=RANKS)


def _build_torchrun_command(words: Sequence[str], port: int, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", *options,
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--max-restarts", str(MAX_RESTARTS), "-m", "faults.inside", *words,
    ]  # fmt: skip


@contextlib.contextmanager
def _start_store() -> Iterator[int]:
    """A store outside both nodes, at the yielded port."""
    store = subprocess.Popen(
        [sys.executable, "-m", "pretrain.cli.store", "127.0.0.1", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if store.stdout is None:
            raise RuntimeError("the store has no output")
        yield int(store.stdout.readline())
    finally:
        store.kill()
        store.wait()


def _run(
    command: Sequence[str], folder: Path, start: int, limit_s: float, variables: Mapping[str, str],
    *, nodes: int = 1,
) -> Ended:  # fmt: skip
    """Run a launcher on each node until all have ended. Of several nodes a killed one restarts."""
    with (folder / "output").open("w+") as output:

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, cwd=_REPOSITORY, env=environment(folder, start, variables),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        ended, deadline = Ended(), time.time() + limit_s
        running = {node: begin() for node in range(nodes)}
        while running:
            ended.look_for_ranks(folder)
            if time.time() > deadline:
                ended.killed = set(running)
                for process in running.values():
                    process.send_signal(signal.SIGTERM)  # a launcher ends its ranks
                    process.wait(2 * KILLED_AFTER_S)
            for node, process in list(running.items()):
                code = process.poll()
                if code is not None and code < 0 and nodes > 1 and not ended.killed:
                    running[node] = begin()
                elif code is not None:
                    ended.codes[node], ended.at[node] = code, time.time()
                    del running[node]
            time.sleep(LOOK_EVERY_S)
        ended.wait_for_ranks(folder)
        output.seek(0)
        ended.output = output.read()
    return ended
