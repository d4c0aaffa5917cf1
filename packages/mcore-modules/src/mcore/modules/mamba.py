"""The state of Mamba layers that inference keeps for each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mcore.modules.config import read_field
from mcore.modules.wrappers import find_in_wrapped_models

_MAMBA_SYMBOL = "M"


@dataclass
class MambaInferenceStateConfig:
    """Shapes and dtypes of the states of a hybrid model's Mamba layers.

    Args:
        layer_type_list: The symbol of each layer, ``"M"`` for Mamba.
        mamba_conv_states_shape: Shape of a layer's convolution state for one request.
        mamba_ssm_states_shape: Shape of a layer's state-space state for one request.
        conv_states_dtype: Dtype of convolution states. With None the caller decides.
        ssm_states_dtype: Dtype of state-space states. With None the caller decides.
        mamba_chunk_size: Tokens that are processed at a time.

    Example:
        >>> MambaInferenceStateConfig(["M", "*"], (8, 4), (2, 16, 8)).conv_states_shape
        (8, 4)
    """

    layer_type_list: list[str]
    mamba_conv_states_shape: tuple[int, ...]
    mamba_ssm_states_shape: tuple[int, ...]
    conv_states_dtype: torch.dtype | None = None
    ssm_states_dtype: torch.dtype | None = None
    mamba_chunk_size: int = 128

    @property
    def conv_states_shape(self) -> tuple[int, ...]:
        """The shape of convolution states, by its newer name."""
        return self.mamba_conv_states_shape

    @property
    def ssm_states_shape(self) -> tuple[int, ...]:
        """The shape of state-space states, by its newer name."""
        return self.mamba_ssm_states_shape

    @classmethod
    def from_model(
        cls,
        model: Any,
        conv_states_dtype: torch.dtype | None = None,
        ssm_states_dtype: torch.dtype | None = None,
    ) -> MambaInferenceStateConfig | None:
        """Return the states that a model's Mamba layers need, or None without one on this rank.

        Args:
            model: One model, wrapped or not. Its ``decoder`` has ``layer_type_list`` and
                ``mamba_state_shapes_per_request()``.
            conv_states_dtype: Default: the configuration's ``params_dtype``, if it has one.
            ssm_states_dtype: Default: the same.

        Returns:
            The configuration. None without a decoder, without a list of layer types, without a
            Mamba layer in it, or if this pipeline stage has no shapes.

        Raises:
            ModelListError: ``model`` is a list or tuple.

        Example:
            >>> from types import SimpleNamespace
            >>> MambaInferenceStateConfig.from_model(SimpleNamespace()) is None
            True
        """
        decoder = find_in_wrapped_models(model, "decoder")
        layer_types = getattr(decoder, "layer_type_list", None)
        if layer_types is None or _MAMBA_SYMBOL not in layer_types:
            return None
        shapes = decoder.mamba_state_shapes_per_request()
        if shapes is None:
            return None
        conv_shape, ssm_shape = shapes
        dtype = read_field(find_in_wrapped_models(model, "config"), "params_dtype", None)
        return cls(
            layer_type_list=list(layer_types),
            mamba_conv_states_shape=tuple(conv_shape),
            mamba_ssm_states_shape=tuple(ssm_shape),
            conv_states_dtype=dtype if conv_states_dtype is None else conv_states_dtype,
            ssm_states_dtype=dtype if ssm_states_dtype is None else ssm_states_dtype,
        )


def get_mamba_inference_state_config_from_model(model: Any) -> MambaInferenceStateConfig | None:
    """Return :meth:`MambaInferenceStateConfig.from_model` with the dtypes of the model.

    Args:
        model: One model, wrapped or not.

    Returns:
        The configuration, or None if the model has no Mamba layers on this rank.

    Raises:
        ModelListError: ``model`` is a list or tuple.

    Example:
        >>> from types import SimpleNamespace
        >>> get_mamba_inference_state_config_from_model(SimpleNamespace()) is None
        True
    """
    return MambaInferenceStateConfig.from_model(model)
