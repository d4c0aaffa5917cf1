"""Options that exclude each other, or that need one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretrain.usage import UsageError

if TYPE_CHECKING:
    from pretrain.settings import Settings


def check_combinations(settings: Settings) -> None:
    """Raise UsageError with what to change where options cannot work together."""
    if settings.sequence_parallel:
        _check_sequence_parallel(settings)
    if settings.cuda_graph != "none":
        _check_graphs(settings)
    if settings.value_head and settings.untied:
        raise UsageError(
            "--untied gives the head over bytes a weight of its own, but with --value-head there "
            "is no such head: leave one of them out"
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
    if settings.dropout:
        raise UsageError(
            f"--cuda-graph {settings.cuda_graph} cannot work with --dropout {settings.dropout}, "
            "which switches between random streams inside a layer: set --dropout 0"
        )
