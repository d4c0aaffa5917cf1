"""The ``Trainer`` of transformers with the log and the detector of slow ranks: one callback.

python tools/examples/hf_trainer.py runs/hf
torchrun --nproc-per-node 2 tools/examples/hf_trainer.py runs/hf
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from mcore.observe.adapters.transformers import ObserveCallback

VOCABULARY, LENGTH = 64, 16


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of consecutive numbers with a random start."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def train(folder: str, steps: int) -> Trainer:
    """Train to a step, from the trainer's newest checkpoint if there is one."""
    set_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends))
    output = f"{folder}/checkpoints"
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_steps=10,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    callback = ObserveCallback(folder, straggler={"report_every_s": 1.0})
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[callback])
    last = get_last_checkpoint(output) if os.path.isdir(output) else None
    trainer.train(resume_from_checkpoint=last)
    callback.close()
    print(f"log: {folder}/metrics.jsonl, checkpoints: {output}")
    return trainer


def main(words: list[str]) -> int:
    """Train on the ranks of torchrun, or on one rank."""
    parser = argparse.ArgumentParser(description="The Trainer of transformers")
    parser.add_argument("folder", help="run folder. A second start continues the run")
    parser.add_argument("--steps", type=int, default=40, help="last step")
    train(**vars(parser.parse_args(words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
