"""The state of a model's modules, by names that are the same in every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from mcore.parallel.checkpoint.builders import strip_wrapper_names
from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.files.manifest import StoredKey
from mcore.parallel.checkpoint.selection import Selection
from mcore.parallel.checkpoint.state_tree import OneLeaf, bare_shard
from mcore.parallel.shortened import titled_list
from mcore.tensor.param_flags import ensure_params_ready

_FSDP1 = "_fsdp_wrapped_module"


class _Leaf(NamedTuple):
    """A tensor or value of a module."""

    value: Any
    module: nn.Module
    key: str  # in the state dict of ``module``


@dataclass(frozen=True)
class ModelState:
    """The state of the modules of a model on this rank: one, or several chunks of a pipeline."""

    leaves: Mapping[str, _Leaf]
    names: Mapping[torch.Tensor, Sequence[str]]  # all names of a parameter that is saved
    in_place: frozenset[int]  # ids of the tensors that a load fills in place
    parts: frozenset[int]  # ids of the tensors that hooks compute from parameters
    left_out: Mapping[torch.Tensor, str]  # the names of parameters that are not saved

    def tree(self, prefix: str) -> dict[str, Any]:
        """Return the tensors and values to save or fill, by name, for the key ``prefix``."""
        chunks = {leaf.module for leaf in self.leaves.values()}
        # peft adds a merged adapter to the weights and keeps it: another model would add it twice.
        if any(getattr(one, "merged_adapters", None) for top in chunks for one in top.modules()):
            raise CheckpointingException(
                "adapters are merged into the weights of the model, and a checkpoint does not "
                "record this. Call unmerge_adapter() first, or merge_and_unload() to drop them"
            )
        return {
            name: self._describe(f"{prefix}.{name}", leaf.value)
            for name, leaf in self.leaves.items()
        }

    def check_tied(self, prefix: str, keys: Mapping[str, StoredKey], selection: Selection) -> None:
        """Raise if checksums show that names of one parameter have different content."""
        problems: dict[str, None] = {}
        for names in self.names.values():
            known: dict[Any, str] = {}
            for key in [f"{prefix}.{name}" for name in names] if len(names) > 1 else ():
                stored = selection.stored_name(key)
                for piece in keys[stored].pieces if selection.takes(key) and stored in keys else ():
                    # The checksum is of the whole span, so only spans of one kind compare.
                    kind = piece.start, piece.shape, piece.span, piece.elements
                    if known.setdefault(kind, piece.checksum) != piece.checksum:
                        problems[key] = None
        if problems:
            title = (
                "a parameter of this model is tied, and its names have different content in the "
                "checkpoint. Untie it, or pass exclude= with the names to leave out"
            )
            raise CheckpointingException(titled_list(title, list(problems), "name"))

    def _describe(self, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # Buffers such as running statistics may differ between ranks: they are no replicas.
            is_replica = value in self.names or id(value) in self.parts
            return bare_shard(value.detach(), key) if is_replica else value.detach()
        return OneLeaf(value)

    def take_back(self, loaded: Mapping[str, Any]) -> None:
        """Give modules the values that cannot be filled in place. No communication."""
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
                "load_state_dict() of the model does not take the tensors that its state_dict() "
                "computes from parameters. Register a hook that computes the parameters from them"
            )
            raise CheckpointingException(titled_list(title, lost, "key"))


def model_state(model: nn.Module | Iterable[nn.Module]) -> ModelState:
    """Collect the state of a module or of chunks. Names that clash are an error."""
    modules = _list_modules(model)
    leaves: dict[str, _Leaf] = {}
    names: dict[torch.Tensor, list[str]] = {}
    parameters: dict[torch.Tensor, list[str]] = {}
    in_place: set[int] = set()
    clashes = []
    for module in modules:
        name_of_key = _make_naming(module, of_keys=True)
        name_of_path = _make_naming(module, of_keys=False)
        ensure_params_ready(module.parameters())
        # Autograd records which parameters a tensor of a hook is computed from. state_dict() also
        # makes fully_shard restore its shards, so the parameters are listed after it.
        with torch.enable_grad():
            found = module.state_dict(keep_vars=True)
        in_place.update(map(id, [*module.parameters(), *module.buffers()]))
        for path, parameter in module.named_parameters(remove_duplicate=False):
            parameters.setdefault(parameter, []).append(name_of_path(path))
        for key, value in found.items():
            name = name_of_key(key)
            if name in leaves and leaves[name].value is not value:
                clashes.append(name)
            leaves[name] = _Leaf(value, module, key)
            if isinstance(value, torch.Tensor) and value in parameters:
                names.setdefault(value, []).append(name)
    hidden = {one: found for one, found in parameters.items() if one not in names}
    parts: set[int] = set()
    made = [leaf.value for leaf in leaves.values() if id(leaf.value) not in in_place]
    for value in made if hidden else []:
        origins = _find_origins(value) & hidden.keys() if isinstance(value, torch.Tensor) else set()
        names.update({origin: hidden[origin] for origin in origins})
        parts.update({id(value)} if origins else ())
    every = Counter(name for one in names.values() for name in set(one))
    clashes += [name for name, times in every.items() if times > 1]
    if clashes:
        title = (
            "the model has different tensors of one name. Name layers by their place in the model"
        )
        raise CheckpointingException(titled_list(title, clashes, "name"))
    left_out = {one: found[0] for one, found in hidden.items() if one not in names}
    return ModelState(leaves, names, frozenset(in_place), frozenset(parts), left_out)


def _find_origins(value: torch.Tensor) -> set[torch.Tensor]:
    """Return the tensors that a tensor is a view of or, in autograd's graph, computed from."""
    found = set() if value._base is None else {value._base}
    nodes = [] if value.grad_fn is None else [value.grad_fn]
    for node in nodes:  # the loop appends to the list
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            found.add(leaf)
        nodes += {one for one, _ in node.next_functions if one is not None}.difference(nodes)
    return found


def _list_modules(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    given = [model] if isinstance(model, nn.Module) else list(model)
    for module in given:
        if not isinstance(module, nn.Module):
            raise CheckpointingException(
                f"a model must be a torch.nn.Module or a list of them, got {type(module).__name__}"
            )
        if any(hasattr(inner, _FSDP1) for inner in module.modules()):
            raise CheckpointingException(
                "the model is sharded by FullyShardedDataParallel, and its flat parameters have no "
                "names. Use torch.distributed.fsdp.fully_shard"
            )
    return given


def _make_naming(module: nn.Module, *, of_keys: bool) -> Callable[[str], str]:
    """Return a function that drops wrappers from keys, or else from parameters' names."""
    wrappers: dict[str, str] = {}  # the prefix of each wrapped module, and it without the wrapper
    for path, inner in module.named_modules():
        children: Iterable[str] = ()
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            children = ("module",)
        elif not of_keys and (modifiers := getattr(inner, "_fqn_modifiers", None)):
            # Declared to torch.distributed.checkpoint: children that keys omit.
            children = modifiers().values()
        outer = strip_wrapper_names(f"{path}." if path else "")
        wrappers.update((f"{outer}{child}.", outer) for child in children)
    wrappers = dict(sorted(wrappers.items(), reverse=True))  # inner wrappers first

    def name_of(key: str) -> str:
        name = strip_wrapper_names(key)
        for inner, outer in wrappers.items():
            if name.startswith(inner):
                name = outer + name.removeprefix(inner)
        return name

    return name_of
