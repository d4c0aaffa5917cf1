"""A rank of a job with Megatron's GPT: ``pretrain_gpt.py --tp 2 --save FOLDER``. 20 steps.

Nothing in it is mcore's. Its environment has RANK and WORLD_SIZE. With ``--ep 2``, layers have
experts. The folder gets the checkpoint, and the losses and weights of each rank.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import megatron_on_cpu  # noqa: F401 - before megatron-core
import torch
import torch.distributed as dist
from corpus import LENGTH, ROWS, VOCABULARY, Corpus
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import (
    divide,
    get_model_config,
    init_method_normal,
    log_single_rank,
    unwrap_model,
)

STEPS = 20
_log = logging.getLogger("pretrain")


def main(tp: int, pp: int, ep: int, folder: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    folder.mkdir(exist_ok=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder.absolute()}/rendezvous", rank=rank, world_size=ranks
    )
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123 + parallel_state.get_pipeline_model_parallel_rank())
    log_single_rank(_log, logging.INFO, f"divide is from {divide.__module__}", rank=ranks - 1)
    model, optimizer = build(tp, pp, ep)
    start = time.perf_counter()
    losses = train(model, optimizer)
    log_single_rank(_log, logging.INFO, f"seconds: {time.perf_counter() - start}", rank=ranks - 1)
    state = unwrap_model([model])[0].sharded_state_dict()
    whole = {"model": state, "optimizer": optimizer.sharded_state_dict({"model": state})}
    (folder / "checkpoint").mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(whole, str(folder / "checkpoint"))
    weights = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    torch.save((losses, weights), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def build(tp: int, pp: int, ep: int) -> tuple[Any, Any]:
    """Megatron's model in Megatron's wrapper, and Megatron's optimizer."""
    experts: dict[str, Any] = {"num_moe_experts": 2 * ep} if ep > 1 else {}
    if experts:
        moe_utils.te_general_gemm = None  # 0.16.1 asks for it although it is not defined without TE
        experts |= {"moe_token_dispatcher_type": "allgather", "add_bias_linear": False}
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, kv_channels=divide(32, 4),
        init_method=init_method_normal(0.02), use_cpu_initialization=True,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, **experts,
        pipeline_dtype=torch.float32, attention_dropout=0.0, hidden_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(config.num_moe_experts)
    model = GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-2, clip_grad=1.0), [wrapped]
    )
    get_model_config(wrapped).grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def train(model: Any, optimizer: Any) -> list[list[float]]:
    """The losses of the micro-batches and the gradient norm of each step."""
    corpus, run_passes, steps = Corpus(), get_forward_backward_func(), []
    for step in range(1, STEPS + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = run_passes(
            forward_step_func=corpus.forward, data_iterator=iter([]), model=[model],
            num_microbatches=2, seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
        )  # fmt: skip
        _, norm, _ = optimizer.step()
        losses = [float(each["loss"]) for each in found]
        line = f"iteration {step} | lm loss: {sum(losses) / 2 if losses else None} | norm: {norm} |"
        log_single_rank(_log, logging.INFO, line, rank=dist.get_world_size() - 1)
        steps.append([*losses, float(norm)])
    return steps


if __name__ == "__main__":  # a save of Megatron starts processes that import this file
    parser = argparse.ArgumentParser()
    for size in ("tp", "pp", "ep"):
        parser.add_argument(f"--{size}", type=int, default=1)
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    main(options.tp, options.pp, options.ep, options.save)
