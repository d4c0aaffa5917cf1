"""The dimensions of the main job, and the combinations of them that are valid."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

from pretrain.cli.checks import check
from pretrain.settings import Settings
from pretrain.usage import UsageError

STEPS = 20
AFTER = 2  # steps of a run that goes on in another layout: the second one shows the moments
RANKS = (1, 2, 4, 8)
# What each dimension may be; one that Settings does not have yet is left out.
DIMENSIONS: list[list[dict[str, Any]]] = [
    [{}, {"tp": 2}, {"tp": 4}, {"tp": 8}],
    [{}, {"cp": 2}, {"cp": 4}, {"cp": 8}],
    [{}, {"pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}],
    [{}, {"fsdp": True}, {"fsdp": True, "hsdp_outer": 2}],
    [{}, {"sequence_parallel": True}],
    [{}, {"recompute": True}],
    [{}, {"packed": True}],
    [{}, {"bf16": True}],
]
# A checkpoint of one of these is none of the other.
FIXED = ("packed", "bf16")
_SHAPE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "seq_length": 32,
    "document_multiple": 16, "global_batch_size": 8, "warmup_iters": 2, "train_iters": 100,
    "eval_interval": 0, "save_interval": 0, "tensorboard": False, "mlflow": False,
    "straggler": False,
}  # fmt: skip


def combinations(ranks: int, data: str) -> Iterator[Settings]:
    """The settings of every valid combination on a number of ranks, over a text.

    What a combination says is in force: sharding needs replicas, and dp fills up the ranks.
    """
    known = {field.name for field in dataclasses.fields(Settings)}
    offered = [[value for value in values if value.keys() <= known] for values in DIMENSIONS]
    for values in itertools.product(*offered):
        chosen: dict[str, Any] = {name: one for value in values for name, one in value.items()}
        alone = Settings(**{**_SHAPE, **chosen, "dp": 1}).world_size
        if ranks % alone:
            continue
        settings = Settings(**{**_SHAPE, **chosen, "dp": ranks // alone, "data": data})
        try:
            check(settings, ranks)
        except UsageError:
            continue
        if settings.fsdp and settings.dp * settings.cp == settings.hsdp_outer:
            continue  # each shard would be the whole
        yield settings


def name_of(settings: Settings) -> str:
    """The combination in short, such as ``tp2-cp1-dp2 fsdp packed``."""
    names = {"sequence_parallel": "sp"}
    on = [
        names.get(name, name)
        for values in DIMENSIONS
        for name in values[-1]
        if getattr(settings, name, None) is True
    ]
    outer = [f"hsdp{settings.hsdp_outer}"] if settings.hsdp_outer > 1 else []
    return " ".join([settings.layout, *on, *outer])


def others(settings: Settings, every: list[Settings]) -> list[Settings]:
    """Four layouts to load a combination's checkpoint in: one of each number of ranks, as drawn."""
    draw = random.Random(name_of(settings))
    fixed = {name: getattr(settings, name) for name in FIXED}
    fitting = [
        one
        for one in every
        if one != settings and fixed == {name: getattr(one, name) for name in FIXED}
    ]
    chosen = []
    for ranks in RANKS:
        own = [one for one in fitting if one.world_size == ranks]
        chosen += draw.sample(own, min(1, len(own)))
    rest = [one for one in fitting if one not in chosen]
    return chosen + draw.sample(rest, min(len(rest), len(RANKS) - len(chosen)))
