"""A GPT of megatron-core with our log, random streams and checkpoints.

torchrun --nproc-per-node 2 tools/examples/megatron_core.py runs/gpt
torchrun --nproc-per-node 1 tools/examples/megatron_core.py runs/gpt --steps 60

The ranks are tensor-parallel. A checkpoint resumes on another number of ranks. Without a GPU,
``use_cpu`` replaces the two parts of megatron-core that need one.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

import mcore.parallel
from mcore.modules import from_megatron_sharded_state_dict
from mcore.observe import RunLog
from mcore.parallel import ProcessGroups, use_process_groups
from mcore.parallel.checkpoint import (
    latest_checkpoint,
    load_sharded_state_dict,
    save_sharded_state_dict,
)

VOCABULARY, LENGTH, BATCH = 64, 16, 8


def use_cpu() -> None:
    """Replace megatron-core's device and random streams, which need a GPU."""
    stand_in: Any = torch.cuda
    stand_in.current_device = lambda: "cpu"
    tensor_parallel.get_cuda_rng_tracker = mcore.parallel.get_cuda_rng_tracker


def build_model(ranks: int) -> GPTModel:
    """Return a small GPT whose layers are split over all ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=ranks,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )


def loss_of(model: GPTModel, step: int) -> torch.Tensor:
    """Return the mean loss on rows of consecutive numbers."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    hidden = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    return model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:]).mean()


def train(folder: str, steps: int, ranks: int) -> None:
    """Train to a step, from the newest checkpoint in the folder if there is one."""
    torch.manual_seed(0)
    mcore.parallel.model_parallel_cuda_manual_seed(0)
    model = build_model(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with (log := RunLog(folder, batch_size=BATCH, train_iters=steps, seq_length=LENGTH)):

        def state(step: int) -> dict[str, Any]:
            described = from_megatron_sharded_state_dict(model.sharded_state_dict())
            return {"model": described, "log": log.state_dict(), "step": step}

        found, first = latest_checkpoint(f"{folder}/checkpoints"), 0
        if found:
            loaded = load_sharded_state_dict(state(0), found)
            log.load_state_dict(loaded["log"])
            first = loaded["step"]
        for step in range(first + 1, steps + 1):
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.log_step({"lm loss": loss}, lr=0.5)
        if steps > first:
            save_sharded_state_dict(state(steps), f"{folder}/checkpoints/step_{steps}")


def main(words: list[str]) -> int:
    """Train on the ranks of torchrun."""
    parser = argparse.ArgumentParser(description="A GPT of megatron-core")
    parser.add_argument("folder", help="run folder. A second start continues the run")
    parser.add_argument("--steps", type=int, default=40, help="last step")
    options = parser.parse_args(words)
    dist.init_process_group()
    ranks = dist.get_world_size()
    if not torch.cuda.is_available():
        use_cpu()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    with use_process_groups(ProcessGroups.from_sizes(tp=ranks)):
        train(options.folder, options.steps, ranks)
    if dist.get_rank() == 0:
        print(f"log: {options.folder}/metrics.jsonl, checkpoints: {options.folder}/checkpoints")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
