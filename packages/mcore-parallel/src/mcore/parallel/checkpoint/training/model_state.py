"""What the modules of a model hold, by the names that it has in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    names: Mapping[torch.Tensor, Sequence[str]]  # all those of a parameter
    in_place: frozenset[int]  # ids of the tensors that a load fills where they are

    def tree(self, prefix: str) -> dict[str, Any]:
        """Return what to save or fill, by name, below a key of the state dict."""
        return {
            name: self._described(f"{prefix}.{name}", leaf.value)
            for name, leaf in self.leaves.items()
        }

    def _described(self, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A rank's own buffers, such as running statistics, are no copies of others'.
            return bare_shard(value.detach(), key) if value in self.names else value.detach()
        return OneLeaf(value)

    def take_back(self, loaded: Mapping[str, Any]) -> None:
        """Give modules what could not be filled in place; no communication."""
        by_module: dict[nn.Module, dict[str, Any]] = {}
        for name, leaf in self.leaves.items():
            if id(leaf.value) not in self.in_place:
                by_module.setdefault(leaf.module, {})[leaf.key] = loaded[name]
        for module, state in by_module.items():
            module.load_state_dict(state, strict=False)


def model_state(model: nn.Module | Iterable[nn.Module]) -> ModelState:
    """Look up the state of a module or of chunks; CheckpointingException where names clash."""
    modules = _as_modules(model)
    leaves: dict[str, _Leaf] = {}
    names: dict[torch.Tensor, list[str]] = {}
    in_place: set[int] = set()
    clashes = []
    for module in modules:
        found = list(_leaves_of(module))  # first: it has fully_shard put its shards back
        parameters = set(module.parameters())
        in_place.update(map(id, [*parameters, *module.buffers()]))
        for name, leaf in found:
            if name in leaves and leaves[name].value is not leaf.value:
                clashes.append(name)
            leaves[name] = leaf
            if isinstance(leaf.value, torch.Tensor) and leaf.value in parameters:
                names.setdefault(leaf.value, []).append(name)
    if clashes:
        title = "chunks of the model have different tensors of one name; name layers by their place"
        raise CheckpointingException(titled_list(title, clashes, "name"))
    return ModelState(leaves, names, frozenset(in_place))


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


def _leaves_of(module: nn.Module) -> Iterator[tuple[str, _Leaf]]:
    wrappers = dict(sorted(_wrapper_prefixes(module), reverse=True))  # inner ones first
    for key, value in module.state_dict(keep_vars=True).items():
        name = key.replace(_CHECKPOINTED, "")
        for inner, outer in wrappers.items():
            if name.startswith(inner):
                name = outer + name.removeprefix(inner)
        yield name, _Leaf(value, module, key)


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
