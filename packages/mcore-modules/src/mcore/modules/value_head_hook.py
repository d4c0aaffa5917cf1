"""Hooks that put a value head into the last stage of a model before it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from mcore.modules.inspection import find_in_wrapped_models
from mcore.modules.model_list import ModelList, ensure_model_list
from mcore.modules.module_parallelism import _register_linear_for_last_layer_mapping
from mcore.modules.value_head import LinearForLastLayer
from mcore.modules.wrappers import is_data_parallel_wrapper, iter_wrapped_models, unwrap_model
from mcore.parallel.groups import get_pg_rank, get_pg_size, get_pg_src_rank
from mcore.parallel.process_groups import get_default_process_groups

__all__ = ["create_value_head_hook", "make_value_model"]


def create_value_head_hook(
    hidden_size: int,
    sequence_parallel: bool,
    output_size: int = 1,
    *,
    pp_group: Any = None,
    vp_size: int | None = None,
    tp_group: Any = None,
    pg_collection: Any = None,
    output_layer_path: str = "output_layer",
    broadcast_init: bool = True,
) -> Callable[[Any], ModelList]:
    """Return a hook that replaces the output layer of the last pipeline stage by a value head.

    The hook must run before the model is wrapped for data parallelism. The head lies on the device
    and has the dtype of the layer it replaces, else of the model's first parameter. All
    tensor-parallel ranks of the last stage must call the hook: with ``broadcast_init`` it
    broadcasts the head from the group's first rank, since random numbers may differ between them.

    Args:
        hidden_size: Width of the last hidden states.
        sequence_parallel: They are split along the sequence over the tensor-parallel group.
        output_size: Number of outputs.
        pp_group: The pipeline group. Default: that of ``pg_collection``, else of the chunk's.
            Without one, a chunk's boolean ``post_process`` decides, else it is the last.
        vp_size: Chunks per pipeline rank; None for one.
        tp_group: The head's tensor-parallel group. Default: that of ``pg_collection``, of the
            chunk's, else of the default ProcessGroups.
        pg_collection: The process groups of this rank.
        output_layer_path: Dotted path of the output layer below a chunk.
        broadcast_init: Make the head equal on all tensor-parallel ranks. False for a build on the
            meta device.

    Returns:
        ``hook(model)``, which takes a model or a list of chunks, changes it in place and returns
        the list. It raises TypeError for a chunk that is wrapped for data parallelism, and
        ValueError where the number of chunks does not fit or the path leads nowhere.

    Raises:
        ValueError: A size is no whole number >= 1.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(output_layer=None)
        >>> hook = create_value_head_hook(4, sequence_parallel=False)
        >>> hook(model) == [model], model.output_layer.out_features
        (True, 1)
    """
    for name, size in (("hidden_size", hidden_size), ("output_size", output_size)):
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} is {size!r}; give a whole number >= 1")
    _register_linear_for_last_layer_mapping()

    def hook(model: Any) -> ModelList:
        chunks = ensure_model_list(model)
        _refuse_data_parallel(chunks)
        for chunk in _last_chunks(chunks, pp_group, pg_collection, vp_size):
            group = _group_of("tp", chunk, tp_group, pg_collection, get_default_process_groups())
            make = _head_maker(hidden_size, output_size, sequence_parallel, group)
            _replace_layer(unwrap_model(chunk), output_layer_path, make, broadcast_init)
        return chunks

    return hook


def make_value_model(hidden_size: int, sequence_parallel: bool) -> Callable[[Any], ModelList]:
    """Return :func:`create_value_head_hook` for one output.

    Args:
        hidden_size: Width of the last hidden states.
        sequence_parallel: They are split along the sequence over the tensor-parallel group.

    Returns:
        The hook.

    Example:
        >>> from types import SimpleNamespace
        >>> make_value_model(4, False)(SimpleNamespace())[0].output_layer.out_features
        1
    """
    return create_value_head_hook(hidden_size, sequence_parallel)


def _refuse_data_parallel(chunks: ModelList) -> None:
    for chunk in chunks:
        for model in iter_wrapped_models(chunk):
            if is_data_parallel_wrapper(model):
                raise TypeError(
                    f"a chunk is wrapped in {type(model).__name__}, which would not know the "
                    "head's parameters; run the hook before wrapping"
                )


def _group_of(name: str, chunk: Any, given: Any, *collections: Any) -> Any:
    """The group that is given, else that of the first collection which has it."""
    own = find_in_wrapped_models(chunk, "pg_collection")
    sources = (collections[0], own, *collections[1:])
    candidates = (given, *(getattr(source, name, None) for source in sources))
    return next((group for group in candidates if group is not None), None)


def _last_chunks(
    chunks: ModelList, pp_group: Any, pg_collection: Any, vp_size: int | None
) -> ModelList:
    group = _group_of("pp", chunks[0], pp_group, pg_collection) if chunks else pp_group
    pp_size = get_pg_size(group)
    expected = vp_size if pp_size > 1 and vp_size is not None else 1
    if len(chunks) != expected:
        raise ValueError(
            f"Model list length is {len(chunks)}, but {expected} expected with {pp_size} pipeline "
            f"ranks and vp_size {vp_size}"
        )
    if group is None:
        is_last = find_in_wrapped_models(chunks[0], "post_process")
        return chunks if is_last is not False else []
    return chunks[-1:] if get_pg_rank(group) == pp_size - 1 else []


_Make = Callable[..., LinearForLastLayer]


def _head_maker(
    hidden_size: int, output_size: int, sequence_parallel: bool, tp_group: Any
) -> _Make:
    def make(device: torch.device | None, dtype: torch.dtype | None) -> LinearForLastLayer:
        return LinearForLastLayer(
            hidden_size,
            output_size,
            sequence_parallel,
            tp_group=tp_group,
            device=device,
            dtype=dtype,
        )

    return make


def _replace_layer(chunk: Any, path: str, make: _Make, broadcast: bool) -> None:
    owner, name = _owner_of(chunk, path)
    replaced = getattr(owner, name, None)
    like = _tensor_like(replaced, chunk)
    head = make(None, None) if like is None else make(like.device, like.dtype)
    head.train(getattr(replaced, "training", getattr(chunk, "training", True)))
    if broadcast:
        _broadcast(head)
    setattr(owner, name, head)


def _owner_of(chunk: Any, path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    owner = chunk
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            raise ValueError(
                f"output_layer_path {path!r} leads nowhere at {parent!r} of {type(chunk).__name__}"
            )
    return owner, name


def _tensor_like(replaced: Any, chunk: Any) -> torch.Tensor | None:
    """A tensor with the device and dtype for the head."""
    weight = getattr(replaced, "weight", None)
    if isinstance(weight, torch.Tensor):
        return weight
    return next(chunk.parameters(), None) if isinstance(chunk, torch.nn.Module) else None


def _broadcast(head: LinearForLastLayer) -> None:
    if get_pg_size(head.tp_group) == 1:
        return
    if head.weight.is_meta:
        raise ValueError(
            "a head on the meta device has no values to broadcast; give broadcast_init=False"
        )
    source = get_pg_src_rank(head.tp_group)
    for parameter in head.parameters():
        dist.broadcast(parameter.detach(), src=source, group=head.tp_group)
