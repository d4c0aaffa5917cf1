"""Whether the settings of a run can work, each for itself and together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain.combinations import check_combinations
from pretrain.slow_rank import SlowRank
from pretrain.usage import UsageError

if TYPE_CHECKING:
    from pretrain.settings import Settings

_POSITIVE = (
    *(
        "tp",
        "cp",
        "dp",
        "hsdp_outer",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
    ),
    *("train_iters", "global_batch_size", "log_interval", "eval_batches"),
)
_NOT_NEGATIVE = (
    *("micro_batch_size", "warmup_iters", "eval_interval", "save_interval", "exit_after"),
    *("keep_last", "check_replicas_interval"),
    *("lr", "min_lr", "weight_decay", "clip_grad", "seed"),
)
_MINIMA = {**dict.fromkeys(_POSITIVE, 1), **dict.fromkeys(_NOT_NEGATIVE, 0)}


def check(settings: Settings, available: int | None) -> None:
    """Raise UsageError with what to change where the settings cannot work."""
    _check_ranges(settings)
    if available is not None and available != settings.world_size:
        raise UsageError(
            f"tp * cp * dp = {settings.tp} * {settings.cp} * {settings.dp} = "
            f"{settings.world_size}, but there are {available} ranks: change the layout or the "
            "number of ranks"
        )
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
    check_combinations(settings)
    _check_watching(settings)


def _check_ranges(settings: Settings) -> None:
    for name, minimum in _MINIMA.items():
        _check_minimum(settings, name, minimum)
    if not 0.0 <= settings.dropout < 1.0:
        raise UsageError(f"--dropout must be in [0, 1), got {settings.dropout}")
    if not settings.timeout_s > 0:
        raise UsageError(f"--timeout-s must be above 0, got {settings.timeout_s}")


def _check_watching(settings: Settings) -> None:
    if not 0 <= settings.straggler_port <= 65535:
        raise UsageError(f"--straggler-port must be from 0 to 65535, got {settings.straggler_port}")
    if not settings.straggler and settings.straggler_port:
        raise UsageError(f"--straggler-port {settings.straggler_port} needs --straggler")
    SlowRank.parse(settings.slow_rank, settings.world_size)


def _check_minimum(settings: Settings, name: str, minimum: int) -> None:
    value = getattr(settings, name)
    if not value >= minimum:
        raise UsageError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def _check_divisible(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}")
