"""The parts of an optimizer: inner optimizers with states, and entries besides the parameters'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.planning.staging import digest_of
from mcore.parallel.checkpoint.state_tree import contains
from mcore.parallel.shortened import titled_list
from mcore.tensor.dtensor import is_dtensor

_STATE, _GROUPS = "state", "param_groups"
_REMEDY = (
    "Save it as an extra value, NAME=optimizer, which stores the result of its state_dict() as it "
    "is and gives it to load_state_dict()"
)


class Holder(NamedTuple):
    """An optimizer that has the states of parameters, and the groups with their options."""

    optimizer: Optimizer
    groups: Sequence[dict[str, Any]]


def list_holders(optimizer: Optimizer) -> list[Holder]:
    """Return the optimizers that have the states, which may be inside the given optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise CheckpointingException(
            "an optimizer must be a torch.optim.Optimizer or a list of them, got "
            f"{type(optimizer).__name__}"
        )
    own = set(map(id, _list_values(optimizer)))
    inner = [
        one
        for value in vars(optimizer).values()
        for one in (value if isinstance(value, list | tuple) else [value])
        if isinstance(one, Optimizer)
        and one.state is not optimizer.state
        and not own.isdisjoint(map(id, _list_values(one)))
    ]
    if _is_zero(optimizer):
        local = getattr(optimizer, "optim", None)
        if not isinstance(local, Optimizer):
            raise refuse(optimizer, "has no local torch optimizer (overlap_with_ddp=True)")
        return [Holder(local, optimizer.param_groups)]  # it copies the options before each step
    if not inner:
        return [Holder(optimizer, optimizer.param_groups)]
    if optimizer.state or own != {id(value) for one in inner for value in _list_values(one)}:
        kinds = ", ".join(sorted({type(one).__name__ for one in inner}))
        raise refuse(optimizer, f"shares parameters with inner optimizers ({kinds})")
    return [holder for one in inner for holder in list_holders(one)]


def _is_zero(optimizer: Optimizer) -> bool:
    # By name: importing torch.distributed.optim takes long.
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def _list_values(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (value for group in optimizer.param_groups for value in group["params"])


def refuse(optimizer: Optimizer, problem: str) -> CheckpointingException:
    return CheckpointingException(f"the optimizer {type(optimizer).__name__} {problem}. {_REMEDY}")


def find_entries(
    optimizer: Optimizer, names: Mapping[torch.Tensor, Sequence[str]]
) -> dict[str, Any]:
    """Return the entries of an optimizer that belong to no parameter, or an empty dict.

    They are found by comparing ``state_dict()`` with the states. No tensor is read. Entries of
    parameters that are not among the states are refused: they would be lost.
    """
    holders = list_holders(optimizer)
    states = [_find_other_states(optimizer, holder) for holder in holders]
    compared = [holder.optimizer for holder in holders]
    # Without any state, torchtitan's container would make a step.
    if not _is_zero(optimizer) and all(one.state for one in compared):
        compared = [optimizer, *(one for one in compared if one is not optimizer)]
    missing: list[str] = []
    entries: dict[str, Any] = {}
    for one in compared:
        found = one.state_dict()
        if not (isinstance(found.get(_STATE), Mapping) and isinstance(found.get(_GROUPS), list)):
            known = {name for holder in holders for name in _list_names(holder.optimizer)}
            missing += [path for path in _list_paths(found) if path.split(".")[-1] not in known]
            continue
        missing += _compare(one, found, holders, names)
        more = {key: value for key, value in found.items() if key not in (_STATE, _GROUPS)}
        if one is optimizer:
            entries = more
        else:
            missing += map(str, more)
    if missing:
        title = (
            f"the state_dict() of the optimizer {type(optimizer).__name__} has entries that are "
            f"not in its state and would be lost. {_REMEDY}"
        )
        raise CheckpointingException(titled_list(title, missing, "entry"))
    if contains([entries, states], is_dtensor):
        raise refuse(optimizer, "has DTensors that belong to no parameter")
    return {"entries": entries, "states": states} if entries or any(states) else {}


def _find_other_states(optimizer: Optimizer, holder: Holder) -> dict[Any, Any]:
    """Return the states that belong to no parameter."""
    known = set(map(id, _list_values(holder.optimizer)))
    others = {key: one for key, one in holder.optimizer.state.items() if id(key) not in known}
    lost = [tuple(key.shape) for key in others if isinstance(key, torch.Tensor)]
    if lost:
        raise refuse(optimizer, f"has the state of a tensor of shape {lost[0]} in no group")
    return others


def _compare(
    optimizer: Optimizer,
    found: Mapping[str, Any],
    holders: Sequence[Holder],
    names: Mapping[torch.Tensor, Sequence[str]],
) -> Iterator[str]:
    """Yield the entries of a state dict in torch's form that no holder has."""
    values = list({id(value): value for value in _list_values(optimizer)}.values())
    known = {id(one) for holder in holders for one in holder.optimizer.state.values()}
    for key, fields in found[_STATE].items():
        if type(key) is not int or key >= len(values):
            if all(key not in holder.optimizer.state for holder in holders):
                yield f"{_STATE}[{key!r}]"
            continue
        if id(fields) in known:  # torch's state_dict() returns the states themselves
            continue
        live = [one.optimizer.state.get(values[key]) for one in holders]
        held = {name for one in live if isinstance(one, Mapping) for name in one}
        lost = fields.keys() - held if isinstance(fields, Mapping) else {"not a dict"}
        for name in sorted(map(str, lost)):
            yield f"{_STATE}[{names.get(values[key], [key])[0]!r}]: {name}"
    for place, group in enumerate(found[_GROUPS]):
        present = optimizer.param_groups[place] if place < len(optimizer.param_groups) else {}
        for name in sorted(group.keys() - present.keys()):
            yield f"{_GROUPS}[{place}]: {name}"


def _list_names(optimizer: Optimizer) -> Iterator[str]:
    """Yield the names of fields and options of an optimizer."""
    for part in [*optimizer.param_groups, *optimizer.state.values()]:
        yield from map(str, part)


def _list_paths(node: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of the leaves of nested dicts."""
    if not isinstance(node, Mapping):
        yield path
        return
    for key, value in node.items():
        yield from _list_paths(value, f"{path}.{key}" if path else str(key))


def restore_entries(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Give an optimizer, whose parameters have their states, the result of `find_entries`."""
    for holder, states in zip(list_holders(optimizer), stored["states"], strict=True):
        holder.optimizer.state.update(states)
    entries = stored["entries"]
    if not entries:
        return
    optimizer.load_state_dict({**optimizer.state_dict(), **entries})
    found = optimizer.state_dict()
    lost = [
        key
        for key in entries
        if key not in found or digest_of(found[key]) != digest_of(entries[key])
    ]
    if lost:
        title = (
            f"load_state_dict() of the optimizer {type(optimizer).__name__} does not take entries "
            "that its state_dict() returns. Override it, or register a load_state_dict_pre_hook"
        )
        raise CheckpointingException(titled_list(title, lost, "entry"))
