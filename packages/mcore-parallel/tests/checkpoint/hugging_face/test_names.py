"""Parts of tensors against the same cuts by plain torch, whatever shards the ranks hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore.parallel.checkpoint import CheckpointingException, HFTensor, gpt2_names, llama_names
from mcore.parallel.checkpoint.hugging_face.names import find_rule
from mcore.parallel.checkpoint.sharded import ShardedTensor


def store(rule: HFTensor, whole: torch.Tensor, borders: list[int]) -> dict[str, torch.Tensor]:
    """What a folder has of a tensor, put together from shards between rows."""
    found: dict[str, torch.Tensor] = {}
    rows = whole.shape[0]
    edges = sorted({0, rows, *(border % (rows + 1) for border in borders)})
    for start, end in pairwise(edges) if rows else [(0, 0)]:
        offset = (start, *[0] * (whole.ndim - 1))
        data = whole[start:end]
        shard = ShardedTensor("w", data, data.dtype, data.shape, whole.shape, offset, None)
        for part in rule.cut(shard, data):
            part.validate_metadata_integrity()
            box = found.setdefault(part.key, torch.full(part.global_shape, -1.0))
            inside = zip(part.global_offset, part.local_shape, strict=True)
            region = box[tuple(slice(first, first + size) for first, size in inside)]
            assert (region == -1).all()
            region.copy_(part.data)
    return found


borders = st.lists(st.integers(0, 1000), max_size=4)
sizes = st.integers(1, 4)


@given(groups=sizes, heads=sizes, size=sizes, width=sizes, borders=borders)
def test_fused_heads_become_three_tensors(
    groups: int, heads: int, size: int, width: int, borders: list[int]
) -> None:
    parts = torch.arange(1.0 * groups * (heads + 2) * size * width)
    parts = parts.view(groups, heads + 2, size, width)
    rule = HFTensor(("q", "k", "v"), ratio=(heads, 1, 1), groups=groups)
    found = store(rule, parts.reshape(-1, width), borders)
    assert torch.equal(found["q"], parts[:, :heads].reshape(-1, width))
    assert torch.equal(found["k"], parts[:, heads].reshape(-1, width))
    assert torch.equal(found["v"], parts[:, heads + 1].reshape(-1, width))


@given(heads=sizes, size=sizes, width=sizes, borders=borders)
def test_fused_heads_become_one_transposed_tensor(
    heads: int, size: int, width: int, borders: list[int]
) -> None:
    parts = torch.arange(3.0 * heads * size * width).view(heads, 3, size, width)
    rule = HFTensor(["c", "c", "c"], groups=heads, transpose=True)
    found = store(rule, parts.reshape(-1, width), borders)
    by_kind = [parts[:, kind].reshape(-1, width) for kind in range(3)]
    assert torch.equal(found["c"], torch.cat(by_kind).T)
    bias = parts[..., 0].reshape(-1)
    assert torch.equal(store(rule, bias, borders)["c"], torch.cat([one[:, 0] for one in by_kind]))


@given(groups=sizes, size=sizes, borders=borders)
def test_separate_tensors_are_parts_of_a_fused_one(
    groups: int, size: int, borders: list[int]
) -> None:
    whole = torch.arange(5.0 * groups * size).view(groups, 5, size)
    for number, (start, share) in enumerate(((0, 3), (3, 1), (4, 1))):
        rule = HFTensor("qkv", ratio=(3, 1, 1), groups=groups, part=number)
        own = whole[:, start : start + share].reshape(-1)
        found = store(rule, own, borders)["qkv"].view(groups, 5, size)
        assert torch.equal(found[:, start : start + share].reshape(-1), own)
        assert (found >= 0).sum() == own.numel()


def test_parts_may_be_along_another_axis() -> None:
    whole = torch.arange(24.0).view(4, 6)
    assert torch.equal(store(HFTensor(("a", "b"), axis=1), whole, [1])["b"], whole[:, 3:])
    turned = store(HFTensor(("a", "b"), axis=1, transpose=True), whole, [1, 3])
    assert torch.equal(turned["b"], whole[:, 3:].T)
    assert store(HFTensor("x"), torch.zeros(0, 3), [])["x"].shape == (0, 3)


def test_scalars_have_a_place_too() -> None:
    shard = ShardedTensor("w", torch.tensor(2.0), torch.float32, (), (), (), None)
    [part] = HFTensor("x").cut(shard, torch.tensor(2.0))
    assert (part.key, part.global_shape, part.data.item()) == ("x", (), 2.0)


@pytest.mark.parametrize(
    "rule",
    [
        HFTensor(("q", "k", "v")),
        HFTensor("q", axis=2),
        HFTensor("q", axis=-1),
        HFTensor(("q", "k"), ratio=(1, 1, 1)),
        HFTensor("q", groups=3),
    ],
)
def test_a_shape_that_does_not_fit_is_named(rule: HFTensor) -> None:
    with pytest.raises(CheckpointingException, match=r"key 'w' of shape \(4, 2\) .* HFTensor\("):
        store(rule, torch.zeros(4, 2), [])


def test_tables_and_functions_name_keys() -> None:
    table = {"layers.*.w": "h.*.x", "layers.3.w": None, "a.*.*": HFTensor(["*.b.*", "*.c.*"])}
    assert find_rule(table, "layers.12.w") == HFTensor(["h.12.x"])
    assert find_rule(table, "layers.3.w") is None
    assert find_rule(table, "a.1.2") == HFTensor(["1.b.2", "1.c.2"])
    assert find_rule(str.upper, "w") == HFTensor("W")
    assert find_rule(lambda key: None, "w") is None
    assert find_rule(None, "x.*") == HFTensor("x.*")
    for key in ("layers.1.2.w", "layersx1.w", "other"):
        with pytest.raises(CheckpointingException, match=f"no name for key '{key}'"):
            find_rule(table, key)


def test_shipped_tables_follow_the_config() -> None:
    qkv = "decoder.layers.3.self_attention.linear_qkv"
    llama = llama_names({"num_attention_heads": 8, "num_key_value_heads": 2})
    rule = find_rule(llama, f"{qkv}.bias")
    assert rule is not None
    assert (rule.listed[1], rule.groups) == ("model.layers.3.self_attn.k_proj.bias", 2)
    assert tuple(rule.ratio) == (4, 1, 1)
    norm = find_rule(llama, f"{qkv}.layer_norm_weight")
    assert norm == HFTensor(["model.layers.3.input_layernorm.weight"])
    assert find_rule(llama, f"{qkv}._extra_state") is None
    assert find_rule(llama, "output_layer.weight") == HFTensor(["lm_head.weight"])
    assert find_rule(gpt2_names({"n_head": 2}), "output_layer.weight") is None
