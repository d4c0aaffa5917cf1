"""Nested state dicts: which leaves they have, how these are named, and that they are put back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore.parallel.checkpoint import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedTensor,
)
from mcore.parallel.checkpoint.planning.staging import digest_of
from mcore.parallel.checkpoint.state_tree import flatten_state_dict, rebuild_state_dict

Pair = namedtuple("Pair", ["first", "second"])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def shard(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2))


def test_leaves_are_named_by_their_way() -> None:
    state = {
        "lr": 0.1,
        "groups": [{"params": [0, 1], "betas": (0.9, 0.95)}, {"params": []}],
        "state": {0: {"step": torch.tensor(1)}},
        "mixed": [torch.ones(1), 2],
        "nothing": {},
    }
    entries = flatten_state_dict(state)
    assert list(entries.common) == [
        "groups.0.betas",
        "groups.0.params",
        "groups.1.params",
        "lr",
        "mixed.0",
        "mixed.1",
        "state.0.step",
    ]
    assert entries.common["groups.0.params"] == (("groups", 0, "params"), [0, 1])


def test_names_equal_those_of_torch() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as torchs

    state: dict[str, Any] = {
        "a": {"b": [1, [2, {"c": 3}]], "d": (torch.ones(1), 2), "e": [[1], [torch.ones(1)]]},
        "f": [],
        "g": [[], {}],
    }
    flat, _ = torchs(state)
    assert set(flatten_state_dict(state).common) == set(flat)


def test_kinds_are_told_apart_and_sorted_by_key() -> None:
    state = {
        "z": shard("a"),
        "y": [shard("b"), LocalNonpersistentObject(5)],
        "x": (shard("c"), 1),
    }
    entries = flatten_state_dict(state)
    assert [(path, s.key) for path, s in entries.tensors] == [
        (("z",), "a"),
        (("y", 0), "b"),
        (("x", 0), "c"),
    ]
    assert entries.local == [(("y", 1), 5)]
    assert entries.common == {"x.1": (("x", 1), 1)}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "two leaves of the state dict have the name 'a.b'"),
        ({1: 1, "1": 2}, "the name '1'"),
        ([1], "must be a dict, got list"),
        ({"net": torch.nn.Linear(1, 1)}, "'net' is a Linear"),
    ],
)
def test_ambiguous_state_is_refused(state: Any, text: str) -> None:
    with pytest.raises(CheckpointingException, match=text):
        flatten_state_dict(state)


def test_a_shard_whose_data_was_replaced_by_another_shape_is_refused() -> None:
    changed = shard("w")
    changed.data = torch.zeros(3)
    with pytest.raises(CheckpointingException, match="'w': local_shape"):
        flatten_state_dict({"w": changed})


def test_structure_and_types_of_containers_come_back() -> None:
    state = OrderedDict(a=[shard("w"), {"x": 1}], b=Pair(shard("v"), 2), c=(1, 2), d={})
    entries = flatten_state_dict(state)
    values: dict[Any, Any] = {path: s.key for path, s in entries.tensors}
    rebuilt = rebuild_state_dict(state, values)
    assert rebuilt == {"a": ["w", {"x": 1}], "b": Pair("v", 2), "c": (1, 2), "d": {}}
    assert isinstance(rebuilt["b"], Pair)
    assert rebuilt["a"] is not state["a"]


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3))
def test_plain_values_come_back_as_they_are(state: dict[str, Any]) -> None:
    try:
        entries = flatten_state_dict(state)
    except CheckpointingException:
        return  # two leaves of one name, which another test is about
    values = dict(entries.common.values())
    assert rebuild_state_dict(state, values) == state


@settings(deadline=None)
@given(PLAIN, PLAIN)
def test_digests_differ_exactly_where_values_do(one: Any, other: Any) -> None:
    assert (digest_of(one) == digest_of(other)) == (repr(sort(one)) == repr(sort(other)))


def sort(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sort(value[key]) for key in sorted(value)}
    return [sort(item) for item in value] if isinstance(value, list) else value


def test_digest_of_tensors_and_sets() -> None:
    ones = torch.ones(2, 3)
    assert digest_of(ones) == digest_of(torch.ones(3, 2).T)
    assert digest_of(ones) != digest_of(torch.ones(3, 2))
    assert digest_of(ones) != digest_of(ones.double())
    assert digest_of(ones.bfloat16()) == digest_of(ones.bfloat16().requires_grad_())
    assert digest_of(torch.tensor(1.0)) != digest_of(torch.tensor(2.0))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert digest_of(conjugate) == digest_of(torch.tensor([1 - 2j]))
    assert digest_of(conjugate) != digest_of(torch.tensor([1 + 2j]))
    assert digest_of({"a": ones, "b": [2]}) == digest_of({"b": [2], "a": ones.clone()})
    assert digest_of({"a": 1, "b": 2}) != digest_of({"a": 2, "b": 1})
    assert digest_of({"a", "b", "c"}) == digest_of({"c", "b", "a"})
    assert digest_of(torch.zeros(0)) == digest_of(torch.zeros(0))
    assert digest_of([1, 2]) != digest_of((1, 2))
    assert digest_of(1) != digest_of(True)
