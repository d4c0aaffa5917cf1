"""A plain PyTorch loop: the log, slow ranks, and checkpoints that resume on any number of ranks.

python tools/examples/plain_loop.py runs/plain
torchrun --nproc-per-node 2 tools/examples/plain_loop.py runs/plain --steps 80 --slow-rank 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mcore.observe import RunLog, StragglerDetector
from mcore.parallel.checkpoint import CheckpointManager

BATCH = 32  # of all ranks together
REPORT_EVERY = 10
COMPARE_EVERY = 2  # steps: a verdict needs 10 reports of two ranks


def batch_of(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's inputs ``[b, 1]`` and of their sines."""
    inputs = torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(step)) * 6
    mine = inputs.chunk(ranks)[rank]
    return mine, mine.sin()


def train(folder: str, steps: int, slow_rank: int | None, rank: int, ranks: int) -> None:
    """Train to a step, from the newest checkpoint in the folder if there is one."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    detector = StragglerDetector()
    detector.configure(ranks, rank, enabled=True, controller=False)
    checkpoints = CheckpointManager(f"{folder}/checkpoints", keep=2, every=20, async_=True)
    log = RunLog(folder, batch_size=BATCH // ranks, train_iters=steps, log_every=REPORT_EVERY)
    with log, checkpoints:
        found = checkpoints.load_latest(model, optimizer, log=log) or {"step": 0}
        for step in range(found["step"] + 1, steps + 1):
            with log.data(), detector(bdata=True):
                inputs, wanted = batch_of(step, rank, ranks)
            with (
                detector
            ):  # only the forward pass: in a collective all ranks wait for the slow rank
                loss = nn.functional.mse_loss(model(inputs), wanted)
                if rank == slow_rank:
                    time.sleep(0.02)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.log_step({"loss": loss}, lr=optimizer.param_groups[0]["lr"])
            checkpoints.save(model, optimizer, step=step, log=log)
            if step % COMPARE_EVERY == 0:
                detector.report(0.0, COMPARE_EVERY)  # a warning if a rank is slow
    report = detector.last_report
    detector.close()
    if rank == 0:
        slow = report.stragglers if report else ()
        print("slow ranks:", ", ".join(sorted({str(one.rank) for one in slow})) or "none")
        print(f"log: {folder}/metrics.jsonl, checkpoints: {folder}/checkpoints")


def main(words: list[str]) -> int:
    """Train on the ranks of torchrun, or on one rank."""
    parser = argparse.ArgumentParser(description="A plain PyTorch loop")
    parser.add_argument("folder", help="run folder. A second start continues the run")
    parser.add_argument("--steps", type=int, default=80, help="last step")
    parser.add_argument("--slow-rank", type=int, help="slow this rank down")
    options = parser.parse_args(words)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group()
    train(options.folder, options.steps, options.slow_rank, int(os.environ.get("RANK", 0)), ranks)
    if ranks > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
