import argparse
import copy
import dataclasses
import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mcore.modules import ConfigFieldError, TransformerConfig, is_using_quantization_scales
from mcore.modules.config import is_switched_on, read_field


def make(**fields):
    return TransformerConfig(
        **{"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, **fields}
    )


def test_what_depends_on_other_fields_is_filled_in():
    config = make(init_method_std=0.08)
    assert config.ffn_hidden_size == 48
    assert config.init_method.keywords["std"] == 0.08
    assert config.output_layer_init_method.keywords["std"] == pytest.approx(0.08 / 2)


def test_the_text_of_a_config_shows_fields_only():
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2)
    assert "_derived" not in repr(config)


def test_given_values_are_kept():
    config = make(ffn_hidden_size=7, init_method=torch.nn.init.zeros_)
    assert config.ffn_hidden_size == 7
    assert config.init_method is torch.nn.init.zeros_


def test_documented_defaults():
    documented = {
        "ffn_hidden_size": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "fp16": False,
        "bf16": False,
        "params_dtype": None,
        "fp8": None,
        "fp4": None,
        "use_kitchen": False,
        "quant_recipe": None,
        "symmetric_ar_type": None,
        "cuda_graph_impl": "none",
        "cuda_graph_warmup_steps": 3,
        "cuda_graph_retain_backward_graph": False,
        "fine_grained_activation_offloading": False,
        "init_method_std": 0.02,
        "init_method": None,
        "output_layer_init_method": None,
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "enable_cuda_graph": False,
        "external_cuda_graph": False,
    }
    fields = {
        field.name: field.default
        for field in dataclasses.fields(TransformerConfig)
        if not field.name.startswith("_")
    }
    required = {"num_layers", "hidden_size", "num_attention_heads"}
    assert {name: fields[name] for name in fields.keys() - required} == documented


SIZES = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_sizes_are_whole_numbers_from_one(name, value):
    with pytest.raises(ValueError) as caught:
        make(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"fp16": True, "bf16": True}, ["fp16=True", "bf16=True"]),
        ({"fp8": "e4m3", "fp4": "e2m1"}, ["fp8='e4m3'", "fp4='e2m1'"]),
        ({"sequence_parallel": True}, ["sequence_parallel=True", "tensor_model_parallel_size"]),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            ["virtual_pipeline_model_parallel_size=2", "pipeline_model_parallel_size"],
        ),
        ({"num_attention_heads": 5}, ["hidden_size=12", "num_attention_heads=5"]),
        ({"fp8": "e5m2"}, ["fp8='e5m2'"]),
        ({"fp8": False}, ["fp8=False"]),
        ({"fp4": "nv"}, ["fp4='nv'"]),
        ({"symmetric_ar_type": "three_shot"}, ["symmetric_ar_type='three_shot'"]),
        ({"cuda_graph_impl": "cuda"}, ["cuda_graph_impl='cuda'"]),
        ({"cuda_graph_impl": None}, ["cuda_graph_impl=None"]),
        ({"params_dtype": torch.int8}, ["params_dtype=torch.int8"]),
        ({"params_dtype": "float32"}, ["params_dtype='float32'"]),
        ({"cuda_graph_warmup_steps": -1}, ["cuda_graph_warmup_steps=-1"]),
        ({"init_method_std": -0.1}, ["-0.1"]),
    ],
)
def test_invalid_fields_are_named_with_their_values(fields, texts):
    with pytest.raises(ValueError) as caught:
        make(**fields)
    assert all(text in str(caught.value) for text in texts)


def test_valid_combinations_are_accepted():
    config = make(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=1,
        fp8="hybrid",
        cuda_graph_impl="full_iteration",
        params_dtype=torch.bfloat16,
    )
    config.validate()


@pytest.mark.parametrize(
    "fields",
    [
        {"symmetric_ar_type": "two_shot"},
        {"fine_grained_activation_offloading": True},
        {"perform_initialization": False},
        {"use_cpu_initialization": True},
    ],
)
def test_a_field_that_only_megatron_reads_warns_once(fields):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs = [make(**fields), make(**fields), make()]
    [warning] = caught
    [(name, value)] = fields.items()
    assert f"{name}={value!r} has no effect on layers of mcore.modules" in str(warning.message)
    assert warning.filename == __file__
    assert [getattr(config, name) == value for config in configs] == [True, True, False]


def test_fields_may_change_and_are_validated_on_request_only():
    config = make()
    config.fp16 = True
    config.bf16 = True
    with pytest.raises(ValueError, match="fp16=True"):
        config.validate()


@pytest.mark.parametrize(
    ("flag", "impl"),
    [("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")],
)
def test_deprecated_graph_flags_set_the_implementation(flag, impl):
    with pytest.warns(DeprecationWarning, match=f"{flag} is deprecated") as caught:
        config = make(**{flag: True})
    assert config.cuda_graph_impl == impl
    assert caught[0].filename in __file__
    assert getattr(config, flag) is True
    changed = dataclasses.replace(config, **{flag: False})
    assert (getattr(changed, flag), changed.cuda_graph_impl) == (False, "none")


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"bf16": True, "params_dtype": torch.float32}, torch.float32),
    ],
)
def test_dtype_of_parameters_follows_the_precision_unless_given(fields, dtype):
    assert make(**fields).params_dtype is dtype


def test_replace_sets_dependent_fields_anew():
    config = make(num_layers=2, hidden_size=12, bf16=True)
    changed = dataclasses.replace(config, num_layers=8, hidden_size=24, bf16=False)
    assert (changed.ffn_hidden_size, changed.params_dtype) == (96, torch.float32)
    assert changed.output_layer_init_method.keywords["std"] == pytest.approx(0.02 / 16**0.5)
    weight = torch.empty(400, 400)
    dataclasses.replace(config, init_method_std=3.0).init_method(weight)
    assert weight.std().item() == pytest.approx(3.0, rel=0.05)
    again = dataclasses.replace(changed, hidden_size=48)
    assert again.ffn_hidden_size == 192


def test_replace_keeps_values_that_were_given():
    given = {
        "ffn_hidden_size": 7,
        "params_dtype": torch.float64,
        "init_method": torch.nn.init.ones_,
    }
    config = dataclasses.replace(make(**given), hidden_size=24, num_attention_heads=2)
    assert {name: getattr(config, name) for name in given} == given
    assert dataclasses.replace(make(), hidden_size=24, ffn_hidden_size=5).ffn_hidden_size == 5


@dataclasses.dataclass
class Extended(TransformerConfig):
    kv_channels: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // self.num_attention_heads


def test_a_dataclass_may_extend_it_as_that_of_megatron():
    config = Extended(num_layers=1, hidden_size=12, num_attention_heads=4)
    assert (config.kv_channels, config.ffn_hidden_size) == (3, 48)
    assert dataclasses.replace(config, hidden_size=24).ffn_hidden_size == 96


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_cuda_graph": True, "external_cuda_graph": True},
        {"enable_cuda_graph": True, "cuda_graph_impl": "local"},
        {"external_cuda_graph": True, "cuda_graph_impl": "full_iteration"},
    ],
)
def test_deprecated_graph_flags_exclude_each_other_and_the_new_field(fields):
    with pytest.raises(ValueError, match="cuda_graph_impl"):
        make(**fields)


def test_flags_that_are_off_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(enable_cuda_graph=False).cuda_graph_impl == "none"


def test_configs_with_equal_fields_are_equal_after_copies_too():
    config = make(bf16=True)
    assert config == make(bf16=True)
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert config != make(fp16=True)
    assert dataclasses.replace(config, num_layers=3).num_layers == 3


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(bf16=True),
        argparse.Namespace(bf16=True),
        dataclasses.make_dataclass("Frozen", [("bf16", bool, True)], frozen=True)(),
        type("Class", (), {"bf16": True}),
    ],
)
def test_read_field_reads_any_object(config):
    assert read_field(config, "bf16") is True
    assert read_field(config, "fp8", None) is None


def test_read_field_reads_at_call_time():
    config = make()
    assert read_field(config, "fp16") is False
    config.fp16 = True
    assert read_field(config, "fp16") is True


def test_read_field_names_type_and_field_of_what_is_missing():
    with pytest.raises(ConfigFieldError) as caught:
        read_field(argparse.Namespace(), "hidden_size")
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, ValueError)
    assert "Namespace" in str(caught.value)
    assert "'hidden_size'" in str(caught.value)


def test_none_is_a_value_and_none_is_a_config():
    assert read_field(SimpleNamespace(fp8=None), "fp8") is None
    assert read_field(None, "fp8", "default") == "default"


@pytest.mark.parametrize("value", [None, False, "", 0, 0.0, np.False_, np.int64(0)])
def test_off(value):
    assert is_switched_on(value) is False


@pytest.mark.parametrize(
    "value", [True, "hybrid", 1, object(), [], torch.zeros(2), np.True_, np.zeros(2)]
)
def test_on(value):
    assert is_switched_on(value) is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"fp8": None, "fp4": False}, False),
        ({"fp8": "hybrid"}, True),
        ({"fp4": "e2m1"}, True),
        ({"fp8": ""}, False),
    ],
)
def test_quantisation_with_scales(fields, expected):
    assert is_using_quantization_scales(SimpleNamespace(**fields)) is expected
