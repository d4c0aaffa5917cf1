import sys
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    LinearForLastLayer,
    _register_linear_for_last_layer_mapping,
    get_module_parallelism,
    register_module_parallelism,
)


def test_subclasses_count():
    class ColumnThing(torch.nn.Module):
        pass

    class Special(ColumnThing):
        pass

    register_module_parallelism("ColumnThing", "column")
    register_module_parallelism("ColumnThing", "column")
    assert get_module_parallelism(Special()) == get_module_parallelism("ColumnThing") == "column"
    assert get_module_parallelism("Special") is None
    register_module_parallelism("Special", "row")
    assert get_module_parallelism(Special()) == "row"


def test_conflicts_and_unknown_kinds_are_refused():
    register_module_parallelism("Fixed", "row")
    with pytest.raises(ValueError, match="'row', not 'column'"):
        register_module_parallelism("Fixed", "column")
    with pytest.raises(ValueError, match="'diagonal'"):
        register_module_parallelism("Other", "diagonal")
    assert get_module_parallelism("Other") is None


def test_the_value_head_is_replicated():
    _register_linear_for_last_layer_mapping()
    _register_linear_for_last_layer_mapping()
    assert get_module_parallelism(LinearForLastLayer(2, 1, False)) == "replicated"


def test_an_imported_bridge_is_told_too(monkeypatch):
    told = []
    mapping = SimpleNamespace(register_module_type=lambda *arguments: told.append(arguments))
    name = "megatron.bridge.models.conversion.param_mapping"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(AutoMapping=mapping))
    _register_linear_for_last_layer_mapping()
    assert told == [("LinearForLastLayer", "replicated")]
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    _register_linear_for_last_layer_mapping()
