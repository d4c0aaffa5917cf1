"""A driver of RL on a CPU node: it gives prompts to tensor-parallel workers and collects rewards.

It needs neither a GPU nor Megatron-LM: of mcore it imports the versions and the process groups.

python tools/examples/rl_driver.py --workers 4 --tp 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mcore.parallel import ProcessGroups
from mcore.versioning import get_torch_version, is_te_min_version

HOST, LIMIT = "127.0.0.1", timedelta(seconds=60)


def score(prompts: list[str], pgs: ProcessGroups) -> list[int]:
    """Return the sum of each prompt's characters, of which each tensor-parallel rank adds a part.

    Without groups, as in the driver, this process adds all of them.
    """
    parts = [prompt.encode()[pgs.rank("tp") :: pgs.size("tp")] for prompt in prompts]
    rewards = torch.tensor([sum(part) for part in parts])
    if pgs.tp is not None:
        dist.all_reduce(rewards, group=pgs.tp)
    return [int(reward) for reward in rewards]


def work(port: int, rank: int, workers: int, tp: int) -> None:
    """Score the prompts of this worker's data-parallel rank and send the rewards to the driver."""
    store = TCPStore(HOST, port, timeout=LIMIT)
    group_store = PrefixStore("workers", store)
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=workers, timeout=LIMIT)
    pgs = ProcessGroups.from_sizes(tp=tp, groups=("tp", "dp"), device_type="cpu")
    prompts = json.loads(store.get("prompts"))
    rewards = score(prompts[pgs.rank("dp") :: pgs.size("dp")], pgs)
    if pgs.rank("tp") == 0:
        store.set(f"rewards of {pgs.rank('dp')}", json.dumps(rewards))
    pgs.destroy()
    dist.destroy_process_group()


def drive(prompts: list[str], workers: int, tp: int) -> list[int]:
    """Start the workers and return the reward of each prompt."""
    # Without a socket of ours, the store would listen on all addresses.
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        HOST, port, None, True, LIMIT, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    store.set("prompts", json.dumps(prompts))
    # Forked from this process they would share torch's threads. A server imports torch for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.device_mesh"])
    processes = [
        context.Process(target=work, args=(store.port, rank, workers, tp), daemon=True)
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
        raise RuntimeError(f"workers {failed} failed: see their messages above")
    rewards = [0] * len(prompts)
    for replica in range(replicas := workers // tp):
        rewards[replica::replicas] = json.loads(store.get(f"rewards of {replica}"))
    return rewards


def main(words: list[str]) -> int:
    """Give some prompts to the workers. The driver repeats the first to check the rewards."""
    parser = argparse.ArgumentParser(description="a driver of RL with workers on this machine")
    parser.add_argument("prompts", nargs="*", default=["one", "two", "three", "four", "five"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="workers that share a prompt")
    options = parser.parse_args(words)
    if options.workers % options.tp:
        parser.error(f"--workers {options.workers} is not divisible by --tp {options.tp}")
    precision = "fp8" if is_te_min_version("1.5.0") else "fp32"
    pgs = ProcessGroups.from_sizes()
    print(f"driver: torch {get_torch_version()}, {precision}, {pgs}")
    rewards = drive(options.prompts, options.workers, options.tp)
    for prompt, reward in zip(options.prompts, rewards, strict=True):
        print(f"{prompt}: {reward}")
    return 0 if rewards[:1] == score(options.prompts[:1], pgs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
