"""Checks of the settings of a run, one by one and in combination."""

from __future__ import annotations

import dataclasses

from pretrain.settings import Limit, Settings, SlowRank
from pretrain.usage import UsageError


def check(settings: Settings, available: int | None) -> None:
    """Raise UsageError with the option to change if the settings cannot work."""
    _check_limits(settings)
    if available is not None and available != settings.world_size:
        raise UsageError(
            f"tp * cp * pp * dp = {settings.tp} * {settings.cp} * {settings.pp} * {settings.dp} = "
            f"{settings.world_size}, but there are {available} ranks: change the layout or the "
            "number of ranks"
        )
    _check_shape(settings)
    _check_batch(settings)
    _check_pipeline(settings)
    if settings.min_lr > settings.lr:
        raise UsageError(
            f"--min-lr {settings.min_lr} is above --lr {settings.lr}: the learning rate ends at "
            "--min-lr, so lower it too"
        )
    if settings.sequence_parallel:
        _check_sequence_parallel(settings)
    if settings.cuda_graph != "none":
        _check_graphs(settings)
    _check_experts(settings)
    if settings.value_head and settings.mtp:
        raise UsageError(
            "--mtp learns tokens, but --value-head has no output head over tokens: remove one of "
            "the two"
        )
    if settings.mtp and settings.packed:
        raise UsageError(
            "--mtp learns the token after the next, which with --packed may belong to another "
            "document: remove one of the two"
        )
    if settings.mtp and settings.pp > 1:
        raise UsageError(
            "--mtp needs the embedding on the rank of the last layer, and --pp separates them: "
            "remove one of the two"
        )
    if settings.value_head and settings.untied:
        raise UsageError(
            "--untied is for the output head over tokens, but --value-head replaces that head: "
            "remove one of the two"
        )
    if settings.tokenizer and not settings.data:
        raise UsageError("--tokenizer is for your text: pass the text with --data")
    if settings.tokenizer and settings.value_head:
        raise UsageError(
            "--value-head learns the column of each byte, but with --tokenizer there are no "
            "bytes: remove one of the two"
        )
    if not settings.straggler and settings.straggler_port:
        raise UsageError(f"--straggler-port {settings.straggler_port} needs --straggler")
    SlowRank.parse(settings.slow_rank, settings.world_size)


def _check_limits(settings: Settings) -> None:
    for field in dataclasses.fields(settings):
        value, limit = getattr(settings, field.name), field.metadata["limit"]
        if choices := field.metadata["choices"]:  # a file may have any text
            limit = Limit(f"one of {', '.join(choices)}", choices.__contains__)
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


def _check_pipeline(settings: Settings) -> None:
    stages, batches = settings.pp, settings.num_microbatches
    if stages == 1:
        for flag, is_given, off in (
            (f"--vpp {settings.vpp}", settings.vpp > 1, "--vpp 1"),
            (
                "--defer-embedding-wgrad",
                settings.defer_embedding_wgrad,
                "--no-defer-embedding-wgrad",
            ),
        ):
            if is_given:
                raise UsageError(f"{flag} is for a pipeline: set --pp above 1, or {off}")
        return
    _check_divisible("--num-layers", settings.num_layers, "--pp * --vpp", stages * settings.vpp)
    layout = (
        f"--global-batch-size {settings.global_batch_size} over --dp {settings.dp} and "
        f"--micro-batch-size {settings.rows_per_forward} makes {batches} micro-batches"
    )
    if batches < stages:
        raise UsageError(
            f"{layout}, but --pp {stages} needs {stages} or more: lower --micro-batch-size or "
            "raise --global-batch-size"
        )
    if settings.vpp > 1 and batches % stages:
        raise UsageError(
            f"{layout}, but --vpp needs a multiple of --pp {stages}: make their number "
            f"divisible by {stages}"
        )
    if settings.cuda_graph != "none":
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} has one set of activations per layer, but --pp "
            "needs one per micro-batch in flight: remove one of the two"
        )
    if settings.defer_embedding_wgrad:
        _check_deferral(settings)


def _check_deferral(settings: Settings) -> None:
    for flag, is_given, why in (
        ("--fsdp", settings.fsdp, "which reduces gradients as soon as they exist"),
        ("--value-head", settings.value_head, "which has no head over bytes"),
    ):
        if is_given:
            raise UsageError(
                f"--defer-embedding-wgrad cannot work with {flag}, {why}: remove one of the two"
            )


def _check_sequence_parallel(settings: Settings) -> None:
    if settings.tp == 1:
        raise UsageError(
            "--sequence-parallel splits the sequence over the tp ranks: it needs --tp above 1"
        )
    if settings.seq_length // settings.cp % settings.tp:
        raise UsageError(
            f"--seq-length {settings.seq_length} is not divisible by --cp {settings.cp} times "
            f"--tp {settings.tp}, which --sequence-parallel needs"
        )


def _check_experts(settings: Settings) -> None:
    if not settings.experts:
        if settings.ep > 1 or settings.freeze_router:
            flag = "--freeze-router" if settings.ep == 1 else f"--ep {settings.ep}"
            raise UsageError(f"{flag} is for a model with experts: give --experts too")
        return
    _check_divisible("--experts", settings.experts, "--ep", settings.ep)
    if settings.topk > settings.experts:
        raise UsageError(f"--topk {settings.topk} is larger than --experts {settings.experts}")
    ranks = settings.cp * settings.dp
    if ranks % settings.ep:
        raise UsageError(
            f"--ep {settings.ep} does not divide cp * dp = {settings.cp} * {settings.dp} = "
            f"{ranks}, the ranks that share the experts (tp splits each expert): change one of them"
        )
    if ranks // settings.ep % settings.hsdp_outer:
        raise UsageError(
            f"--hsdp-outer {settings.hsdp_outer} does not divide cp * dp / ep = "
            f"{ranks // settings.ep}, the number of replicas of an expert"
        )
    if settings.cuda_graph != "none":
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} needs equal shapes in every step, but --experts "
            "change them: remove one of the two"
        )


def _check_graphs(settings: Settings) -> None:
    if settings.fsdp:
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} cannot work with --fsdp, which gathers a layer's "
            "weights in hooks, which a graph does not replay: remove one of the two"
        )
    if settings.recompute:
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} keeps the activations of its layers, but "
            "--recompute discards them: remove one of the two"
        )


def _check_divisible(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}")
