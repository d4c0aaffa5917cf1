from types import SimpleNamespace

import pytest
import torch

from mcore.tensor import (
    ensure_params_ready,
    mark_param_shared,
    param_is_not_shared,
    param_is_shared,
)
from mcore.tensor.param_flags import PARAM_READY_CALLBACK_ATTR


@pytest.mark.parametrize(
    ("attributes", "shared"),
    [
        ({}, False),
        ({"shared": False}, False),
        ({"shared": 1}, True),
        ({"shared": True}, True),
        ({"shared": None}, False),
        ({"shared": ""}, False),
    ],
)
@pytest.mark.parametrize("make", [lambda: torch.nn.Parameter(torch.ones(2)), SimpleNamespace])
def test_the_mark_is_the_attribute(make, attributes, shared):
    param = make()
    for name, value in attributes.items():
        setattr(param, name, value)
    assert param_is_shared(param) is shared
    assert param_is_not_shared(param) is not shared


def test_objects_without_attributes_are_not_shared():
    assert param_is_not_shared(object()) is True
    assert param_is_not_shared(None) is True


def test_marking_and_unmarking():
    param = torch.nn.Parameter(torch.ones(2))
    mark_param_shared(param)
    assert param.shared is True
    assert param_is_not_shared(param) is False
    mark_param_shared(param, False)
    assert param.shared is False
    assert param_is_not_shared(param) is True


def test_the_mark_can_be_read_while_compiling():
    weight = torch.nn.Parameter(torch.ones(2))
    mark_param_shared(weight)

    def norm(x):
        return x * 2 if param_is_not_shared(weight) else x * 0

    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [0.0, 0.0]


def test_each_ready_callback_runs_once_in_order():
    seen = []
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]

    def first():
        seen.append("first")

    for index, callback in ((0, first), (2, lambda: seen.append("second")), (3, first)):
        setattr(params[index], PARAM_READY_CALLBACK_ATTR, callback)
    ensure_params_ready(iter(params))
    assert seen == ["first", "second"]
    assert PARAM_READY_CALLBACK_ATTR == "_ensure_param_ready_callback"
