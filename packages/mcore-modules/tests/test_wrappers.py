import copy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    AttributeNotFoundError,
    Float16Module,
    ModelListError,
    ModelType,
    _ensure_model_list,
    ensure_model_list,
    find_megatron_fsdp,
    get_attr_wrapped_model,
    get_model_config,
    get_model_type,
    get_model_xattn,
    is_submodule,
    register_model_wrapper,
    unwrap_model,
)
from rank_testing import run_ranks

CONFIG = SimpleNamespace(bf16=True)


def wrapped(**attributes):
    inner = SimpleNamespace(**attributes)
    return SimpleNamespace(module=SimpleNamespace(module=inner)), inner


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class HandsOn(Wrapper):
    """Looks up every attribute that it lacks on the wrapped model."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@pytest.mark.parametrize("kind", ["buffer", "parameter", "child"])
def test_a_forwarding_wrapper_owns_its_tensors_and_children(kind):
    model, inner = torch.nn.Module(), torch.nn.Linear(1, 1)
    model._orig_mod = inner  # as torch.compile does
    for each in (model, inner):
        value = torch.nn.Identity() if kind == "child" else torch.zeros(1)
        if kind == "buffer":
            each.register_buffer("mark", value)
        else:
            each.mark = torch.nn.Parameter(value) if kind == "parameter" else value
    assert get_attr_wrapped_model(model, "mark", return_model_obj=True) is model


def test_first_object_that_has_the_attribute():
    model, inner = wrapped(a=None)
    assert get_attr_wrapped_model(model, "a") is None
    assert get_attr_wrapped_model(model, "a", return_model_obj=True) is inner
    with pytest.raises(AttributeNotFoundError, match="'a'"):
        get_attr_wrapped_model(model, "a", allow_none=False)


def test_outer_attribute_comes_first_unless_it_is_none():
    model = SimpleNamespace(a=None, module=SimpleNamespace(a=2, module=SimpleNamespace(a=3)))
    assert get_attr_wrapped_model(model, "a") is None
    assert get_attr_wrapped_model(model, "a", allow_none=False) == 2
    assert get_attr_wrapped_model(model, "a", False, True) is model.module


def test_no_model_has_no_attribute():
    with pytest.raises(AttributeNotFoundError, match="model is None"):
        get_attr_wrapped_model(None, "a")
    assert get_model_xattn(None) is False


def test_error_names_the_attribute_and_the_types_on_the_way():
    model = Wrapper(Float16Module(CONFIG, torch.nn.Linear(1, 1)))
    with pytest.raises(AttributeNotFoundError) as caught:
        get_attr_wrapped_model(model, "missing")
    assert isinstance(caught.value, RuntimeError)
    assert "'missing'" in str(caught.value)
    assert "Wrapper -> Float16Module -> Linear" in str(caught.value)


@pytest.mark.parametrize("models", [[], [SimpleNamespace(config=1)], (SimpleNamespace(),)])
@pytest.mark.parametrize(
    "question",
    [
        get_model_config,
        get_model_type,
        get_model_xattn,
        lambda models: get_attr_wrapped_model(models, "a"),
    ],
)
def test_lists_of_models_are_refused(question, models):
    with pytest.raises(ModelListError) as caught:
        question(models)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, TypeError)


def test_a_cycle_is_an_error():
    model = SimpleNamespace(found=1)
    model.module = model
    assert get_attr_wrapped_model(model, "found") == 1
    with pytest.raises(RuntimeError, match="contains itself"):
        get_attr_wrapped_model(model, "missing")


def test_parameters_buffers_and_children_are_attributes():
    model = Wrapper(torch.nn.BatchNorm1d(2))
    assert get_attr_wrapped_model(model, "weight") is model.module.weight
    assert get_attr_wrapped_model(model, "running_mean") is model.module.running_mean


def test_compiled_models_are_looked_into():
    inner = torch.nn.Linear(3, 1)
    compiled = torch.compile(Wrapper(inner))
    assert get_attr_wrapped_model(compiled, "in_features", return_model_obj=True) is inner


def test_wrappers_that_hand_on_attributes_find_the_value():
    inner = torch.nn.Linear(3, 1)
    assert get_attr_wrapped_model(HandsOn(inner), "in_features") == 3
    assert get_attr_wrapped_model(Wrapper(HandsOn(inner)), "weight") is inner.weight


def test_a_property_that_raises_is_no_missing_attribute():
    class Broken:
        @property
        def xattn_needed(self):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        get_model_xattn(Broken())


def test_model_type_xattn_and_config():
    model, _ = wrapped(model_type=ModelType.encoder_or_decoder, xattn_needed="yes", config=5)
    assert get_model_type(model) is ModelType.encoder_or_decoder
    assert get_model_xattn(model) == "yes"
    assert get_model_config(model) == 5
    assert get_model_xattn(SimpleNamespace()) is False
    assert ModelType.encoder_or_decoder.value == 1


def test_config_of_wrappers_that_have_none():
    model = SimpleNamespace(config=None, module=SimpleNamespace(config="c"))
    assert get_model_config(model) == "c"
    with pytest.raises(AttributeNotFoundError, match="config"):
        get_model_config(SimpleNamespace(config=None))


def test_unwrap_lists_tuples_and_single_models():
    model = torch.nn.Linear(1, 1)
    wrapper = Float16Module(CONFIG, model)
    unwrapped = unwrap_model([wrapper, model])
    assert type(unwrapped) is list
    assert unwrapped[0] is unwrapped[1] is model
    assert unwrap_model((wrapper,)) == (model,)
    assert unwrap_model(wrapper) is model
    assert unwrap_model([]) == []


def test_unwrap_every_usual_wrapper():
    model = torch.nn.Linear(1, 1)
    for wrap in (
        lambda m: Float16Module(CONFIG, m),
        torch.nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        torch.compile,
    ):
        once = wrap(model)
        inner = unwrap_model(once)
        assert type(inner) is torch.nn.Linear
        assert unwrap_model(torch.nn.DataParallel(once)) is inner
    assert unwrap_model(torch.compile(model)) is model


def look_into_data_parallel_wrappers():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = torch.nn.Linear(3, 1)
    wrappers = (
        torch.nn.parallel.DistributedDataParallel,
        partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
    )
    found = []
    for wrap in wrappers:
        wrapped = wrap(copy.deepcopy(model))
        inner = wrapped.module
        found.append(unwrap_model(wrapped) is inner)
        found.append(get_attr_wrapped_model(wrapped, "in_features", return_model_obj=True) is inner)
    return found


def test_data_parallel_wrappers_of_torch():
    assert run_ranks(look_into_data_parallel_wrappers, 1) == [[True] * 4]


def of_megatron(name, module, inner):
    """An instance of a class with the name and module of a wrapper of Megatron."""
    kind = type(name, (Wrapper,), {"__module__": module})
    return type("Derived", (kind,), {})(inner)


def test_wrappers_of_megatron_are_known_by_name():
    model = torch.nn.Linear(1, 1)
    fsdp = of_megatron("MegatronFSDP", "megatron_fsdp.megatron_fsdp", model)
    adapter = of_megatron(
        "FullyShardedDataParallel", "megatron.core.distributed.fsdp.mcore_fsdp_adapter", fsdp
    )
    half = of_megatron("Float16Module", "megatron.core.transformer.module", adapter)
    ddp = of_megatron("DistributedDataParallel", "megatron.core.distributed", half)
    assert unwrap_model([Float16Module(CONFIG, ddp)]) == [model]
    assert find_megatron_fsdp(ddp) is fsdp
    assert find_megatron_fsdp(model) is None
    other = of_megatron("Float16Module", "another.library", model)
    assert unwrap_model(other) is other
    assert not {name for name in sys.modules if name.partition(".")[0].startswith("megatron")}


def test_explicit_classes_replace_the_default():
    model = torch.nn.Linear(1, 1)
    wrapper = torch.nn.DataParallel(Wrapper(model))
    assert unwrap_model(wrapper, torch.nn.DataParallel) is wrapper.module
    assert unwrap_model(wrapper, (torch.nn.DataParallel, Wrapper)) is model
    assert unwrap_model(wrapper, ()) is wrapper
    assert unwrap_model(wrapper) is wrapper.module
    compiled = torch.compile(model)
    assert unwrap_model(compiled, type(compiled)) is model


def test_registered_wrappers_are_stripped():
    class Mine:
        def __init__(self, held):
            self.held = held

    assert isinstance(unwrap_model(Mine(1)), Mine)
    register_model_wrapper(Mine, attr="held")
    register_model_wrapper(Mine, "held")
    assert unwrap_model(Mine(Mine("model"))) == "model"
    with pytest.raises(ValueError, match="held"):
        register_model_wrapper(Mine)
    with pytest.raises(TypeError, match="class"):
        register_model_wrapper(Mine(1))


def test_a_wrapper_of_itself_is_an_error():
    class Loop:
        pass

    loop = Loop()
    loop.module = loop
    with pytest.raises(RuntimeError, match="wraps itself"):
        unwrap_model(loop, Loop)


def test_submodules_are_compared_by_identity():
    parent = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Identity()))
    assert is_submodule(parent[0], parent) is True
    assert is_submodule(parent[1][0], parent) is True
    assert is_submodule(parent, parent) is False
    assert is_submodule(parent, parent, strict=False) is True
    assert is_submodule(copy.deepcopy(parent[0]), parent) is False
    assert is_submodule(parent, parent[1]) is False


def test_lists_of_models():
    chunks = [1, 2]
    assert ensure_model_list is _ensure_model_list
    assert _ensure_model_list(chunks) is chunks
    assert _ensure_model_list((1, 2)) == [1, 2]
    with pytest.raises(TypeError, match="None"):
        _ensure_model_list(None)


def test_a_registered_wrapper_may_have_a_child_called_module_that_is_not_the_model():
    class WithHelper:
        def __init__(self):
            self.module = SimpleNamespace(kind="helper")
            self.inner = SimpleNamespace(kind="model")

    register_model_wrapper(WithHelper, attr="inner")
    assert get_attr_wrapped_model(WithHelper(), "kind") == "model"
