"""Checks of the settings of a run, one by one and in combination."""

from __future__ import annotations

import dataclasses

from pretrain.settings import Limit, Settings, SlowRank, format_flag
from pretrain.usage import UsageError

_DEFAULTS = Settings()
_FIELDS = dataclasses.fields(Settings)
_CONFLICTS = (
    ("mtp", "value_head", "which has no output head over tokens"),
    ("mtp", "packed", "in which the token after the next may belong to another document"),
    ("mtp", "pp", "which separates the embedding from the last layer"),
    ("untied", "value_head", "which replaces the output head over tokens"),
    ("value_head", "tokenizer", "with which there are no bytes to learn the columns of"),
    ("cuda_graph", "pp", "which needs a set of activations per micro-batch in flight"),
    ("cuda_graph", "experts", "which change the shapes in every step"),
    ("cuda_graph", "fsdp", "which gathers weights in hooks, and a graph does not replay hooks"),
    ("cuda_graph", "recompute", "which discards the activations that a graph keeps"),
    ("defer_embedding_wgrad", "fsdp", "which reduces gradients as soon as they exist"),
    ("defer_embedding_wgrad", "value_head", "which has no head over tokens"),
)


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
    _check_experts(one)
    for name, other, why in _CONFLICTS:
        if all(getattr(one, each) != getattr(_DEFAULTS, each) for each in (name, other)):
            _refuse(why, f"{format_flag(name)} cannot work with {format_flag(other)}, {why}")
    _refuse(one.eval_only and not one.init_from, "--eval-only needs weights", "pass --init-from")
    text = "pass the text with --data"
    _refuse(one.tokenizer and not one.data, "--tokenizer is for your text", text)
    port = f"--straggler-port {one.straggler_port} needs --straggler"
    _refuse(one.straggler_port and not one.straggler, port, "add it")
    SlowRank.parse(one.slow_rank, one.world_size)


def _refuse(is_wrong: object, problem: str, remedy: str = "remove one of the two") -> None:
    if is_wrong:
        raise UsageError(f"{problem}: {remedy}")


def _check_limits(settings: Settings) -> None:
    for field in _FIELDS:
        value, limit = getattr(settings, field.name), field.metadata["limit"]
        if choices := field.metadata["choices"]:  # a file may have any text
            limit = Limit(f"one of {', '.join(choices)}", choices.__contains__)
        if limit is not None and not limit.holds(value):
            raise UsageError(f"{format_flag(field.name)} must be {limit.words}, got {value}")


def _check_shape(settings: Settings) -> None:
    one = settings
    hidden, heads, length = "--hidden-size", "--num-attention-heads", "--seq-length"
    _check_divisible(heads, one.num_attention_heads, "--tp", one.tp)
    _check_divisible(hidden, one.hidden_size, heads, one.num_attention_heads)
    head_size = one.hidden_size // one.num_attention_heads
    even = "rotary positions need an even head size"
    _refuse(head_size % 2, f"{hidden} / {heads} = {head_size} is odd", even)
    if one.cp > 1:
        _check_divisible(length, one.seq_length, "2 * --cp", 2 * one.cp)
    if one.packed:
        multiple = one.document_multiple
        _check_divisible(length, one.seq_length, "--document-multiple", multiple)
        if one.cp > 1:
            _check_divisible("--document-multiple", multiple, "2 * --cp", 2 * one.cp)
    if one.sequence_parallel:
        _refuse(
            one.tp == 1, "--sequence-parallel splits the sequence over the tp ranks",
            "it needs --tp above 1",
        )  # fmt: skip
        parts = "--cp * --tp, which --sequence-parallel needs:"
        _check_divisible(length, one.seq_length, parts, one.cp * one.tp)


def _check_batch(settings: Settings) -> None:
    batch, outer = "--global-batch-size", settings.hsdp_outer
    _check_divisible(batch, settings.global_batch_size, "--dp", settings.dp)
    _check_divisible("--dp", settings.dp, "--hsdp-outer", outer)
    _refuse(outer > 1 and not settings.fsdp, f"--hsdp-outer {outer} needs --fsdp", "add it")
    rows = settings.global_batch_size // settings.dp
    _check_divisible(f"{batch} / --dp", rows, "--micro-batch-size", settings.rows_per_forward)


def _check_pipeline(settings: Settings) -> None:
    stages, batches = settings.pp, settings.num_microbatches
    if stages == 1:
        for flag, is_given, off in (
            (f"--vpp {settings.vpp}", settings.vpp > 1, "--vpp 1"),
            ("--defer-embedding-wgrad", settings.defer_embedding_wgrad,
             "--no-defer-embedding-wgrad"),
        ):  # fmt: skip
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


def _check_experts(settings: Settings) -> None:
    if not settings.experts:
        flag = "--freeze-router" if settings.ep == 1 else f"--ep {settings.ep}"
        is_given = settings.ep > 1 or settings.freeze_router
        _refuse(is_given, f"{flag} is for a model with experts", "give --experts too")
        return
    _check_divisible("--experts", settings.experts, "--ep", settings.ep)
    _refuse(
        settings.topk > settings.experts,
        f"--topk {settings.topk} is larger than --experts {settings.experts}", "lower it",
    )  # fmt: skip
    ranks = settings.cp * settings.dp
    _refuse(
        ranks % settings.ep,
        f"--ep {settings.ep} does not divide cp * dp = {settings.cp} * {settings.dp} = {ranks}, "
        "the ranks that share the experts (tp splits each expert)",
        "change one of them",
    )
    copies = "cp * dp / ep, the number of replicas of an expert,"
    _check_divisible(copies, ranks // settings.ep, "--hsdp-outer", settings.hsdp_outer)


def _check_divisible(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}")
