import pytest
import torch

from mcore.modules.float16 import add_wrapper_to_keys, without_wrapper_in_keys

OWN = {"weight", "bias"}
OWN_WITH_MODULE = {"module.weight", "weight"}


def added(keys, own, prefix="child."):
    state = dict.fromkeys([prefix + key for key in keys] + ["other.weight"], 0)
    add_wrapper_to_keys(state, prefix, lambda: own)
    return set(state) - {"other.weight"}


@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        (["weight", "bias"], OWN, ["module.weight", "module.bias"]),
        (["module.weight", "module.bias"], OWN, ["module.weight", "module.bias"]),
        (["weight", "unknown"], OWN, ["module.weight", "module.unknown"]),
        (["module.weight", "weight"], OWN_WITH_MODULE, ["module.module.weight", "module.weight"]),
        (
            ["module.module.weight", "module.weight"],
            OWN_WITH_MODULE,
            ["module.module.weight", "module.weight"],
        ),
        (["module.module.weight"], OWN, ["module.module.weight"]),
        ([], OWN, []),
    ],
)
def test_keys_for_the_parent(keys, own, expected):
    assert added(keys, own) == {"child." + key for key in expected}


@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        (["weight", "bias"], OWN, ["weight", "bias"]),
        (["module.weight", "module.bias"], OWN, ["weight", "bias"]),
        (["module.weight", "weight"], OWN_WITH_MODULE, ["module.weight", "weight"]),
        (["module.module.weight", "module.weight"], OWN_WITH_MODULE, ["module.weight", "weight"]),
    ],
)
def test_keys_for_the_wrapped_module(keys, own, expected):
    assert list(without_wrapper_in_keys(dict.fromkeys(keys, 0), lambda: own)) == expected


def test_versions_are_renamed_with_the_keys():
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    state = without_wrapper_in_keys(wrapper.state_dict(), lambda: set(wrapper.module.state_dict()))
    assert state._metadata == wrapper.module.state_dict()._metadata


def test_keys_of_the_wrapped_module_are_asked_for_only_in_doubt():
    def fail():
        raise AssertionError("asked")

    state = {"child.weight": 0}
    add_wrapper_to_keys(state, "child.", fail)
    assert without_wrapper_in_keys(state, fail) is state
