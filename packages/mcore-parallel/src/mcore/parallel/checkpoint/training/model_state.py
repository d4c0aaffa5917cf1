"""What the modules of a model hold, by the names that it has in every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.state_tree import OneLeaf, bare_shard
from mcore.parallel.shortened import titled_list

_ORIGINAL = "_orig_mod"  # where torch.compile puts a module
_CHECKPOINTED = "_checkpoint_wrapped_module."
_FSDP1 = "_fsdp_wrapped_module"


class _Leaf(NamedTuple):
    """A tensor or value of a module."""

    value: Any
    module: nn.Module
    key: str  # in the module's own state dict


@dataclass(frozen=True)
class ModelState:
    """The state of the modules of a model on this rank: one, or several chunks of a pipeline."""

    leaves: Mapping[str, _Leaf]
    names: Mapping[torch.Tensor, Sequence[str]]  # all those of a parameter that is saved
    in_place: frozenset[int]  # ids of the tensors that a load fills where they are
    parts: frozenset[int]  # ids of the tensors that hooks make of parameters
    left_out: Mapping[torch.Tensor, str]  # the names of parameters that are not saved

    def tree(self, prefix: str) -> dict[str, Any]:
        """Return what to save or fill, by name, below a key of the state dict."""
        return {
            name: self._described(f"{prefix}.{name}", leaf.value)
            for name, leaf in self.leaves.items()
        }

    def _described(self, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A rank's own buffers, such as running statistics, are no copies of others'.
            is_copied = value in self.names or id(value) in self.parts
            return bare_shard(value.detach(), key) if is_copied else value.detach()
        return OneLeaf(value)

    def take_back(self, loaded: Mapping[str, Any]) -> None:
        """Give modules what could not be filled in place; no communication."""
        by_module: dict[nn.Module, dict[str, Any]] = {}
        for name, leaf in self.leaves.items():
            if id(leaf.value) not in self.in_place:
                by_module.setdefault(leaf.module, {})[leaf.key] = loaded[name]
        lost: list[str] = []
        for module, state in by_module.items():
            unknown = set(module.load_state_dict(state, strict=False).unexpected_keys)
            lost += [
                name
                for name, leaf in self.leaves.items()
                if id(leaf.value) in self.parts and leaf.module is module and leaf.key in unknown
            ]
        if lost:
            title = (
                "load_state_dict() of the model does not take what its state_dict() makes of "
                "parameters; register a hook that puts them together again"
            )
            raise CheckpointingException(titled_list(title, lost, "key"))


def model_state(model: nn.Module | Iterable[nn.Module]) -> ModelState:
    """Look up the state of a module or of chunks; CheckpointingException where names clash."""
    modules = _as_modules(model)
    leaves: dict[str, _Leaf] = {}
    names: dict[torch.Tensor, list[str]] = {}
    own_names: dict[torch.Tensor, list[str]] = {}
    in_place: set[int] = set()
    clashes = []
    for module in modules:
        name_of = _naming(module)
        with torch.enable_grad():  # which tells what hooks make of a parameter
            found = module.state_dict(keep_vars=True)  # has fully_shard put its shards back
        in_place.update(map(id, [*module.parameters(), *module.buffers()]))
        for path, parameter in module.named_parameters(remove_duplicate=False):
            own_names.setdefault(parameter, []).append(name_of(path))
        for key, value in found.items():
            name = name_of(key)
            if name in leaves and leaves[name].value is not value:
                clashes.append(name)
            leaves[name] = _Leaf(value, module, key)
            if isinstance(value, torch.Tensor) and value in own_names:
                names.setdefault(value, []).append(name)
    hidden = {one: own for one, own in own_names.items() if one not in names}
    parts: set[int] = set()
    made = [leaf.value for leaf in leaves.values() if id(leaf.value) not in in_place]
    for value in made if hidden else []:
        origins = _origins(value) & hidden.keys() if isinstance(value, torch.Tensor) else set()
        names.update({origin: hidden[origin] for origin in origins})
        parts.update({id(value)} if origins else ())
    clashes += _repeated(names.values())
    if clashes:
        title = "the model has different tensors of one name; name layers of chunks by their place"
        raise CheckpointingException(titled_list(title, clashes, "name"))
    left_out = {one: own[0] for one, own in hidden.items() if one not in names}
    return ModelState(leaves, names, frozenset(in_place), frozenset(parts), left_out)


def _origins(value: torch.Tensor) -> set[torch.Tensor]:
    """Return the tensors that one is a view of or, as autograd knows, was computed from."""
    found = set() if value._base is None else {value._base}
    nodes = [] if value.grad_fn is None else [value.grad_fn]
    for node in nodes:  # which grows
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            found.add(leaf)
        nodes += {one for one, _ in node.next_functions if one is not None}.difference(nodes)
    return found


def _repeated(names: Iterable[Iterable[str]]) -> list[str]:
    every = Counter(name for one in names for name in set(one))
    return [name for name, times in every.items() if times > 1]


def _as_modules(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    given = [model] if isinstance(model, nn.Module) else list(model)
    for module in given:
        if not isinstance(module, nn.Module):
            raise CheckpointingException(
                f"a model must be a torch.nn.Module or a list of them, got {type(module).__name__}"
            )
        if any(hasattr(inner, _FSDP1) for inner in module.modules()):
            raise CheckpointingException(
                "the model is sharded by FullyShardedDataParallel, whose flat parameters have no "
                "names; use torch.distributed.fsdp.fully_shard"
            )
    return given


def _naming(module: nn.Module) -> Callable[[str], str]:
    """Return what takes out of a key of a module what wrappers put there."""
    wrappers = dict(sorted(_wrapper_prefixes(module), reverse=True))  # inner ones first

    def name_of(key: str) -> str:
        name = key.replace(_CHECKPOINTED, "")
        for inner, outer in wrappers.items():
            if name.startswith(inner):
                name = outer + name.removeprefix(inner)
        return name

    return name_of


def _wrapper_prefixes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what wrappers put before the names of what they wrap, and what belongs there."""
    for path, inner in module.named_modules():
        child = _wrapped_child(inner)
        if child:
            outer = f"{path}." if path else ""
            yield f"{outer}{child}.", outer


def _wrapped_child(module: nn.Module) -> str:
    if _ORIGINAL in vars(module).get("_modules", {}):
        return _ORIGINAL
    is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return "module" if is_wrapper else ""
