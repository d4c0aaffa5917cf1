"""The dimensions of the main job, their valid combinations, and the combinations to run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import random
from collections.abc import Iterator
from typing import Any

from pretrain.cli.checks import check
from pretrain.settings import Settings
from pretrain.usage import UsageError

STEPS = 20
AFTER = 2  # steps of a resumed run: the second step depends on the optimizer's moments
RANKS = (1, 2, 4, 8)
_CROSSED_UP_TO = 2  # ranks
_MOST_STAGES = 8  # over all ranks
_layout_of = operator.attrgetter("layout", "experts", "ep", "fsdp", "hsdp_outer")
_EXPERTS = 8
_BATCH = 8
_SWITCHES = {"sequence_parallel": "sp", "recompute": "recompute", "packed": "packed",
             "bf16": "bf16"}  # fmt: skip
# A checkpoint resumes only with the same values of these, and is compared only with the others'.
FIXED = ("packed", "bf16", "experts")
_KEPT = ("num_layers", "experts", "topk", "seq_length", "clip_grad")
_SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 8, "seq_length": 32,
    "document_multiple": 16, "global_batch_size": _BATCH, "warmup_iters": 2, "train_iters": 100,
    "eval_interval": 0, "save_interval": 0, "tensorboard": False, "mlflow": False,
    "straggler": False, "data": "text",
}  # fmt: skip
# Kinds that the dimensions do not reach, and the settings with their usual value for their names.
# Only without a pipeline are the micro-batches one of them.
_KINDS = (
    ("seq_length", "length", 32), ("topk", "top", 2), ("clip_grad", "clip", 1.0),
    ("micro_batch_size", "micro", 0),
)  # fmt: skip
_HELD_OUT: tuple[dict[str, Any], ...] = (
    {"pp": 2, "vpp": 4, "num_layers": 8, "micro_batch_size": 1},
    {"pp": 4, "tp": 2, "num_layers": 4, "micro_batch_size": 1, "packed": True},
    {"tp": 2, "seq_length": 33},
    {"dp": 2, "fsdp": True, "seq_length": 17, "clip_grad": 0.02},
    {"cp": 2, "pp": 2, "micro_batch_size": 2, "seq_length": 36, "clip_grad": 0.02},
    {"dp": 2, "ep": 2, "experts": 6, "topk": 3},
    {"dp": 4, "ep": 2, "experts": 6, "topk": 3, "fsdp": True, "hsdp_outer": 2},
    # Documents end within the micro-batches, so each has another number of labels.
    {"dp": 2, "micro_batch_size": 1, "packed": True},
)


def held_out(data: str) -> list[Settings]:
    """The settings of the kinds that the combinations do not reach."""
    shape = {**_SHAPE, "dp": 1, "num_layers": 2, "balance": "sequence", "data": data}
    return [Settings(**{**shape, **kind}) for kind in _HELD_OUT]


@functools.cache
def combinations(ranks: int, data: str) -> list[Settings]:
    """The settings of every valid combination on a number of ranks, over a text.

    Every dimension of a combination has an effect: sharding needs replicas, and dp takes the
    remaining ranks.
    """
    return [dataclasses.replace(one, data=data) for one in _find_valid(ranks)]


@functools.cache
def _find_valid(ranks: int) -> list[Settings]:
    """The valid combinations over any text: its name decides nothing, and checks take seconds."""
    return [one for sizes in _list_sizes(ranks) for one in _add_switches(sizes, ranks)]


def choose_combinations(ranks: int, data: str) -> list[Settings]:
    """The combinations to run: all on one and two ranks, each layout once on more ranks.

    The switches of a layout are chosen to cover as many new triples of values as possible. As a
    result every pair of values is covered.
    """
    if ranks <= _CROSSED_UP_TO:
        return combinations(ranks, data)
    seen: set[tuple[Any, ...]] = set()
    chosen = []
    for _, offered in itertools.groupby(combinations(ranks, data), _layout_of):
        best = max(offered, key=lambda one: len(meetings(one, 3) - seen))
        seen |= meetings(best, 3)
        chosen.append(best)
    return chosen


def meetings(settings: Settings, count: int) -> set[tuple[Any, ...]]:
    """The values that each ``count`` of a combination's dimensions have together."""
    names = ("tp", "cp", "pp", "vpp", "experts", "ep", "fsdp", "hsdp_outer", *_SWITCHES)
    values = [(name, getattr(settings, name)) for name in names]
    return set(itertools.combinations(values, count))


def _list_sizes(ranks: int) -> Iterator[dict[str, Any]]:
    """Every way to divide the ranks, with a layer for each stage, and two without a pipeline."""
    for tp, cp, pp, vpp in itertools.product(RANKS, RANKS, RANKS, (1, 2)):
        if ranks % (tp * cp * pp) or pp * vpp > _MOST_STAGES or (vpp > 1 and pp == 1):
            continue
        dp = ranks // (tp * cp * pp)
        dense = {
            "tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "dp": dp, "num_layers": max(2, pp * vpp),
            # Twice as many micro-batches as stages, if there are so many sequences.
            "micro_batch_size": max(1, _BATCH // (2 * dp * pp)) if pp > 1 else 0,
        }  # fmt: skip
        for ep, outer in itertools.product((0, *RANKS), (0, 1, 2, 4)):
            sharded = {"fsdp": True, "hsdp_outer": outer} if outer else {}
            # Stages balance each micro-batch separately, so the whole batch would not be balanced
            # as on one process. Sequences are.
            experts = {"experts": _EXPERTS, "ep": ep, "balance": "sequence"} if ep else {}
            yield {**dense, **sharded, **experts}


def _add_switches(sizes: dict[str, Any], ranks: int) -> list[Settings]:
    """The valid combinations of some sizes with all switches."""
    valid = []
    for values in itertools.product((False, True), repeat=len(_SWITCHES)):
        settings = Settings(**{**_SHAPE, **sizes, **dict(zip(_SWITCHES, values, strict=True))})
        if _is_valid(settings, ranks):
            valid.append(settings)
    return valid


def _is_valid(settings: Settings, ranks: int) -> bool:
    if settings.fsdp and settings.dp * settings.cp == settings.hsdp_outer:
        return False  # each shard would be the whole
    try:
        check(settings, ranks)
    except UsageError:
        return False
    return True


def name_of(settings: Settings) -> str:
    """A short name, such as ``tp2-cp1-dp2 ep2 fsdp packed``."""
    experts = [f"ep{settings.ep}"] if settings.experts else []
    outer = [f"hsdp{settings.hsdp_outer}"] if settings.hsdp_outer > 1 else []
    sharded = outer or ["fsdp"] * settings.fsdp
    switches = [short for name, short in _SWITCHES.items() if getattr(settings, name)]
    kinds = [
        f"{short}{getattr(settings, name)}"
        for name, short, usual in (_KINDS if settings.pp == 1 else _KINDS[:-1])
        if getattr(settings, name) != usual
    ]
    return " ".join([settings.layout, *experts, *sharded, *switches, *kinds])


def others(settings: Settings, every: list[Settings]) -> list[Settings]:
    """Up to four random layouts that can load a combination's checkpoint.

    First one on each number of ranks, then more on any number if some have none. They have the
    model and the lengths of the checkpoint.
    """
    draw = random.Random(name_of(settings))
    taken: list[Settings] = []
    kept = {name: getattr(settings, name) for name in _KEPT}
    fitting = [
        one
        for one in every
        if all(bool(getattr(one, name)) == bool(getattr(settings, name)) for name in FIXED)
    ]
    draw.shuffle(fitting)
    for ranks in (*RANKS, *RANKS):
        candidates = (
            dataclasses.replace(one, **kept) for one in fitting if one.world_size == ranks
        )
        possible = (one for one in candidates if _is_valid(one, ranks))
        found = next((one for one in possible if one != settings and one not in taken), None)
        if found is not None and len(taken) < len(RANKS):
            taken.append(found)
    return taken
