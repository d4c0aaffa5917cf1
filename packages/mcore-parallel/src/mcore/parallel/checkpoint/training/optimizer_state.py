"""The states and options of optimizers, by the names of the parameters, in any layout."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.index import StoredKey
from mcore.parallel.checkpoint.planning.staging import digest_of
from mcore.parallel.checkpoint.state_tree import OneLeaf, bare_shard
from mcore.parallel.checkpoint.team import Team
from mcore.parallel.checkpoint.training.model_state import ModelState
from mcore.parallel.shortened import titled_list

GROUPS = "param_groups"
_STATE = "state"
_NO_OPTIONS = frozenset({"params", "param_names"})
# How a step is computed, which is this process's own business and not the training's.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})

Groups = list[dict[str, Any]]


class _Parameter(NamedTuple):
    """A parameter of an optimizer."""

    value: torch.Tensor
    names: Sequence[str]
    optimizer: Optimizer
    group: dict[str, Any]

    @property
    def state(self) -> Mapping[str, Any]:
        """Return its state, without making one."""
        found: Mapping[str, Any] = self.optimizer.state.get(self.value, {})
        return found


class OptimizerState:
    """The state of the optimizers of a model on this rank.

    torch's own ``get_optimizer_state_dict`` takes a step with a fresh optimizer to see its state,
    its ``set_optimizer_state_dict`` casts moments to the dtype of the parameter and refuses
    parameters without a state; none of it happens here.
    """

    def __init__(
        self, optimizer: Optimizer | Iterable[Optimizer] | None, model: ModelState, key: str
    ) -> None:
        self._key = key
        given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        self._parameters = list(_parameters(given, model))

    def tree(self, groups: Groups) -> dict[str, Any]:
        """Return what to save: every parameter's state, and the groups of all ranks."""
        state = {
            name: {
                field: self._described(name, field, value)
                for field, value in parameter.state.items()
            }
            for parameter in self._parameters
            for name in parameter.names
        }
        return {_STATE: state, GROUPS: OneLeaf(groups)}

    def _described(self, name: str, field: Any, value: Any) -> Any:
        if not isinstance(field, str) or "." in field:
            raise CheckpointingException(
                f"the optimizer's state of {name!r} has the field {field!r}; only names without a "
                "dot can be saved"
            )
        if isinstance(value, torch.Tensor):
            return bare_shard(value.detach(), f"{self._key}.{_STATE}.{name}.{field}")
        return OneLeaf(value)

    def all_groups(self, team: Team) -> Groups:
        """Return, on every rank, the groups of all ranks; a few small messages."""
        own = team.agree(self._own_groups)
        digest = int.from_bytes(digest_of(own), "big") >> 1
        highest, lowest = team.max([digest, -digest])
        if highest == -lowest:
            return own
        packed = team.gather_bytes(pickle.dumps(own))
        [shared] = team.share(lambda: [pickle.dumps(_merged(map(pickle.loads, packed)))])
        found: Groups = pickle.loads(shared)
        return found

    def _own_groups(self) -> Groups:
        return _merged(
            [{**_options(parameter.group), "params": list(parameter.names)}]
            for parameter in self._parameters
        )

    def targets(
        self, keys: Mapping[str, StoredKey], groups: Groups, *, strict: bool
    ) -> dict[str, Any]:
        """Return what to fill: the state that the checkpoint has, in this optimizer's layout."""
        options = _options_by_name(groups)
        self._check(options, strict=strict)
        stored = self._stored_fields(keys)
        state: dict[str, dict[str, Any]] = {}
        for parameter in self._parameters:
            if not _known_names(parameter, options):
                continue
            made: dict[str, torch.Tensor] = {}
            for name in [name for name in parameter.names if name in stored]:
                fields = stored[name]
                state[name] = {
                    field: self._target(name, field, parameter, fields.get(field), made)
                    for field in {**fields, **parameter.state}
                }
        return {_STATE: state, GROUPS: OneLeaf()}

    def _stored_fields(self, keys: Mapping[str, StoredKey]) -> dict[str, dict[str, StoredKey]]:
        """Return what a checkpoint has of this rank's parameters, by name and field."""
        prefix = f"{self._key}.{_STATE}."
        own = {name for parameter in self._parameters for name in parameter.names}
        fields: dict[str, dict[str, StoredKey]] = {}
        for key in keys:
            if key.startswith(prefix):
                name, _, field = key.removeprefix(prefix).rpartition(".")
                if name in own:
                    fields.setdefault(name, {})[field] = keys[key]
        return fields

    def _target(
        self,
        name: str,
        field: str,
        parameter: _Parameter,
        stored: StoredKey | None,
        made: dict[str, torch.Tensor],
    ) -> Any:
        present = parameter.state.get(field)
        if stored is not None and stored.dtype is None:
            return OneLeaf(present)
        if stored is None:  # the planner reports that it is missing
            if not isinstance(present, torch.Tensor):
                return OneLeaf(present)
            target = present
        elif isinstance(present, torch.Tensor) and tuple(present.shape) == stored.shape:
            target = present
        else:
            if field not in made:
                made[field] = _new_tensor(field, parameter, stored)
            target = made[field]
        return bare_shard(target, f"{self._key}.{_STATE}.{name}.{field}")

    def _check(self, options: Mapping[str, dict[str, Any]], *, strict: bool) -> None:
        unknown = [
            parameter.names[0]
            for parameter in self._parameters
            if not _known_names(parameter, options)
        ]
        if unknown and strict:
            title = (
                "the optimizer of the checkpoint lacks parameters of this one; pass strict=False "
                "to keep their present state and options"
            )
            raise CheckpointingException(titled_list(title, unknown, "parameter"))
        first: dict[int, tuple[str, bytes]] = {}
        mixed = []
        for parameter in self._parameters:
            for name in _known_names(parameter, options)[:1]:
                known = first.setdefault(id(parameter.group), (name, _digest(options[name])))
                if known[1] != _digest(options[name]):
                    mixed.append(f"{known[0]!r} and {name!r}")
        if mixed:
            title = (
                "a group of this optimizer has parameters that had other options than each other "
                "in the checkpoint; make the groups that it had"
            )
            raise CheckpointingException(titled_list(title, mixed, "pair"))

    def take_back(self, loaded: Mapping[str, Any]) -> None:
        """Give the optimizers what was loaded; no communication."""
        options = _options_by_name(loaded[GROUPS])
        for parameter in self._parameters:
            known = _known_names(parameter, options)
            if not known:
                continue
            _set_options(parameter.group, options[known[0]])
            names = [name for name in parameter.names if name in loaded[_STATE]]
            if names:
                parameter.optimizer.state[parameter.value] = dict(loaded[_STATE][names[0]])
            else:
                parameter.optimizer.state.pop(parameter.value, None)


def _parameters(optimizers: Iterable[Optimizer], model: ModelState) -> Iterator[_Parameter]:
    seen: set[torch.Tensor] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise CheckpointingException(
                "an optimizer must be a torch.optim.Optimizer or a list of them, got "
                f"{type(optimizer).__name__}"
            )
        for group in optimizer.param_groups:
            for value in group["params"]:
                _check_saved(value, model)
                names = model.names[value]
                if value in seen:
                    raise CheckpointingException(
                        f"parameter {names[0]!r} is in two optimizers, whose states would "
                        "have one name; save one of them by itself"
                    )
                seen.add(value)
                yield _Parameter(value, names, optimizer, group)


def _check_saved(value: torch.Tensor, model: ModelState) -> None:
    if value in model.left_out:
        raise CheckpointingException(
            f"the optimizer has the parameter {model.left_out[value]!r}, of which the model's "
            "state_dict() has nothing, as far as autograd can tell, so that it would not be saved; "
            "take it out of the optimizer, or have the hooks of the model keep it, without detach()"
        )
    if value not in model.names:
        raise CheckpointingException(
            f"the optimizer has a tensor of shape {tuple(value.shape)} that is no parameter of the "
            "model, so that it has no name; make the optimizer over the model's own parameters, "
            "after it was sharded"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        option: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for option, value in group.items()
        if option not in _NO_OPTIONS
    }


def _digest(options: Mapping[str, Any]) -> bytes:
    return digest_of({key: options[key] for key in options if key not in _IMPLEMENTATION})


def _options_by_name(groups: Groups) -> dict[str, dict[str, Any]]:
    return {name: _options(group) for group in groups for name in group["params"]}


def _known_names(parameter: _Parameter, options: Mapping[str, Any]) -> list[str]:
    return [name for name in parameter.names if name in options]


def _merged(ranks: Iterable[Groups]) -> Groups:
    """Join groups that have the same options, in the order in which they come."""
    merged: dict[bytes, dict[str, Any]] = {}
    group_of: dict[str, bytes] = {}
    for groups in ranks:
        for group in groups:
            options = _options(group)
            digest = digest_of(options)
            joined = merged.setdefault(digest, {"params": [], **options})
            for name in group["params"]:
                if group_of.setdefault(name, digest) != digest:
                    raise CheckpointingException(
                        f"parameter {name!r} has other options on one rank than on another; give "
                        "its copies the same ones"
                    )
                joined["params"].append(name)
    for group in merged.values():
        group["params"] = list(dict.fromkeys(group["params"]))
    return list(merged.values())


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        present = group.get(option)
        if option in _IMPLEMENTATION and option in group:
            continue
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
            present.copy_(torch.as_tensor(value))  # a captured graph reads it there
        else:
            group[option] = value


def _new_tensor(field: str, parameter: _Parameter, stored: StoredKey) -> torch.Tensor:
    """Return memory for a state of which this optimizer has none yet."""
    value, dtype = parameter.value.detach(), stored.dtype
    if tuple(value.shape) == stored.shape:
        return torch.empty_like(value, dtype=dtype)
    if not stored.shape or field == "step":
        on_device = parameter.group.get("fused") or parameter.group.get("capturable")
        device = value.device if field != "step" or on_device else "cpu"
        return torch.empty(stored.shape, dtype=dtype, device=device)
    return value.new_empty(stored.shape, dtype=dtype)
