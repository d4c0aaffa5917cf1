"""torchtitan's trainer with the log, the detector of slow ranks, and the checkpoints.

torchrun --nproc-per-node 2 tools/examples/titan_trainer.py runs/titan --slow-rank 1
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import utils


class CpuDevice:
    """A stand-in for ``torch.cuda`` on machines without a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *args: None)

    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda *args: "CPU")
    get_device_properties = staticmethod(lambda *args: SimpleNamespace(total_memory=1))
    memory_stats = staticmethod(lambda *args: defaultdict(int))


if not torch.cuda.is_available():
    utils.device_type, utils.device_module = "cpu", CpuDevice()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from mcore.observe import StragglerDetector  # noqa: E402
from mcore.observe.adapters.torchtitan import ObserveLogger  # noqa: E402
from mcore.parallel.checkpoint import CheckpointManager  # noqa: E402

LENGTH, BATCH, VOCABULARY = 32, 4, 2048


class NoTokenizer(BaseTokenizer):
    Config: Any = dataclass(kw_only=True, slots=True)(type("Config", (BaseTokenizer.Config,), {}))

    __init__ = lambda self, *args, **others: None  # noqa: E731
    encode = decode = get_vocab_size = lambda self, *args: []  # type: ignore[var-annotated]


class Counting(BaseDataLoader):
    """Rows of consecutive numbers with a random start."""

    Config: Any = dataclass(kw_only=True, slots=True)(type("Config", (BaseDataLoader.Config,), {}))

    def __init__(self, config: Any, *, dp_rank: int, **others: Any) -> None:
        self.rank, self.read = dp_rank, 0

    def __iter__(self) -> Any:
        while True:
            draw = torch.Generator().manual_seed(1000 * self.rank + self.read)
            self.read += 1
            tokens = torch.randint(64, (BATCH, 1), generator=draw) + torch.arange(LENGTH + 1)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def build_trainer(folder: str, steps: int) -> Trainer:
    """Return torchtitan's trainer with its smallest Llama, replicated on every rank."""
    config = llama3_debugmodel()
    config.dump_folder, config.optimizer.implementation = f"{folder}/torchtitan", "for-loop"
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Counting.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    config.activation_checkpoint, config.metrics.log_freq = None, 5
    config.training = replace(config.training, steps=steps, seq_len=LENGTH, local_batch_size=BATCH)
    layout: dict[str, Any] = {"data_parallel_replicate_degree": int(os.environ["WORLD_SIZE"])}
    layout |= {"data_parallel_shard_degree": 1, "spmd_backend": "partial_dtensor"}
    config.parallelism = replace(config.parallelism, **layout)
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer(config)


def train(folder: str, steps: int, slow_rank: int | None) -> None:
    """Train to a step, from the newest checkpoint in the folder if there is one."""
    model = (trainer := build_trainer(folder, steps)).model_parts[0]
    trainer.metrics_processor.logger = ObserveLogger(folder, model=model, seq_length=LENGTH)
    if dist.get_rank() == slow_rank:
        model.tok_embeddings.register_forward_hook(lambda *args: time.sleep(0.05))
    checkpoints = CheckpointManager(f"{folder}/checkpoints", keep=2, every=10)
    optimizers, state = list(trainer.optimizers), {"run": trainer, "rates": trainer.lr_schedulers}
    checkpoints.load_latest(model, optimizers, **state)
    trainer.dataloader.read = trainer.step
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.step < steps:  # trainer.train() of 0.3 needs a torch newer than 2.13
        trainer.step += 1
        trainer.train_step(batches)
        checkpoints.save(model, optimizers, step=trainer.step, **state)
    report = StragglerDetector().last_report
    trainer.close()
    trainer.metrics_processor.close()
    if dist.get_rank() == 0:
        slow = sorted({one.rank for one in report.stragglers}) if report else []
        print(f"slow ranks: {slow or 'none'}, log: {folder}/metrics.jsonl, {folder}/checkpoints")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="torchtitan's trainer")
    parser.add_argument("folder", help="run folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slow-rank", type=int, help="slow this rank down")
    train(**vars(parser.parse_args()))
