"""``mcore.modules`` against megatron-core: casts, marks, replays, wrapper calls, sharding.

- The casts themselves, of 16 numbers a leaf, are two thirds of the time here.
- megatron-core walks a list of modules that it made at its first call.
- A bare graphed call is what ``make_graphed_callables`` returns: it checks and watches nothing.
- ``Float16Module`` wraps a module that does nothing.
- Each entry of a sharded state dict is checked here when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bench.measure import Row, paired
from mcore.modules import (
    Float16Module,
    MegatronModule,
    TransformerConfig,
    float16_to_fp32,
    fp32_to_float16,
)
from mcore.modules.graphs import GraphSpec, TorchGraphRunner

_LEAVES = 1000
_SUBMODULES = (900, 9000, 27_000)
_LAYERS = (100, 1000, 3000)
_SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 2}
_REPEATS = 21


def run() -> Iterable[Row]:
    """Yield the rows; the checks of agreement come before each timing."""
    peer: Any = import_module("megatron.core.transformer.module")
    name = f"megatron-core {version('megatron-core')}"
    yield from _casts(peer, name)
    for number in _SUBMODULES:
        yield _first_microbatch(peer, name, number)
    yield from _replays()
    with _world_of_one() as groups:
        yield from _wrapper_calls(peer, name)
        for number in _LAYERS:
            yield _sharding(peer, name, number, groups)


def _casts(peer: Any, name: str) -> Iterator[Row]:
    leaves = [torch.randn(16) for _ in range(_LEAVES)]
    nested = tuple(tuple(leaves[at : at + 10]) for at in range(0, _LEAVES, 10))
    half = [leaf.half() for leaf in leaves]
    for case, val, ours, theirs, target in (
        (f"fp32_to_float16, list of {_LEAVES}", leaves, fp32_to_float16, peer.fp32_to_float16, 1.4),
        ("fp32_to_float16, 100 tuples of 10", nested, fp32_to_float16, peer.fp32_to_float16, 1.4),
        (f"float16_to_fp32, list of {_LEAVES}", half, float16_to_fp32, peer.float16_to_fp32, None),
    ):
        arguments = (val,) if val is half else (val, torch.Tensor.half)
        yield _cast(case, name, partial(ours, *arguments), partial(theirs, *arguments), target)


def _cast(
    case: str, name: str, ours: Callable[[], Any], theirs: Callable[[], Any], target: float | None
) -> Row:
    if not _equal(ours(), theirs()):
        return Row.disagreement(case, name, "converted structures differ")
    ours_s, peer_s = paired(ours, theirs, number=5, repeats=_REPEATS)
    return Row(
        case,
        ours_s,
        name,
        peer_s,
        target=target,
        agreement="structure, dtypes and values",
    )


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    same = type(ours) is type(theirs) and len(ours) == len(theirs)
    return same and all(map(_equal, ours, theirs))


def _first_microbatch(peer: Any, name: str, number: int) -> Row:
    """A root with layers of eight children each, every second of which has the attribute."""
    case = f"set_is_first_microbatch, {number} submodules"
    ours, theirs = (_tree(kind, number) for kind in (MegatronModule, peer.MegatronModule))
    ours.set_is_first_microbatch()
    theirs.set_is_first_microbatch()
    if _marks(ours) != _marks(theirs):
        return Row.disagreement(case, name, "other modules were marked")
    ours_s, peer_s = paired(
        ours.set_is_first_microbatch,
        theirs.set_is_first_microbatch,
        number=max(1, 9000 // number),
        repeats=_REPEATS,
    )
    return Row(
        case,
        ours_s,
        name,
        peer_s,
        target=1.0,
        agreement=f"{sum(mark is True for mark in _marks(ours))} modules marked",
    )


def _tree(kind: Any, number: int) -> Any:
    root = kind(SimpleNamespace(fp8="hybrid"))
    for place in range(number // 9):
        layer = nn.Module()
        for child in range(8):
            leaf = nn.Identity()
            if child % 2 == 0:
                leaf.is_first_microbatch = False  # type: ignore[assignment]
            layer.add_module(str(child), leaf)
        root.add_module(str(place), layer)
    return root


def _marks(root: nn.Module) -> list[object]:
    return [getattr(module, "is_first_microbatch", None) for module in root.modules()]


class _Same(nn.Module):
    """Costs nothing, so that the call of its wrapper is what is timed."""

    def forward(self, *args: Any) -> Any:
        return args[0]


def _wrapper_calls(peer: Any, name: str) -> Iterator[Row]:
    peer_config: Any = import_module("megatron.core.transformer").TransformerConfig
    ours = Float16Module(TransformerConfig(**_SMALL, bf16=True), _Same())
    theirs = peer.Float16Module(peer_config(**_SMALL, bf16=True), _Same())
    for case, inputs in (
        ("Float16Module call, int64 input", (torch.arange(4),)),
        ("Float16Module call, float32 input", (torch.ones(4),)),
        ("Float16Module call, 8 float32 inputs", tuple(torch.ones(4) for _ in range(8))),
    ):
        if not _equal(ours(*inputs), theirs(*inputs)):
            yield Row.disagreement(case, name, "outputs differ")
            continue
        ours_s, peer_s = paired(
            partial(ours, *inputs), partial(theirs, *inputs), number=200, repeats=_REPEATS
        )
        yield Row(
            case,
            ours_s,
            name,
            peer_s,
            agreement="outputs",
        )


def _sharding(peer: Any, name: str, number: int, groups: dict[str, Any]) -> Row:
    case = f"sharded_state_dict, {number} layers on meta"
    peer_config: Any = import_module("megatron.core.transformer").TransformerConfig
    ours = _layers(MegatronModule, TransformerConfig(**_SMALL), number)
    theirs = _layers(peer.MegatronModule, peer_config(**_SMALL), number)
    described = _places(ours.sharded_state_dict(metadata=dict(groups)))
    if described != _places(theirs.sharded_state_dict(metadata=dict(groups))):
        return Row.disagreement(case, name, "keys, shapes, offsets or replica ids differ")
    ours_s, peer_s = paired(
        lambda: ours.sharded_state_dict(metadata=groups),
        lambda: theirs.sharded_state_dict(metadata=groups),
        number=max(1, 1000 // number),
        repeats=7,
    )
    return Row(
        case,
        ours_s,
        name,
        peer_s,
        target=1.0,
        agreement=f"{len(described)} entries",
        note=f"{ours_s / len(described) * 1e6:.3g} us an entry against "
        f"{peer_s / len(described) * 1e6:.3g}",
    )


def _layers(kind: Any, config: Any, number: int) -> Any:
    model = kind(config)
    for place in range(number):
        layer = kind(config)
        layer.linear = nn.Linear(4, 4, device="meta")
        layer.norm = nn.LayerNorm(4, device="meta")
        model.add_module(f"layer{place}", layer)
    return model


def _places(sharded: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {
        key: (entry.key, entry.global_shape, entry.global_offset, entry.replica_id)
        for key, entry in sharded.items()
    }


@contextmanager
def _world_of_one() -> Iterator[dict[str, Any]]:
    """A process group of this process alone, known to the peer; yields the metadata with it."""
    peer_groups: Any = import_module("megatron.core.parallel_state")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        peer_groups.initialize_model_parallel(create_gloo_process_groups=False)
        yield {"dp_cp_group": peer_groups.get_data_parallel_group(with_context_parallel=True)}
    finally:
        peer_groups.destroy_model_parallel()
        dist.destroy_process_group()


class _NoGraph:
    """A graph that replays nothing, which leaves what surrounds a replay."""

    def register_generator_state(self, generator: torch.Generator) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...


class _NoDevice:
    """A device for ``TorchGraphRunner`` with such graphs."""

    graph = _NoGraph
    pool = int

    def warming_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capturing(self, graph: Any, pool: Any) -> AbstractContextManager[None]:
        return nullcontext()


def _replays() -> Iterator[Row]:
    """A checked replay against a bare autograd node over the same memory, without a device."""
    layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    sample = torch.ones(2, 4, requires_grad=True)
    [graph] = TorchGraphRunner(device=_NoDevice()).capture(
        [GraphSpec(layer, layer.forward, (sample,))]
    )
    x = torch.ones(2, 4, requires_grad=True)
    bare = _bare_graph(layer, sample)
    ours_s, peer_s = paired(partial(graph, x), partial(bare, x), number=300, repeats=_REPEATS)
    yield Row(
        "replay of a layer of 16 parameters, forward",
        ours_s,
        "a bare graphed call",
        peer_s,
        target=0.5,
        agreement="nothing to compare: no device runs",
    )


def _bare_graph(layer: nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """What ``make_graphed_callables`` returns, without its graphs."""
    parameters = tuple(layer.parameters())
    inputs = [sample.detach()]
    outputs = (layer(sample).detach(),)
    grads = [torch.zeros_like(tensor) for tensor in (sample, *parameters)]
    structure = tree_flatten(outputs[0])[1]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for static, tensor in zip(inputs, given, strict=False):
                if static.data_ptr() != tensor.data_ptr():
                    static.copy_(tensor)
            return tuple(output.detach() for output in outputs)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(grad.detach() for grad in grads)

    def call(*args: torch.Tensor) -> Any:
        flat = (*tree_leaves(args), *parameters)
        return tree_unflatten(Graphed.apply(*flat), structure)  # type: ignore[no-untyped-call]

    return call
