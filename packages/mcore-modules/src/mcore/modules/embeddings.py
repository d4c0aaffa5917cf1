"""Embeddings that share their weight with the output layer, and how to untie them."""

from __future__ import annotations

from typing import Any

import torch

from mcore.modules.traversal import iter_modules
from mcore.modules.wrappers import (
    ModelList,
    ensure_model_list,
    iter_wrapped_models,
    refuse_data_parallel,
)


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
    for owner in clear_ties(chunks):
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


def clear_ties(chunks: ModelList) -> list[Any]:
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


_HAS_OUTPUT = "get_output_embeddings"  # the method by which models of transformers are known
