"""The names of tensors in folders of Hugging Face, and the places of their elements."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore.parallel.checkpoint.errors import CheckpointingException
from mcore.parallel.checkpoint.sharded import Shape, ShardedTensor


@dataclass(frozen=True)
class HFTensor:
    """The place of a tensor of a state dict in a folder of Hugging Face.

    Attributes:
        names: One name, or a name for each part that the tensor is cut into. Parts with the same
            name follow each other in one stored tensor.
        ratio: The relative sizes of the parts. Empty means equal sizes.
        groups: How often the parts repeat in the tensor, such as once for each attention head.
        part: The tensor is only this part of the one stored tensor. There the parts repeat.
        axis: The axis of the parts, in the tensor of the state dict.
        transpose: The stored tensor has the last two axes swapped, as in the Conv1D of GPT-2. A
            tensor of one axis stays as it is.

    Example:
        >>> fused = HFTensor(("q.weight", "k.weight", "v.weight"), ratio=(4, 1, 1), groups=8)
        >>> transposed = HFTensor("transformer.h.0.mlp.c_fc.weight", transpose=True)
        >>> second_third = HFTensor("attn.c_attn.bias", ratio=(1, 1, 1), part=1)
    """

    names: str | Sequence[str]
    ratio: Sequence[int] = ()
    groups: int = 1
    part: int | None = None
    axis: int = 0
    transpose: bool = False

    @property
    def listed(self) -> list[str]:
        """The names as a list."""
        return [self.names] if isinstance(self.names, str) else list(self.names)

    def cut(self, shard: ShardedTensor, local: torch.Tensor) -> Iterator[ShardedTensor]:
        """Yield the parts of a rank's shard as shards of stored tensors, with views of its data."""
        whole, axis, ratio = shard.global_shape, self.axis, self.ratio or [1] * len(self.listed)
        own = sum(ratio) if self.part is None else ratio[self.part]
        names = self.listed if self.part is None else self.listed * len(ratio)
        unit, rest = divmod(prod(whole[axis : axis + 1]), self.groups * own)
        if (
            rest
            or axis not in range(len(whole) or 1)
            or shard.prepend_axis_num
            or len(names) != len(ratio)
        ):
            raise CheckpointingException(
                f"key {shard.key!r} of shape {whole} with {shard.prepend_axis_num} stacked axes "
                f"does not fit its entry in the mapping: {self}"
            )
        first, held = (shard.global_offset[axis], local.shape[axis]) if whole else (0, 1)
        for group, number in product(range(self.groups), range(len(ratio))):
            same = [one * (name == names[number]) for one, name in zip(ratio, names, strict=True)]
            at = unit * (group * sum(ratio) + sum(ratio[:number]))  # among all parts
            stored_at = unit * (self.groups * sum(same[:number]) + group * ratio[number])
            at, stored_at = (at, stored_at) if self.part is None else (unit * group * own, at)
            start, end = max(at, first), min(at + unit * ratio[number], first + held)
            if (start >= end and unit) or self.part not in (None, number):
                continue
            part = local.narrow(axis, start - first, end - start) if whole else local
            stored = copy.copy(shard)  # dataclasses.replace drops the mark of equal replicas
            stored.key, stored.axis_fragmentations = names[number], None
            stored.data = part.mT if self.transpose and part.ndim > 1 else part
            stored.local_shape = tuple(stored.data.shape)
            stored.global_shape = self._store(whole, unit * self.groups * sum(same))
            stored.global_offset = self._store(shard.global_offset, stored_at + start - at)
            yield stored

    def _store(self, numbers: Shape, number: int) -> Shape:
        """Return a shape or an offset in the stored tensor, with a number along the axis."""
        changed = list(numbers)
        changed[self.axis : self.axis + 1] = [number] * bool(numbers)
        return (*changed[:-2], *changed[:-3:-1]) if self.transpose else tuple(changed)


Rule = HFTensor | str | None
Names = Mapping[str, Rule] | Callable[[str], Rule] | None


def find_rule(mapping: Names, key: str) -> HFTensor | None:
    """Return the place of a key, or None if the mapping leaves it out."""
    if mapping is None or callable(mapping):
        found = key if mapping is None else mapping(key)
        return HFTensor(found) if isinstance(found, str) else found
    for pattern in (key, *mapping):
        match = re.fullmatch(re.escape(pattern).replace(r"\*", "([^.]+)"), key)
        if match and pattern in mapping:
            given = mapping[pattern]
            rule = HFTensor(given) if isinstance(given, str) else given
            names = rule.listed if rule else []
            for text in match.groups():
                names = [name.replace("*", text, 1) for name in names]
            return rule and replace(rule, names=names)
    raise CheckpointingException(
        f"the mapping has no name for key {key!r}. Add it, with None to leave it out"
    )


def llama_names(config: Mapping[str, Any]) -> dict[str, Rule]:
    """Return the names of transformers' Llama for the keys of megatron-core's ``GPTModel``.

    No communication. In the keys, query, key and value are fused for each group of heads, and so
    are gate and up. The dict may be changed for other models.

    Args:
        config: The content of the model's ``config.json``.

    Returns:
        A mapping for :func:`save_hf` and :func:`load_hf`. A tied head is left out.

    Example:
        >>> names = llama_names({"num_attention_heads": 8, "num_key_value_heads": 2})
        >>> names["decoder.layers.*.mlp.linear_fc2.*"]
        'model.layers.*.mlp.down_proj.*'
    """
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    is_tied = config.get("tie_word_embeddings", False)
    return _read_names("llama.json", (heads // groups, 1, 1), groups, is_tied)


def gpt2_names(config: Mapping[str, Any]) -> dict[str, Rule]:
    """Return the names of transformers' GPT-2 for the keys of megatron-core's ``GPTModel``.

    No communication. As :func:`llama_names`, with learned positions. GPT-2 stores transposed
    weights, and fused query, key and value one after the other.

    Args:
        config: The content of the model's ``config.json``.

    Returns:
        A mapping for :func:`save_hf` and :func:`load_hf`. A tied head is left out.

    Example:
        >>> gpt2_names({"n_head": 2})["decoder.final_layernorm.*"]
        'transformer.ln_f.*'
    """
    is_tied = config.get("tie_word_embeddings", True)
    return _read_names("gpt2.json", (1, 1, 1), config["n_head"], is_tied)


def _read_names(file: str, ratio: Sequence[int], groups: int, is_tied: bool) -> dict[str, Rule]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(file).read_bytes())
    for key, given in found.items():
        if isinstance(given, dict):
            fused = {"ratio": ratio, "groups": groups} if "linear_qkv" in key else {}
            found[key] = HFTensor(**{**given, **fused})
    return {**found, **({"output_layer.*": None} if is_tied else {})}
