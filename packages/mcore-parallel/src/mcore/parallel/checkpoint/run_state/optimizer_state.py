"""The states and options of optimizers, by the names of the parameters, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.optim import Optimizer

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import StoredKey
from mcore.parallel.checkpoint.planning.staging import digest_of
from mcore.parallel.checkpoint.run_state import optimizer_entries
from mcore.parallel.checkpoint.run_state.extra_values import map_tensors
from mcore.parallel.checkpoint.run_state.model_state import ModelState
from mcore.parallel.checkpoint.selection import Selection
from mcore.parallel.checkpoint.state_tree import OneLeaf, Role, bare_shard, contains
from mcore.parallel.shortened import titled_list
from mcore.tensor.dtensor import is_dtensor, to_local_if_dtensor

GROUPS = "param_groups"
_STATE = "state"
_SUBCLASS = "tensor subclass"  # such as torchao's 8-bit states, saved as one object
_PLACES = "places"  # the numbers of the optimizers and groups that a saved group had
_NO_OPTIONS = frozenset({"params", "param_names", _PLACES})
# These choose the code of a step, not its result, so each process keeps its options.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})

Groups = list[dict[str, Any]]


class _Parameter(NamedTuple):
    """A parameter of an optimizer."""

    value: torch.Tensor
    names: Sequence[str]
    optimizer: Optimizer  # has the state
    group: dict[str, Any]
    is_held: bool  # ZeroRedundancyOptimizer has the states of some parameters only

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the parameter. The look-up does not make one."""
        found: Mapping[str, Any] = self.optimizer.state.get(self.value, {})
        if not isinstance(found, Mapping):
            raise CheckpointingException(
                f"the optimizer's state of {self.names[0]!r} is a {type(found).__name__}. Only a "
                "dict of fields can be saved"
            )
        return found


class OptimizerState:
    """The state of the optimizers of a model on this rank.

    torch's ``get_optimizer_state_dict`` makes a step with a new optimizer to see its state. Its
    ``set_optimizer_state_dict`` casts moments to the dtype of the parameter and refuses parameters
    without a state. This class does neither.
    """

    def __init__(
        self, optimizer: Optimizer | Iterable[Optimizer] | None, model: ModelState, key: str
    ) -> None:
        self._key, self._model = key, model
        self._given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        self._list_all()

    def _list_all(self) -> None:
        self._parameters = list(_list_parameters(self._given, self._model))
        self._groups = {  # by the places of optimizer and group
            (number, place): group
            for number, optimizer in enumerate(self._given)
            for place, group in enumerate(
                group
                for holder in optimizer_entries.list_holders(optimizer)
                for group in holder.groups
            )
        }

    def tree(self) -> dict[str, Any]:
        """Return the tree to save: every parameter's state, and the groups, of all ranks merged."""
        state = {
            name: {
                field: self._describe(name, field, value)
                for field, value in parameter.state.items()
            }
            for parameter in self._parameters
            for name in parameter.names
        }
        self._check_shared()
        names: dict[int, list[str]] = {}
        for parameter in self._parameters:
            names.setdefault(id(parameter.group), []).extend(parameter.names)
        groups = _merge_groups(
            [{**_get_options(group), "params": names.get(id(group), []), _PLACES: [list(place)]}]
            for place, group in self._groups.items()
        )
        return {_STATE: state, GROUPS: OneLeaf(groups, merge=_merge_groups)}

    def _check_shared(self) -> None:
        """Raise if two parameters share a tensor, which a load would make two tensors."""
        seen: dict[int, str] = {}
        for parameter in self._parameters:
            for field, value in parameter.state.items():
                name = f"{parameter.names[0]}.{field}"
                first = seen.setdefault(id(value), name)
                if first != name and isinstance(value, torch.Tensor):
                    problem = f"has one tensor as state of two parameters, {first!r} and {name!r}"
                    raise optimizer_entries.refuse(parameter.optimizer, problem)

    def _describe(self, name: str, field: Any, value: Any) -> Any:
        if not isinstance(field, str) or "." in field:
            raise CheckpointingException(
                f"the optimizer's state of {name!r} has the field {field!r}. Only names without a "
                "dot can be saved"
            )
        if _is_plain_tensor(value):
            return bare_shard(value.detach(), f"{self._key}.{_STATE}.{name}.{field}")
        if contains(value, is_dtensor):
            raise CheckpointingException(
                f"the optimizer's state of {name!r} has a DTensor in its field {field!r} that is "
                f"inside of a {type(value).__name__} or not plain memory, so its shards have no "
                "place in the checkpoint. Make each DTensor of plain tensors a field of its own"
            )
        if isinstance(value, torch.Tensor):
            return OneLeaf({_SUBCLASS: value})
        return OneLeaf(value, Role.MUST_AGREE)

    def entries(self) -> OneLeaf:
        """Return each optimizer's entries that belong to no parameter. Left out if none has any."""
        found = [
            optimizer_entries.find_entries(optimizer, self._model.names)
            for optimizer in self._given
        ]
        return OneLeaf(found, Role.PER_RANK if any(found) else Role.LEFT_OUT)

    def select(
        self, keys: Mapping[str, StoredKey], groups: Groups | None, selection: Selection
    ) -> tuple[dict[str, dict[str, StoredKey]], Groups]:
        """Return the chosen states of a checkpoint, by parameter and field, and its groups.

        Both have the names of this optimizer's parameters.
        """
        prefix = f"{self._key}.{_STATE}."
        if not selection.takes(f"{self._key}.{GROUPS}"):
            return {}, []
        own: dict[str, str] = {}  # by the name in the checkpoint
        for name in (name for parameter in self._parameters for name in parameter.names):
            key = f"{prefix}{name}.*"
            if selection.takes(key):
                own[selection.stored_name(key).removeprefix(prefix)[:-2]] = name
        found: dict[str, dict[str, StoredKey]] = {}
        for key in keys:
            name, _, field = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and name in own:
                found.setdefault(own[name], {})[field] = keys[key]
        return found, [
            {**group, "params": [own[name] for name in group["params"] if name in own]}
            for group in groups or []
        ]

    def targets(
        self, stored: Mapping[str, Mapping[str, StoredKey]], groups: Groups, *, strict: bool
    ) -> dict[str, Any]:
        """Return the tree to fill: the stored states, in this optimizer's layout."""
        options = _map_options(groups)
        self._check_options(options, strict=strict)
        state: dict[str, dict[str, Any]] = {}
        for parameter in self._parameters:
            if not parameter.is_held or not _find_known_names(parameter, options):
                continue
            made: dict[str, torch.Tensor] = {}  # by field, shared by the names of a tied parameter
            for name in [name for name in parameter.names if name in stored]:
                fields = stored[name]
                state[name] = {
                    field: self._make_target(name, field, parameter, fields.get(field), made)
                    for field in {**fields, **parameter.state}
                }
        return {_STATE: state, GROUPS: OneLeaf()}

    def _make_target(
        self,
        name: str,
        field: str,
        parameter: _Parameter,
        stored: StoredKey | None,
        made: dict[str, torch.Tensor],
    ) -> Any:
        present = parameter.state.get(field)
        if stored is None and isinstance(present, torch.Tensor):
            target = present  # the planner reports that it is missing
        elif stored is None or stored.dtype is None:
            return OneLeaf(present)
        elif _is_plain_tensor(present) and tuple(present.shape) == stored.shape:
            target = present
        else:
            if field not in made:
                made[field] = _make_tensor(field, parameter, stored)
            target = made[field]
        return bare_shard(target, f"{self._key}.{_STATE}.{name}.{field}")

    def check_entries(self, stored: Sequence[Mapping[str, Any]] | None) -> None:
        """Raise if the entries of a checkpoint that belong to no parameter do not fit."""
        if stored is None and any(
            optimizer_entries.find_entries(one, self._model.names) for one in self._given
        ):
            raise CheckpointingException(
                "state_dict() of the optimizer has entries that belong to no parameter, and the "
                "checkpoint has none. Pass strict=False to keep their present values"
            )
        if stored is not None and len(stored) != len(self._given):
            raise CheckpointingException(
                f"the checkpoint has entries of {len(stored)} optimizers that belong to no "
                f"parameter, and {len(self._given)} are given. Give as many as were saved, or pass "
                "strict=False to keep their present values"
            )

    def _check_options(self, options: Mapping[str, dict[str, Any]], *, strict: bool) -> None:
        unknown = [
            parameter.names[0]
            for parameter in self._parameters
            if not _find_known_names(parameter, options)
        ]
        if unknown and strict:
            title = (
                "the optimizer of the checkpoint lacks parameters of this optimizer. Pass "
                "strict=False to keep their present state and options"
            )
            raise CheckpointingException(titled_list(title, unknown, "parameter"))
        first: dict[int, tuple[str, bytes]] = {}
        mixed = []
        for parameter in self._parameters:
            for name in _find_known_names(parameter, options)[:1]:
                _require_kind(parameter, options[name])
                known = first.setdefault(
                    id(parameter.group), (name, _digest_options(options[name]))
                )
                if known[1] != _digest_options(options[name]):
                    mixed.append(f"{known[0]!r} and {name!r}")
        if mixed:
            title = (
                "a group of this optimizer has parameters that had different options in the "
                "checkpoint. Make the groups as they were saved"
            )
            raise CheckpointingException(titled_list(title, mixed, "pair"))

    def take_back(self, loaded: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizers the loaded state, options and entries. No communication."""
        self._take_back_states(loaded)
        for optimizer, stored in zip(self._given, entries, strict=False):
            if stored:
                optimizer_entries.restore_entries(optimizer, stored)
        if any(entries):  # load_state_dict() makes new groups, and casts states
            self._list_all()
            self._take_back_states(loaded)

    def _take_back_states(self, loaded: Mapping[str, Any]) -> None:
        options = _map_options(loaded[GROUPS])
        places = _map_places(loaded[GROUPS])
        for place, group in self._groups.items():
            if not group["params"] and place in places:
                _set_options(group, places[place])
        for parameter in self._parameters:
            known = _find_known_names(parameter, options)
            if not known:
                continue
            _set_options(parameter.group, options[known[0]])
            names = [name for name in parameter.names if name in loaded[_STATE]]
            if names:
                parameter.optimizer.state[parameter.value] = {
                    field: _unwrap(value, parameter)
                    for field, value in loaded[_STATE][names[0]].items()
                }
            elif parameter.is_held:
                parameter.optimizer.state.pop(parameter.value, None)


def _list_parameters(optimizers: Iterable[Optimizer], model: ModelState) -> Iterator[_Parameter]:
    seen: set[torch.Tensor] = set()
    for holder in (
        holder for optimizer in optimizers for holder in optimizer_entries.list_holders(optimizer)
    ):
        held = {id(value) for group in holder.optimizer.param_groups for value in group["params"]}
        for group in holder.groups:
            for value in group["params"]:
                if value in model.left_out:
                    raise CheckpointingException(
                        f"the optimizer has the parameter {model.left_out[value]!r}, of which the "
                        "model's state_dict() has nothing in autograd's graph, so it would not be "
                        "saved. Take it out of the optimizer, or make the hooks of the model keep "
                        "it, without detach()"
                    )
                if value not in model.names:
                    raise CheckpointingException(
                        f"the optimizer has a tensor of shape {tuple(value.shape)} that is no "
                        "parameter of the model, so it has no name. Make the optimizer over the "
                        "model's parameters, after sharding the model"
                    )
                names = model.names[value]
                if value in seen:
                    raise CheckpointingException(
                        f"parameter {names[0]!r} is in two optimizers, and their states would have "
                        "one name. Save one of the optimizers separately"
                    )
                seen.add(value)
                yield _Parameter(value, names, holder.optimizer, group, id(value) in held)


def _get_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        option: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for option, value in group.items()
        if option not in _NO_OPTIONS
    }


def _require_kind(parameter: _Parameter, stored: Mapping[str, Any]) -> None:
    """Raise if options are those of another kind of optimizer. Schedulers and users add some."""
    optimizer = parameter.optimizer
    missing = sorted(getattr(optimizer, "defaults", {}).keys() - stored.keys())
    surplus = sorted(stored.keys() - parameter.group.keys())
    if missing and surplus:
        raise CheckpointingException(
            f"the checkpoint is that of another kind of optimizer than {type(optimizer).__name__}: "
            f"it has the options {', '.join(surplus)} and lacks {', '.join(missing)}. Make the "
            "optimizer as it was saved, or load only the model, with unexpected='ignore'"
        )


def _digest_options(options: Mapping[str, Any]) -> bytes:
    return digest_of({key: options[key] for key in options if key not in _IMPLEMENTATION})


def _map_options(groups: Groups) -> dict[str, dict[str, Any]]:
    return {name: _get_options(group) for group in groups for name in group["params"]}


def _map_places(groups: Groups) -> dict[tuple[int, int], dict[str, Any]]:
    """Map places to options, first of groups with parameters. Older checkpoints have no places."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for group in sorted(groups, key=lambda one: not one["params"]):
        for number, place in group.get(_PLACES, ()):
            found.setdefault((number, place), _get_options(group))
    return found


def _is_plain_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor in plain memory, also a DTensor of such tensors."""
    if not isinstance(value, torch.Tensor):
        return False
    local = to_local_if_dtensor(value)
    return type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _unwrap(value: Any, parameter: _Parameter) -> Any:
    """Return a loaded state. Subclasses, and tensors in lists, move to the parameter's device."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict) and value.keys() == {_SUBCLASS}:
        value = value[_SUBCLASS]
    return map_tensors(value, "", lambda _, one: one.to(parameter.value.device))


def _find_known_names(parameter: _Parameter, options: Mapping[str, Any]) -> list[str]:
    return [name for name in parameter.names if name in options]


def _merge_groups(ranks: Iterable[Groups]) -> Groups:
    """Join groups that have the same options, in their order."""
    merged: dict[bytes, dict[str, Any]] = {}
    group_of: dict[str, bytes] = {}
    for groups in ranks:
        for group in groups:
            options = _get_options(group)
            digest = digest_of(options)
            joined = merged.setdefault(digest, {"params": [], _PLACES: [], **options})
            for name in group["params"]:
                if group_of.setdefault(name, digest) != digest:
                    raise CheckpointingException(
                        f"parameter {name!r} has different options on different ranks. Give all "
                        "its replicas the same options"
                    )
                joined["params"].append(name)
            joined[_PLACES] += [one for one in group[_PLACES] if one not in joined[_PLACES]]
    for group in merged.values():
        group["params"] = list(dict.fromkeys(group["params"]))
    return list(merged.values())


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        present = group.get(option)
        if option in _IMPLEMENTATION and option in group:
            continue
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
            present.copy_(torch.as_tensor(value))  # in place: a captured graph reads this memory
        else:
            group[option] = value


def _make_tensor(field: str, parameter: _Parameter, stored: StoredKey) -> torch.Tensor:
    """Return a new tensor for a state that this optimizer lacks."""
    value, dtype = parameter.value.detach(), stored.dtype
    if tuple(value.shape) == stored.shape:
        return torch.empty_like(value, dtype=dtype)
    if not stored.shape or field == "step":
        on_device = parameter.group.get("fused") or parameter.group.get("capturable")
        device = value.device if field != "step" or on_device else "cpu"
        return torch.empty(stored.shape, dtype=dtype, device=device)
    return value.new_empty(stored.shape, dtype=dtype)
