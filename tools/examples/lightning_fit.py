"""Lightning's ``Trainer`` with the log and the detector of slow ranks: a callback and its logger.

python tools/examples/lightning_fit.py runs/lightning
python tools/examples/lightning_fit.py runs/lightning --steps 60 --devices 2
"""

from __future__ import annotations

import argparse
import os
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mcore.observe.adapters.lightning import ObserveCallback


class Sine(pl.LightningModule):
    """Learns the sine. Its metrics are logged to the same run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        (inputs,) = batch
        errors = self.layers(inputs) - inputs.sin()
        self.log("largest error", errors.abs().max())
        return errors.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(folder: str, steps: int, devices: int) -> pl.Trainer:
    """Train to a step, from the newest checkpoint in the folder if there is one."""
    pl.seed_everything(0, verbose=False)
    callback = ObserveCallback(folder, log_every=10, straggler={"report_every_s": 1.0})
    saving = ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=20, save_last=True)
    trainer = pl.Trainer(
        max_steps=steps,
        devices=devices,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        callbacks=[callback, saving],
        logger=callback.logger,
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.rand(2000, 1) * 6), batch_size=32, shuffle=True)
    last = f"{folder}/checkpoints/last.ckpt"
    trainer.fit(Sine(), data, ckpt_path=last if os.path.exists(last) else None)
    callback.close()
    print(f"log: {folder}/metrics.jsonl, checkpoints: {folder}/checkpoints")
    return trainer


def main(words: list[str]) -> int:
    """Train on one rank or several."""
    parser = argparse.ArgumentParser(description="Lightning's Trainer")
    parser.add_argument("folder", help="run folder. A second start continues the run")
    parser.add_argument("--steps", type=int, default=60, help="last step")
    parser.add_argument("--devices", type=int, default=1)
    train(**vars(parser.parse_args(words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
