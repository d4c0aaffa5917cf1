"""Value heads, hooks that add them to a model's last stage, and untied embeddings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from mcore.modules.last_layer import LinearForLastLayer, _register_linear_for_last_layer_mapping
from mcore.modules.precision import keep_in_fp32
from mcore.modules.traversal import has_own_attribute, iter_modules
from mcore.modules.wrappers import (
    ModelList,
    configured_size,
    ensure_model_list,
    find_group,
    find_in_wrapped_models,
    iter_wrapped_models,
    refuse_data_parallel,
)
from mcore.parallel.groups import get_pg_rank, get_pg_size, get_pg_src_rank

_HAS_OUTPUT = "get_output_embeddings"  # the method by which models of transformers are known


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
    bias: bool = False,
    dropout: float = 0.0,
    fp32_head: bool = False,
    init_method: Callable[[torch.Tensor], Any] | None = None,
) -> Callable[[Any], ModelList]:
    """Return a hook that replaces the output layer of the last pipeline stage by a value head.

    The hook must run on all stages, before the model is wrapped for data parallelism. Other
    wrappers are allowed. The head has the device and dtype of the replaced layer, else of the
    model's first parameter. Embeddings tied to the output layer are untied on all stages, see
    :func:`untie_embeddings`. All tensor-parallel ranks of the last stage must call the hook: with
    ``broadcast_init`` it broadcasts the head from the group's first rank, since the random numbers
    of the ranks may differ.

    Args:
        hidden_size: Width of the last hidden states.
        sequence_parallel: They are split along the sequence over the tensor-parallel group.
        output_size: Number of outputs.
        pp_group: The pipeline group. Default: that of ``pg_collection``, of the chunk's
            ``pg_collection``, else of the default ProcessGroups. Without a group, the chunk's
            boolean ``post_process`` decides. Without both, the chunk is the last stage.
        vp_size: Chunks per pipeline rank, None for one.
        tp_group: The head's tensor-parallel group. Default: that of ``pg_collection``, of the
            chunk's ``pg_collection``, else of the default ProcessGroups.
        pg_collection: The process groups of this rank.
        output_layer_path: Dotted path of the output layer below a chunk. The layer may be None. In
            a model of transformers the head returns its tensor alone, which becomes the logits.
        broadcast_init: Make the head equal on all tensor-parallel ranks. False for a head on the
            meta device: it needs no group.
        bias: Add a bias to the head.
        dropout: Probability of dropping an input of the head in training.
        fp32_head: Make the head in float32 and keep it in float32 when the model is cast.
        init_method: Fills the weight in place, None for that of ``torch.nn.Linear``.

    Returns:
        ``hook(model)``, which changes a model or a list of chunks in place and returns the list.
        It raises TypeError for a chunk that is wrapped for data parallelism, and ValueError if the
        number of chunks is wrong, the path does not exist, or the chunk's configuration has
        tensor-parallel ranks or pipeline stages and their group is unknown.

    Raises:
        ValueError: A size is not a whole number >= 1, or ``dropout`` is not a probability.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(output_layer=None)
        >>> hook = create_value_head_hook(4, sequence_parallel=False)
        >>> hook(model) == [model], model.output_layer.out_features
        (True, 1)
    """
    for name, size in (("hidden_size", hidden_size), ("output_size", output_size)):
        if not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} is {size!r}. Pass a whole number >= 1")
    torch.nn.Dropout(dropout)  # raises now, not in the hook, if it is not a probability
    _register_linear_for_last_layer_mapping()
    make = partial(
        LinearForLastLayer,
        hidden_size,
        output_size,
        sequence_parallel,
        bias,
        dropout,
        init_method=init_method,
    )

    # Not a function in this function: a hook can be pickled, for another process.
    return partial(
        _replace_output_layers,
        make=make,
        pp_group=pp_group,
        vp_size=vp_size,
        tp_group=tp_group,
        pg_collection=pg_collection,
        path=output_layer_path,
        broadcasts=broadcast_init,
        in_fp32=fp32_head,
    )


def _replace_output_layers(
    model: Any,
    *,
    make: Callable[..., LinearForLastLayer],
    pp_group: Any,
    vp_size: int | None,
    tp_group: Any,
    pg_collection: Any,
    path: str,
    broadcasts: bool,
    in_fp32: bool,
) -> ModelList:
    chunks = ensure_model_list(model)
    refuse_data_parallel(chunks)
    last = _choose_last_chunks(chunks, pp_group, pg_collection, vp_size)
    # Before the first change: an unknown group or path must leave the model as it was.
    groups = [_find_tp_group(chunk, tp_group, pg_collection, broadcasts) for chunk in last]
    owners = [_find_owner(chunk, path) for chunk in last]
    _clear_ties(chunks)
    for chunk, group, (owner, name) in zip(last, groups, owners, strict=True):
        head = _make_like(owner, name, chunk, make, group, in_fp32)
        if broadcasts:
            _broadcast(head)
        setattr(owner, name, head)
    return chunks


def make_value_model(
    hidden_size: int, sequence_parallel: bool, **options: Any
) -> Callable[[Any], ModelList]:
    """Return :func:`create_value_head_hook` for one output.

    Args:
        hidden_size: Width of the last hidden states.
        sequence_parallel: They are split along the sequence over the tensor-parallel group.
        **options: Its keyword-only options, such as ``bias`` or ``fp32_head``.

    Returns:
        The hook.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(output_layer=None)
        >>> make_value_model(4, False)(model)[0].output_layer.out_features
        1
    """
    return create_value_head_hook(hidden_size, sequence_parallel, **options)


def untie_embeddings(model: Any) -> ModelList:
    """Give output layers separate weights if they share the weight of the embedding.

    Clears ``share_embeddings_and_output_weights`` on every module that has it: the output weight
    is then saved under a separate key, and its gradient is no longer added to that of the
    embedding. Also clears ``tie_word_embeddings`` in the configurations of models with
    ``get_output_embeddings()``, as in transformers. If embedding and output are on one stage, the
    output layer gets a copy of the embedding's weight. Call it on all pipeline stages, before the
    model is wrapped for data parallelism. No communication.

    Args:
        model: A model or a list of chunks.

    Returns:
        The list of the given chunks.

    Raises:
        TypeError: ``model`` is None, or a chunk is wrapped for data parallelism.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(share_embeddings_and_output_weights=True)
        >>> untie_embeddings(model)[0].share_embeddings_and_output_weights
        False
    """
    chunks = ensure_model_list(model)
    refuse_data_parallel(chunks)
    for owner in _clear_ties(chunks):
        if hasattr(type(owner), _HAS_OUTPUT):
            output, layer = owner.get_output_embeddings(), owner.get_input_embeddings()
        else:
            output = getattr(owner, "output_layer", None)
            layer = getattr(getattr(owner, "embedding", None), "word_embeddings", None)
        if output is None:
            continue
        # Megatron's tied output layer has no weight: it gets that of the embedding at each call.
        weight = getattr(output, "weight", None)
        embedding = getattr(layer, "weight", None)
        is_tied = weight is None or weight is embedding
        if is_tied and isinstance(embedding, torch.Tensor):
            output.weight = torch.nn.Parameter(embedding.detach().clone(), embedding.requires_grad)
            vars(output.weight).update(vars(embedding))
        if output.weight is not None:
            for mark in ("shared", "shared_embedding"):
                vars(output.weight).pop(mark, None)
    return chunks


def _clear_ties(chunks: ModelList) -> list[Any]:
    """Clear the mark of tied embeddings wherever it is set, and return the owners."""
    owners = []
    for chunk in chunks:
        for model in iter_wrapped_models(chunk):
            parts = iter_modules(model) if isinstance(model, torch.nn.Module) else (model,)
            owners += [part for part in parts if _clear_tie(part)]
    return owners


def _clear_tie(part: Any) -> bool:
    held = vars(part)
    if held.get("share_embeddings_and_output_weights"):
        part.share_embeddings_and_output_weights = False
        return True
    config = held.get("config")
    if hasattr(type(part), _HAS_OUTPUT) and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        return True
    return False


def _choose_last_chunks(
    chunks: ModelList, pp_group: Any, pg_collection: Any, vp_size: int | None
) -> ModelList:
    group = pp_group
    if group is None and chunks:
        group = find_group("pp", chunks[0], pg_collection)
    pp_size = get_pg_size(group)
    expected = vp_size if pp_size > 1 and vp_size is not None else 1
    if len(chunks) != expected:
        raise ValueError(
            f"Model list length is {len(chunks)}, but {expected} expected with {pp_size} pipeline "
            f"ranks and vp_size {vp_size}"
        )
    if group is not None:
        return chunks[-1:] if get_pg_rank(group) == pp_size - 1 else []
    is_last = find_in_wrapped_models(chunks[0], "post_process")
    stages = configured_size(chunks[0], "pipeline")
    if not isinstance(is_last, bool) and stages > 1:
        raise ValueError(
            f"the configuration has {stages} pipeline stages, and without a pipeline group or "
            "post_process the last one is unknown. Pass pp_group or a pg_collection with pp"
        )
    return chunks if is_last is not False else []


def _find_tp_group(chunk: Any, given: Any, pg_collection: Any, broadcast: bool) -> Any:
    """Return the head's group. ValueError if it is unknown: ranks would make different heads."""
    group = given if given is not None else find_group("tp", chunk, pg_collection)
    ranks = configured_size(chunk, "tensor")
    if group is None and broadcast and ranks > 1:
        raise ValueError(
            f"the configuration has {ranks} tensor-parallel ranks, and each would make a "
            "different head. Pass tp_group or a pg_collection with tp, or call "
            "set_default_process_groups()"
        )
    return group


def _find_owner(chunk: Any, path: str) -> tuple[Any, str]:
    """Return the module inside all wrappers that has or will have the output layer."""
    *parents, name = path.split(".")
    models = list(iter_wrapped_models(chunk))
    first = path.partition(".")[0]
    owner = next((model for model in models if has_own_attribute(model, first)), models[-1])
    if not has_own_attribute(owner, first) and hasattr(owner, first):
        raise ValueError(
            f"{type(owner).__name__} only forwards {first!r} to a model inside, which would not "
            "use the head. Pass that model, or name its attribute with register_model_wrapper()"
        )
    for parent in parents:
        below = getattr(owner, parent, None)
        if below is None:
            raise _make_path_error(path, chunk, parent)
        owner = below
    # A layer that is None is replaced: a model with the attribute reads it. Plain objects read any.
    if isinstance(owner, torch.nn.Module) and not hasattr(owner, name):
        raise _make_path_error(path, owner, name)
    return owner, name


def _make_path_error(path: str, owner: Any, name: str) -> ValueError:
    children = list(getattr(owner, "_modules", vars(owner)))
    return ValueError(
        f"output_layer_path {path!r} does not exist: {type(owner).__name__} has no {name!r}, so "
        f"nothing would call the head. It has {children}"
    )


def _make_like(
    owner: Any,
    name: str,
    chunk: Any,
    make: Callable[..., LinearForLastLayer],
    group: Any,
    in_fp32: bool,
) -> LinearForLastLayer:
    """Make the head with device, dtype and mode of the replaced layer."""
    replaced = getattr(owner, name, None)
    like = getattr(replaced, "weight", None)
    if not isinstance(like, torch.Tensor):
        like = next(chunk.parameters(), None) if isinstance(chunk, torch.nn.Module) else None
    place = {} if like is None else {"device": like.device, "dtype": like.dtype}
    if in_fp32:
        place["dtype"] = torch.float32
    head = make(tp_group=group, **place)
    if any(cls.__module__.partition(".")[0] == "transformers" for cls in type(owner).__mro__):
        head.register_forward_hook(_return_tensor)  # the model returns it as its logits
    # In evaluation the head must not start to drop inputs.
    head.train(getattr(replaced, "training", getattr(chunk, "training", True)))
    return keep_in_fp32(head, *dict(head.named_parameters())) if in_fp32 else head


def _return_tensor(head: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, None]) -> Any:
    return output[0]


def _broadcast(head: LinearForLastLayer) -> None:
    if get_pg_size(head.tp_group) == 1:
        return
    if head.weight.is_meta:
        raise ValueError(
            "a head on the meta device has no values to broadcast. Pass broadcast_init=False"
        )
    source = get_pg_src_rank(head.tp_group)
    for parameter in head.parameters():
        dist.broadcast(parameter.detach(), src=source, group=head.tp_group)
        torch.autograd.graph.increment_version(parameter)  # a collective does not
