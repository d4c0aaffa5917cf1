"""Checks of the settings of a run, each by itself and together."""

from __future__ import annotations

import dataclasses

from pretrain.settings import Settings, SlowRank
from pretrain.usage import UsageError


def check(settings: Settings, available: int | None) -> None:
    """Raise UsageError with what to change where the settings cannot work."""
    _check_limits(settings)
    if available is not None and available != settings.world_size:
        raise UsageError(
            f"tp * cp * dp = {settings.tp} * {settings.cp} * {settings.dp} = "
            f"{settings.world_size}, but there are {available} ranks: change the layout or the "
            "number of ranks"
        )
    _check_shape(settings)
    _check_batch(settings)
    if settings.min_lr > settings.lr:
        raise UsageError(
            f"--min-lr {settings.min_lr} is above --lr {settings.lr}: the learning rate ends at "
            "--min-lr, so lower it too"
        )
    if settings.sequence_parallel:
        _check_sequence_parallel(settings)
    if settings.cuda_graph != "none":
        _check_graphs(settings)
    if settings.value_head and settings.untied:
        raise UsageError(
            "--untied gives the head over bytes a weight of its own, but with --value-head there "
            "is no such head: leave one of them out"
        )
    if settings.tokenizer and not settings.data:
        raise UsageError("--tokenizer is for a text of your own: name it with --data")
    if settings.tokenizer and settings.value_head:
        raise UsageError(
            "--value-head learns the column of each byte, but --tokenizer leaves no bytes: leave "
            "one of them out"
        )
    if not settings.straggler and settings.straggler_port:
        raise UsageError(f"--straggler-port {settings.straggler_port} needs --straggler")
    SlowRank.parse(settings.slow_rank, settings.world_size)


def _check_limits(settings: Settings) -> None:
    for field in dataclasses.fields(settings):
        value, limit = getattr(settings, field.name), field.metadata["limit"]
        if limit is not None and not limit.holds(value):
            flag = field.name.replace("_", "-")
            raise UsageError(f"--{flag} must be {limit.words}, got {value}")


def _check_shape(settings: Settings) -> None:
    _check_divisible("--num-attention-heads", settings.num_attention_heads, "--tp", settings.tp)
    _check_divisible(
        "--hidden-size", settings.hidden_size, "--num-attention-heads", settings.num_attention_heads
    )
    head_size = settings.hidden_size // settings.num_attention_heads
    if head_size % 2:
        raise UsageError(
            f"--hidden-size / --num-attention-heads = {head_size} is odd, but rotary positions "
            "need an even head size"
        )
    if settings.cp > 1:
        _check_divisible("--seq-length", settings.seq_length, "2 * --cp", 2 * settings.cp)
    if settings.packed:
        multiple = settings.document_multiple
        _check_divisible("--seq-length", settings.seq_length, "--document-multiple", multiple)
        if settings.cp > 1:
            _check_divisible("--document-multiple", multiple, "2 * --cp", 2 * settings.cp)


def _check_batch(settings: Settings) -> None:
    _check_divisible("--global-batch-size", settings.global_batch_size, "--dp", settings.dp)
    _check_divisible("--dp", settings.dp, "--hsdp-outer", settings.hsdp_outer)
    if settings.hsdp_outer > 1 and not settings.fsdp:
        raise UsageError(f"--hsdp-outer {settings.hsdp_outer} needs --fsdp")
    _check_divisible(
        "--global-batch-size / --dp",
        settings.global_batch_size // settings.dp,
        "--micro-batch-size",
        settings.rows_per_forward,
    )


def _check_sequence_parallel(settings: Settings) -> None:
    if settings.tp == 1:
        raise UsageError(
            "--sequence-parallel cuts the sequence over the tp ranks: it needs --tp above 1"
        )
    if settings.seq_length // settings.cp % settings.tp:
        raise UsageError(
            f"--seq-length {settings.seq_length} is not divisible by --cp {settings.cp} times "
            f"--tp {settings.tp}, which --sequence-parallel needs"
        )


def _check_graphs(settings: Settings) -> None:
    if settings.fsdp:
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} cannot work with --fsdp, which gathers a layer's "
            "weights in hooks that a graph leaves out: leave one of them out"
        )
    if settings.recompute:
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} keeps the activations of its layers, which "
            "--recompute does not: leave one of them out"
        )


def _check_divisible(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}")
