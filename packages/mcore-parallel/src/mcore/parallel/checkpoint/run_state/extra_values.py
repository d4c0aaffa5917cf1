"""The extra values of a run's state: plain values, objects with a state, random streams."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.objects import ShardedObject
from mcore.parallel.checkpoint.planning.staging import data_problem
from mcore.parallel.checkpoint.run_state.model_state import model_state
from mcore.parallel.checkpoint.sharded import ShardedBase
from mcore.parallel.checkpoint.state_tree import OneLeaf, Role, contains
from mcore.parallel.checkpoint.team import Team
from mcore.parallel.rng import shared
from mcore.parallel.rng import state as rng_state
from mcore.tensor.device import current_device
from mcore.tensor.dtensor import is_dtensor

RANDOM_STATE = "random_state"
OPTIMIZER_ENTRIES = "optimizer_entries"
_LARGE_BYTES = 1 << 20  # of the tensors of a value, from which on each of them has a key
_ARGUMENTS = (
    "async_ check_replicas exclude force include model optimizer path process_group progress_bar "
    "rename report step strict unexpected verify weights_only"
)
_TAKEN = frozenset({RANDOM_STATE, OPTIMIZER_ENTRIES, *_ARGUMENTS.split()})


def check_names(values: Mapping[str, Any]) -> None:
    """Raise CheckpointingException for names that extra values cannot have."""
    for name in values:
        if name in _TAKEN or not name.isidentifier():
            raise CheckpointingException(
                f"{name!r} cannot be the name of an extra value: it must be an identifier other "
                f"than {', '.join(sorted(_TAKEN))}"
            )


def is_stateful(value: Any) -> bool:
    """Return whether a value has a ``state_dict``, such as a scheduler."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def state_of(name: str, value: Any) -> Any:
    """Return the state of a value: tensors of modules and DTensors by name, else one leaf."""
    if isinstance(value, nn.Module):
        return model_state(value).tree(name)
    state = value.state_dict() if is_stateful(value) else value
    has_shards = contains(state, lambda leaf: isinstance(leaf, ShardedBase) or is_dtensor(leaf))
    return state if has_shards else OneLeaf(state)


def states_to_save(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of values. A leaf that differs between ranks is saved for each rank."""
    check_names(values)
    found: dict[str, Any] = {}
    for name, value in sorted(values.items()):
        state = state_of(name, value)
        if isinstance(state, OneLeaf):
            state, tensors = _split_tensors(name, state.value)
            found.update({key: OneLeaf(one, Role.PER_RANK) for key, one in tensors.items()})
            state = OneLeaf(state, Role.PER_RANK)
        found[name] = state
    return found


def map_tensors(node: Any, key: str, change: Callable[[str, torch.Tensor], Any]) -> Any:
    """Return nested dicts and lists with other tensors. Each has its path as its key."""
    if type(node) in (dict, OrderedDict):
        return type(node)((at, map_tensors(one, f"{key}.{at}", change)) for at, one in node.items())
    if type(node) in (list, tuple):
        return type(node)(map_tensors(one, f"{key}.{at}", change) for at, one in enumerate(node))
    return change(key, node) if isinstance(node, torch.Tensor) else node


def _split_tensors(name: str, value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Replace large tensors by tensors on the meta device, and return the large ones by key.

    They are then written and read one after the other, like the tensors of a model.
    """
    found: list[tuple[str, torch.Tensor]] = []
    map_tensors(value, name, lambda key, one: found.append((key, one)))
    tensors = dict(found)
    is_plain = len(tensors) == len(found) and not any(map(data_problem, tensors.values()))
    if not is_plain or sum(one.nbytes for one in tensors.values()) < _LARGE_BYTES:
        return value, {}
    return map_tensors(value, name, lambda _, one: torch.empty_like(one, device="meta")), tensors


def find_stored_tensors(
    values: Mapping[str, Any], more: Mapping[str, Any], keys: Collection[str], team: Team
) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors to fill of values in ``more``, by key, and the keys of the others."""
    targets: dict[str, Any] = {}
    others: list[str] = []
    for name, value in values.items():
        stored: dict[str, torch.Tensor] = {}
        map_tensors(value, name, stored.setdefault)
        present = _list_present(name, more)
        for key, one in stored.items():
            of_rank = ShardedObject(key, None, (team.size,), (team.rank,))
            target = present.get(key)
            if not one.is_meta:
                continue
            if name not in more:
                others += [full for full in keys if full == key or full.startswith(f"{key}/shard_")]
            elif of_rank.unique_key in keys:
                targets[key] = of_rank
            elif key not in keys:
                raise CheckpointingException(
                    f"{key!r} was saved for each of another number of ranks. Leave {name!r} out"
                )
            elif target is None or target.shape != one.shape or target.dtype != one.dtype:
                targets[key] = torch.empty(one.shape, dtype=one.dtype, device="cpu")
            else:
                targets[key] = target
    return targets, others


def _list_present(name: str, more: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that a value in ``more`` has now, by key."""
    present: dict[str, torch.Tensor] = {}
    state = state_of(name, more[name]) if name in more else None
    if isinstance(state, OneLeaf):
        map_tensors(state.value, name, present.setdefault)
    return present


def join_tensors(
    values: Mapping[str, Any], loaded: dict[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return values with their loaded tensors, and without values whose tensors are not loaded.

    Small tensors, which were read with their value, are copied into those of ``more``.
    """
    lacking: set[str] = set()
    present = {key: one for name in values for key, one in _list_present(name, more).items()}

    def put(key: str, stored: torch.Tensor) -> Any:
        found, target = loaded.pop(key, stored), present.get(key)
        if found.is_meta:
            lacking.add(key.split(".")[0])
        elif (
            (found is stored and target is not None and not target.is_meta)
            and (target.shape, target.dtype) == (found.shape, found.dtype)
        ):  # fmt: skip
            target.detach().copy_(found)
            return target
        return found

    joined = {name: map_tensors(value, name, put) for name, value in values.items()}
    return {name: value for name, value in joined.items() if name not in lacking}


class StoredValues(NamedTuple):
    """The extra values of a checkpoint."""

    targets: dict[str, Any]  # to load on this rank, by name
    keys: list[str]  # of the targets
    of_other_ranks: dict[str, list[str]]  # keys by name, saved for another number of ranks


def find_stored_values(keys: Iterable[str], team: Team) -> StoredValues:
    """Return the extra values, for this rank, of a checkpoint with these keys."""
    found = StoredValues({}, [], {})
    for key in keys:
        name, is_per_rank, _ = key.partition("/shard_")
        if not name.isidentifier():
            continue
        if not is_per_rank:
            found.targets[name] = OneLeaf()
            found.keys.append(key)
            continue
        one = ShardedObject.empty_from_unique_key(key)
        if one.global_shape != (team.size,):
            found.of_other_ranks.setdefault(name, []).append(key)
        elif one.global_offset == (team.rank,):
            found.targets[name] = one
            found.keys.append(key)
    return found


def rank_random_state() -> dict[str, Any]:
    """Return the states of all default random streams of this rank, as plain values."""
    device = current_device()
    found = {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "device": None if device.type == "cpu" else rng_state._get_cuda_rng_state(device),
        "tracker": {
            name: rng_state.convert_cuda_rng_state(state)
            for name, state in shared.get_all_rng_states().items()
        },
    }
    if "numpy" in sys.modules:  # otherwise nothing has drawn from its stream
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (kind, words.tolist(), *rest)
    return found


def set_rank_random_state(state: Mapping[str, Any]) -> None:
    """Restore the streams of :func:`rank_random_state`, as far as this process has them."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    device = current_device()
    if state["device"] is not None and device.type != "cpu":
        rng_state._set_cuda_rng_state(state["device"], device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    tracker = shared.existing_tracker()
    if state["tracker"] and tracker is not None:
        for_graphs = shared.is_graph_safe_cuda_rng_tracker(tracker)
        tracker.set_states(
            {
                name: rng_state.convert_cuda_rng_state(one, to_graphable=for_graphs, device=device)
                for name, one in state["tracker"].items()
            }
        )
