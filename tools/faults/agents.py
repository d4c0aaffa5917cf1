"""Nodes of a cluster on this machine: a torchrun agent each, started again when it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from faults.deck import RANKS
from faults.inside import COUNT
from faults.starting import MAX_RESTARTS, Ended, end, environment

_LOOK_EVERY_S = 0.1
# cluster/kubernetes.yaml has these too. Without the second, an agent that is left keeps the address
# of the ranks' store from the round before, a new one waits for it, and both end after 60 s.
RENDEZVOUS = "is_host=0"
NODES_CHANGE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agents(words: Sequence[str], folder: Path, start: int, limit_s: float) -> Ended:
    """Run the job on two nodes of one rank until both end by themselves.

    A node that is killed whole is started again, as a cluster's own scheduler does.
    """
    store = subprocess.Popen(
        [sys.executable, "-m", "pretrain.cli.store", "127.0.0.1", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with (folder / "said").open("w+") as said:
        try:
            if store.stdout is None:
                raise RuntimeError("the store has no output")
            command = _command(words, int(store.stdout.readline()))
            ended = _kept_up(command, folder, start, limit_s, said)
        finally:
            store.kill()
            store.wait()
        said.seek(0)
        ended.said = said.read()
    return ended


def _command(words: Sequence[str], port: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(RANKS), "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "faults",
        "--rdzv-conf", RENDEZVOUS,
        "--max-restarts", str(MAX_RESTARTS), "-m", "faults.inside", *words,
    ]  # fmt: skip


def _kept_up(
    command: Sequence[str], folder: Path, start: int, limit_s: float, said: IO[str]
) -> Ended:
    variables = environment(folder, start, {COUNT: "1", **NODES_CHANGE})

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=folder, env=variables,
            stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    ended, deadline = Ended(), time.time() + limit_s
    nodes = {number: begin() for number in range(RANKS)}
    while len(ended.codes) < RANKS:
        ended.look_for_ranks(folder)
        for number, node in nodes.items():
            code = node.poll()
            if code is None or number in ended.codes:
                continue
            if code < 0 and not ended.killed:
                nodes[number] = begin()
            else:
                ended.codes[number], ended.at[number] = code, time.time()
        if time.time() > deadline and not ended.killed:
            ended.killed = set(nodes) - set(ended.codes)
            for number in ended.killed:
                end(nodes[number])
        time.sleep(_LOOK_EVERY_S)
    ended.wait_for_ranks(folder)
    return ended
