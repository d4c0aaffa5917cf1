from types import SimpleNamespace

import pytest
import torch

from mcore.modules import (
    MambaInferenceStateConfig,
    ModelListError,
    get_mamba_inference_state_config_from_model,
)

SHAPES = ((8, 4), (2, 16, 8))


def hybrid(layers, shapes=SHAPES, **config):
    decoder = SimpleNamespace(layer_type_list=layers, mamba_state_shapes_per_request=lambda: shapes)
    return SimpleNamespace(
        module=SimpleNamespace(decoder=decoder, config=SimpleNamespace(**config))
    )


@pytest.mark.parametrize("layers", ["M*-M", ["M", "*", "-", "M"]])
def test_shapes_of_a_hybrid_model(layers):
    state = get_mamba_inference_state_config_from_model(hybrid(layers))
    assert state == MambaInferenceStateConfig(["M", "*", "-", "M"], *SHAPES)
    assert (state.conv_states_shape, state.ssm_states_shape) == SHAPES
    assert (state.mamba_chunk_size, state.conv_states_dtype) == (128, None)
    with pytest.raises(AttributeError):
        state.conv_states_shape = ()


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        SimpleNamespace(decoder=None),
        SimpleNamespace(decoder=SimpleNamespace()),
        SimpleNamespace(decoder=SimpleNamespace(layer_type_list=None)),
        hybrid("**-"),
        hybrid("M*", shapes=None),
    ],
)
def test_models_without_mamba_states_here(model):
    assert get_mamba_inference_state_config_from_model(model) is None


def test_dtypes_come_from_the_config_or_the_arguments():
    model = hybrid("M", params_dtype=torch.bfloat16)
    state = MambaInferenceStateConfig.from_model(model, ssm_states_dtype=torch.float32)
    assert state.conv_states_dtype is torch.bfloat16
    assert state.ssm_states_dtype is torch.float32
    state = MambaInferenceStateConfig.from_model(model, conv_states_dtype=torch.float32)
    assert state.conv_states_dtype is torch.float32
    assert state.ssm_states_dtype is torch.bfloat16


def test_a_config_shares_nothing_with_the_model_and_its_shapes_are_tuples():
    layers = ["M", "*"]
    model = hybrid(layers, shapes=([8, 4], [2, 16, 8]))
    state = get_mamba_inference_state_config_from_model(model)
    layers.append("-")
    assert state.layer_type_list == ["M", "*"]
    assert (state.conv_states_shape, state.ssm_states_shape) == SHAPES
    assert (state.mamba_conv_states_shape, state.mamba_ssm_states_shape) == SHAPES


def test_lists_of_models_are_refused():
    with pytest.raises(ModelListError):
        get_mamba_inference_state_config_from_model([hybrid("M")])
