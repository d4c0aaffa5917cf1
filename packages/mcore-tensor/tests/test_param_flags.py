from types import SimpleNamespace

import pytest
import torch

from mcore.tensor import mark_param_shared, param_is_not_shared, param_is_shared


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
