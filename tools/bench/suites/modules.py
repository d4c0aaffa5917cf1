"""``mcore.modules`` against megatron-core: casts, marks, replays, wrapper calls, sharding.

- The casts, of 16 numbers per leaf, are two thirds of our time.
- megatron-core iterates over a list of modules that its first call made.
- A bare graphed call is the return value of ``make_graphed_callables``, which has no checks.
- ``Float16Module`` wraps a module that does nothing.
- Our sharded state dict checks each entry when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bench.measure import Row, compare
from bench.peers import megatron, megatron_groups, name_of
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
    """Yield the rows. Results are compared before each timing."""
    peer, name = megatron("transformer.module"), name_of()
    yield from _compare_casts(peer, name)
    for number in _SUBMODULES:
        yield _compare_marks(peer, name, number)
    yield _compare_replay()
    with _make_world() as groups:
        yield from _compare_calls(peer, name)
        for number in _LAYERS:
            yield _compare_sharding(peer, name, number, groups)


def _compare_casts(peer: Any, name: str) -> Iterator[Row]:
    leaves = [torch.randn(16) for _ in range(_LEAVES)]
    nested = tuple(tuple(leaves[at : at + 10]) for at in range(0, _LEAVES, 10))
    half = [leaf.half() for leaf in leaves]
    to_half = torch.Tensor.half
    for case, function, arguments, target in (
        (f"fp32_to_float16, list of {_LEAVES}", fp32_to_float16, (leaves, to_half), 1.4),
        ("fp32_to_float16, 100 tuples of 10", fp32_to_float16, (nested, to_half), 1.4),
        (f"float16_to_fp32, list of {_LEAVES}", float16_to_fp32, (half,), None),
    ):
        ours = partial(function, *arguments)
        theirs = partial(getattr(peer, function.__name__), *arguments)
        yield compare(
            case, ours, name, theirs, target, agreement="structure, dtypes and values",
            difference="" if _is_equal(ours(), theirs()) else "converted structures differ",
            number=5, repeats=_REPEATS,
        )  # fmt: skip


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    same = type(ours) is type(theirs) and len(ours) == len(theirs)
    return same and all(map(_is_equal, ours, theirs))


def _compare_marks(peer: Any, name: str, number: int) -> Row:
    """A root with layers of eight children each. Every second child has the attribute."""
    ours, theirs = (_make_tree(kind, number) for kind in (MegatronModule, peer.MegatronModule))
    ours.set_is_first_microbatch()
    theirs.set_is_first_microbatch()
    marks = _list_marks(ours)
    return compare(
        f"set_is_first_microbatch, {number} submodules", ours.set_is_first_microbatch, name,
        theirs.set_is_first_microbatch, 1.0, agreement=f"{marks.count(True)} modules marked",
        difference="" if marks == _list_marks(theirs) else "other modules were marked",
        number=max(1, 9000 // number), repeats=_REPEATS,
    )  # fmt: skip


def _make_tree(kind: Any, number: int) -> Any:
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


def _list_marks(root: nn.Module) -> list[object]:
    return [getattr(module, "is_first_microbatch", None) for module in root.modules()]


class _Same(nn.Module):
    """Costs nothing: only the call of its wrapper is timed."""

    def forward(self, *args: Any) -> Any:
        return args[0]


def _compare_calls(peer: Any, name: str) -> Iterator[Row]:
    peer_config = megatron("transformer").TransformerConfig
    ours = Float16Module(TransformerConfig(**_SMALL, bf16=True), _Same())
    theirs = peer.Float16Module(peer_config(**_SMALL, bf16=True), _Same())
    for inputs_text, inputs in (
        ("int64 input", (torch.arange(4),)),
        ("float32 input", (torch.ones(4),)),
        ("8 float32 inputs", tuple(torch.ones(4) for _ in range(8))),
    ):
        yield compare(
            f"Float16Module call, {inputs_text}", partial(ours, *inputs), name,
            partial(theirs, *inputs), agreement="outputs",
            difference="" if _is_equal(ours(*inputs), theirs(*inputs)) else "outputs differ",
            number=200, repeats=_REPEATS,
        )  # fmt: skip


def _compare_sharding(peer: Any, name: str, number: int, groups: dict[str, Any]) -> Row:
    peer_config = megatron("transformer").TransformerConfig
    ours = _make_layers(MegatronModule, TransformerConfig(**_SMALL), number)
    theirs = _make_layers(peer.MegatronModule, peer_config(**_SMALL), number)
    places = _list_places(ours.sharded_state_dict(metadata=dict(groups)))
    is_same = places == _list_places(theirs.sharded_state_dict(metadata=dict(groups)))
    entry_us = 1e6 / len(places)
    return compare(
        f"sharded_state_dict, {number} layers on meta",
        lambda: ours.sharded_state_dict(metadata=groups), name,
        lambda: theirs.sharded_state_dict(metadata=groups), 1.0, agreement=f"{len(places)} entries",
        difference="" if is_same else "keys, shapes, offsets or replica ids differ",
        number=max(1, 1000 // number),
        note=lambda a, b: f"{a * entry_us:.3g} us an entry against {b * entry_us:.3g}",
    )  # fmt: skip


def _make_layers(kind: Any, config: Any, number: int) -> Any:
    model = kind(config)
    for place in range(number):
        layer = kind(config)
        layer.linear = nn.Linear(4, 4, device="meta")
        layer.norm = nn.LayerNorm(4, device="meta")
        model.add_module(f"layer{place}", layer)
    return model


def _list_places(sharded: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {
        key: (entry.key, entry.global_shape, entry.global_offset, entry.replica_id)
        for key, entry in sharded.items()
    }


@contextmanager
def _make_world() -> Iterator[dict[str, Any]]:
    """A process group of this process alone, registered with the peer. Yields its metadata."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with megatron_groups():
            group = megatron("parallel_state").get_data_parallel_group(with_context_parallel=True)
            yield {"dp_cp_group": group}
    finally:
        dist.destroy_process_group()


class _NoGraph:
    """A graph that replays nothing: only the code around a replay is timed."""

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


def _compare_replay() -> Row:
    """A checked replay against a bare autograd node over the same memory, without a device."""
    layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    sample = torch.ones(2, 4, requires_grad=True)
    runner = TorchGraphRunner(device=_NoDevice())
    [graph] = runner.capture([GraphSpec(layer, layer.forward, (sample,))])
    x = torch.ones(2, 4, requires_grad=True)
    bare = _make_bare_graph(layer, sample)
    return compare(
        "replay of a layer of 16 parameters, forward", partial(graph, x), "a bare graphed call",
        partial(bare, x), 0.5, agreement="nothing to compare: no device runs",
        number=300, repeats=_REPEATS,
    )  # fmt: skip


def _make_bare_graph(layer: nn.Module, sample: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """The result of ``make_graphed_callables``, without its graphs."""
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
