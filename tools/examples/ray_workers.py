"""Ray Train with the log, the detector of slow ranks, and checkpoints: two workers, one machine.

python tools/examples/ray_workers.py runs/ray --slow-rank 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from mcore.observe import RunLog, StragglerDetector
from mcore.parallel.checkpoint import CheckpointManager

BATCH = 16  # of each worker
REPORT_EVERY = 10
COMPARE_EVERY = 2  # steps: a verdict needs 10 reports of two ranks


def train_worker(settings: dict[str, Any]) -> None:
    """Train on one worker. Ray has initialized ``torch.distributed``."""
    folder, steps = settings["folder"], settings["steps"]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    detector = StragglerDetector()
    detector.configure(ranks, rank, enabled=True, controller=False)
    checkpoints = CheckpointManager(f"{folder}/checkpoints", keep=2, every=20)
    log = RunLog(folder, batch_size=BATCH, train_iters=steps, log_every=REPORT_EVERY)
    with log, checkpoints:
        found = checkpoints.load_latest(model, optimizer, log=log) or {"step": 0}
        for step in range(found["step"] + 1, steps + 1):
            draw = torch.Generator().manual_seed(step * ranks + rank)
            inputs = (torch.rand(BATCH, 1, generator=draw) * 6).to(device)
            with detector:
                loss = nn.functional.mse_loss(model(inputs), inputs.sin())
                if rank == settings["slow_rank"]:
                    time.sleep(0.02)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean_loss = loss.detach() / ranks
            dist.all_reduce(mean_loss)
            log.log_step({"loss": mean_loss}, lr=optimizer.param_groups[0]["lr"])
            checkpoints.save(model, optimizer, step=step, log=log)
            if step % COMPARE_EVERY == 0:
                detector.report(0.0, COMPARE_EVERY)
                report = detector.last_report
                slow = sorted({one.rank for one in report.stragglers}) if report else []
                ray.train.report({"step": step, "loss": mean_loss.item()})
                if rank == 0:
                    print("slow ranks:", slow or "none", flush=True)
    detector.close()


def main(words: list[str]) -> int:
    """Start Ray on this machine, or use the cluster in ``RAY_ADDRESS``."""
    parser = argparse.ArgumentParser(description="Ray Train")
    parser.add_argument("folder", help="run folder. A second start continues the run")
    parser.add_argument("--steps", type=int, default=60, help="last step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow-rank", type=int, help="slow this rank down")
    options = parser.parse_args(words)
    folder = os.path.abspath(options.folder)
    ray.init(num_cpus=options.workers, include_dashboard=False)
    TorchTrainer(
        train_worker,
        train_loop_config={**vars(options), "folder": folder},
        scaling_config=ScalingConfig(
            num_workers=options.workers, use_gpu=torch.cuda.is_available()
        ),
        run_config=RunConfig(name="ray", storage_path=folder),
    ).fit()
    ray.shutdown()
    print(f"log: {folder}/metrics.jsonl, checkpoints: {folder}/checkpoints")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
