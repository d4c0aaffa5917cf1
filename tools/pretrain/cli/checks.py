"""Checks of the settings of a run, one by one and in combination."""

from __future__ import annotations

import dataclasses

from pretrain.settings import Limit, Settings, SlowRank
from pretrain.usage import UsageError


def check(settings: Settings, available: int | None) -> None:
    """Raise UsageError with the option to change if the settings cannot work."""
    _check_limits(settings)
    one = settings
    _refuse(
        available is not None and available != one.world_size,
        f"tp * cp * pp * dp = {one.tp} * {one.cp} * {one.pp} * {one.dp} = {one.world_size}, but "
        f"there are {available} ranks",
        "change the layout or the number of ranks",
    )
    _check_shape(one)
    _check_batch(one)
    _check_pipeline(one)
    _refuse(
        one.min_lr > one.lr, f"--min-lr {one.min_lr} is above --lr {one.lr}",
        "the learning rate ends at --min-lr, so lower it too",
    )  # fmt: skip
    _check_sequence_parallel(one)
    _check_experts(one)
    _check_graphs(one)
    _refuse(
        one.value_head and one.mtp,
        "--mtp learns tokens, but --value-head has no output head over tokens",
    )
    _refuse(
        one.mtp and one.packed,
        "--mtp learns the token after the next, which with --packed may belong to another document",
    )
    _refuse(
        one.mtp and one.pp > 1,
        "--mtp needs the embedding on the rank of the last layer, and --pp separates them",
    )
    _refuse(
        one.value_head and one.untied,
        "--untied is for the output head over tokens, but --value-head replaces that head",
    )
    _refuse(
        one.tokenizer and not one.data, "--tokenizer is for your text", "pass the text with --data"
    )
    _refuse(
        one.tokenizer and one.value_head,
        "--value-head learns the column of each byte, but with --tokenizer there are no bytes",
    )
    if one.straggler_port and not one.straggler:
        raise UsageError(f"--straggler-port {one.straggler_port} needs --straggler")
    SlowRank.parse(one.slow_rank, one.world_size)


def _refuse(is_wrong: object, problem: str, remedy: str = "remove one of the two") -> None:
    if is_wrong:
        raise UsageError(f"{problem}: {remedy}")


def _check_limits(settings: Settings) -> None:
    for field in dataclasses.fields(settings):
        value, limit = getattr(settings, field.name), field.metadata["limit"]
        if choices := field.metadata["choices"]:  # a file may have any text
            limit = Limit(f"one of {', '.join(choices)}", choices.__contains__)
        if limit is not None and not limit.holds(value):
            flag = field.name.replace("_", "-")
            raise UsageError(f"--{flag} must be {limit.words}, got {value}")


def _check_shape(settings: Settings) -> None:
    hidden, heads, length = "--hidden-size", "--num-attention-heads", "--seq-length"
    num_heads = settings.num_attention_heads
    _check_divisible(heads, num_heads, "--tp", settings.tp)
    _check_divisible(hidden, settings.hidden_size, heads, num_heads)
    head_size = settings.hidden_size // num_heads
    if head_size % 2:
        raise UsageError(
            f"{hidden} / {heads} = {head_size} is odd, but rotary positions need an even head size"
        )
    if settings.cp > 1:
        _check_divisible(length, settings.seq_length, "2 * --cp", 2 * settings.cp)
    if settings.packed:
        multiple = settings.document_multiple
        _check_divisible(length, settings.seq_length, "--document-multiple", multiple)
        if settings.cp > 1:
            _check_divisible("--document-multiple", multiple, "2 * --cp", 2 * settings.cp)


def _check_batch(settings: Settings) -> None:
    batch = "--global-batch-size"
    _check_divisible(batch, settings.global_batch_size, "--dp", settings.dp)
    _check_divisible("--dp", settings.dp, "--hsdp-outer", settings.hsdp_outer)
    if settings.hsdp_outer > 1 and not settings.fsdp:
        raise UsageError(f"--hsdp-outer {settings.hsdp_outer} needs --fsdp")
    rows = settings.global_batch_size // settings.dp
    _check_divisible(f"{batch} / --dp", rows, "--micro-batch-size", settings.rows_per_forward)


def _check_pipeline(settings: Settings) -> None:
    stages, batches = settings.pp, settings.num_microbatches
    defers = settings.defer_embedding_wgrad
    if stages == 1:
        for flag, is_given, off in (
            (f"--vpp {settings.vpp}", settings.vpp > 1, "--vpp 1"),
            ("--defer-embedding-wgrad", defers, "--no-defer-embedding-wgrad"),
        ):
            _refuse(is_given, f"{flag} is for a pipeline", f"set --pp above 1, or {off}")
        return
    _check_divisible("--num-layers", settings.num_layers, "--pp * --vpp", stages * settings.vpp)
    layout = (
        f"--global-batch-size {settings.global_batch_size} over --dp {settings.dp} and "
        f"--micro-batch-size {settings.rows_per_forward} makes {batches} micro-batches"
    )
    _refuse(
        batches < stages, f"{layout}, but --pp {stages} needs {stages} or more",
        "lower --micro-batch-size or raise --global-batch-size",
    )  # fmt: skip
    _refuse(
        settings.vpp > 1 and batches % stages,
        f"{layout}, but --vpp needs a multiple of --pp {stages}",
        f"make their number divisible by {stages}",
    )
    _refuse(
        settings.cuda_graph != "none",
        f"--cuda-graph {settings.cuda_graph} has one set of activations per layer, but --pp "
        "needs one per micro-batch in flight",
    )
    for flag, is_given, why in (
        ("--fsdp", settings.fsdp, "which reduces gradients as soon as they exist"),
        ("--value-head", settings.value_head, "which has no head over bytes"),
    ):
        _refuse(defers and is_given, f"--defer-embedding-wgrad cannot work with {flag}, {why}")


def _check_sequence_parallel(settings: Settings) -> None:
    if not settings.sequence_parallel:
        return
    _refuse(
        settings.tp == 1, "--sequence-parallel splits the sequence over the tp ranks",
        "it needs --tp above 1",
    )  # fmt: skip
    if settings.seq_length // settings.cp % settings.tp:
        raise UsageError(
            f"--seq-length {settings.seq_length} is not divisible by --cp {settings.cp} times "
            f"--tp {settings.tp}, which --sequence-parallel needs"
        )


def _check_experts(settings: Settings) -> None:
    if not settings.experts:
        flag = "--freeze-router" if settings.ep == 1 else f"--ep {settings.ep}"
        is_given = settings.ep > 1 or settings.freeze_router
        _refuse(is_given, f"{flag} is for a model with experts", "give --experts too")
        return
    _check_divisible("--experts", settings.experts, "--ep", settings.ep)
    if settings.topk > settings.experts:
        raise UsageError(f"--topk {settings.topk} is larger than --experts {settings.experts}")
    ranks = settings.cp * settings.dp
    _refuse(
        ranks % settings.ep,
        f"--ep {settings.ep} does not divide cp * dp = {settings.cp} * {settings.dp} = {ranks}, "
        "the ranks that share the experts (tp splits each expert)",
        "change one of them",
    )
    if ranks // settings.ep % settings.hsdp_outer:
        raise UsageError(
            f"--hsdp-outer {settings.hsdp_outer} does not divide cp * dp / ep = "
            f"{ranks // settings.ep}, the number of replicas of an expert"
        )


def _check_graphs(settings: Settings) -> None:
    flag = f"--cuda-graph {settings.cuda_graph}"
    for is_given, problem in (
        (settings.experts, "needs equal shapes in every step, but --experts change them"),
        (
            settings.fsdp,
            "cannot work with --fsdp, which gathers a layer's weights in hooks, which a graph "
            "does not replay",
        ),
        (settings.recompute, "keeps the activations of its layers, but --recompute discards them"),
    ):
        _refuse(settings.cuda_graph != "none" and is_given, f"{flag} {problem}")


def _check_divisible(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}")
